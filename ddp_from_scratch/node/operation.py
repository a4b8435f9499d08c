"""Operation: one rank's part of a collective, to be run once the other ranks have come."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ddp_from_scratch.errors import NoSharedMemory
from ddp_from_scratch.node.barrier import CheckedBarrier

Result = list[torch.Tensor]


@dataclass(slots=True)
class Operation:
    """This rank's part of a collective. Its tensors live as long as it does.

    Attributes:
        fingerprint: the same on all ranks that call the same operation; errors print it.
        run: called once all have come; communicates, and may return tensors.
        prepare: called before, in the operation's turn; returns a detail of the call in which the
            ranks may differ (`CheckedBarrier.same_place`).
    """

    fingerprint: str
    run: Callable[[], Result | None]
    prepare: Callable[[], str] = str


def run_in_turn(operations: Sequence[Operation], barrier: CheckedBarrier, seconds: float) -> Result:
    """Prepares, meets and runs, one operation after another; `seconds` are for each to meet."""
    result: Result = []
    for operation in operations:
        # Only when the one before has ended: both write to the same memory.
        place = operation.prepare()
        try:
            # The timeout begins here, not when the call was made: others may run before it.
            barrier.meet(operation.fingerprint, place, seconds)
            result += operation.run() or []
        except NoSharedMemory:
            raise  # on all ranks alike: none waits for another one, and the group goes on
        except BaseException as error:  # Ctrl-C, too, or an error of a signal's handler
            barrier.break_off(error)
            raise
    return result
