"""Messages that shared memory cannot replace: to set it up, and between machines.

The engine is handed a `Communicator` and imports no message-passing library. `mpi/communicator.py`
implements it over mpi4py. All-gather of objects also stands for a broadcast and for a barrier: it
is called when memory is mapped, never in a step.
"""

from collections.abc import Callable
from typing import Any, Protocol, Self

import torch

from ddp_from_scratch.node.reduction import Reduction


class Communicator(Protocol):
    """Ranks that exchange messages.

    Every method is collective: all ranks call it, in the same order. One thread at a time does.
    """

    @property
    def rank(self) -> int:
        """This rank's place among them."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def world_rank(self) -> int:
        """This rank's number in the whole job, by which errors name it."""

    def allgather(self, value: Any) -> list[Any]:
        """Every rank's value, in order of ranks. Returns after all ranks have called it."""

    def split(self, color: int) -> Self:
        """A communicator of the ranks that pass the same color, in the same order."""

    def split_by_machine(self) -> Self:
        """A communicator of the ranks that run on this rank's machine."""

    def free(self) -> None:
        """Releases the communicator."""

    # Between machines only: `Nodes` calls these where there are several.

    def begin_allgather(self, own: memoryview, gathered: memoryview) -> Callable[[], bool]:
        """Starts to gather equally many bytes of every rank into `gathered`.

        Returns:
            A poll, True once the bytes are there. A caller that stops polling before that has
            given up the group, and calls nothing else on the communicator.
        """

    def all_reduce(self, flat: torch.Tensor, reduction: Reduction) -> None:
        """Replaces a dense, flat tensor by the reduction of every rank's.

        Leaves the same bits on all ranks. 16-bit floats are summed in float32 and rounded once.
        """
