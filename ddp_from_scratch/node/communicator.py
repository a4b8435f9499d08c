"""Messages that shared memory cannot replace: to set it up, and between machines.

Implemented by `store_communicator.py`, over torch's store and gloo, and `mpi/transport.py`.
"""

from collections.abc import Callable
from typing import Any, Protocol, Self

import torch

from ddp_from_scratch.node.reduction import Reduction


class Communicator(Protocol):
    """Ranks that exchange messages. Each method is collective, and called by one thread at a time.

    Attributes:
        rank, size: this rank's place among them, and their number.
        world_rank: its number in the whole job, by which errors name it.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def world_rank(self) -> int: ...

    # Also stands for a broadcast and a barrier: called when memory is mapped, never in a step.
    def allgather(self, value: Any) -> list[Any]:
        """Every rank's value, in order of ranks. Returns after all ranks have called it."""

    def split(self, color: int) -> Self:
        """A communicator of the ranks that pass the same color, in the same order."""

    def split_by_machine(self) -> Self:
        """A communicator of the ranks that run on this rank's machine."""

    def free(self) -> None: ...

    # Between machines only: `Nodes` calls these where there are several.

    def begin_allgather(self, own: memoryview, gathered: memoryview) -> Callable[[], bool]:
        """Starts to gather equally many bytes of every rank; returns a poll, True at the end.

        A caller that stops polling before that calls nothing else on the communicator.
        """

    def exchange(
        self, sent: torch.Tensor, sizes: list[int], received: torch.Tensor, expected: list[int]
    ) -> None:
        """Sends each rank its part of a dense, flat tensor, and receives one of each.

        `sizes` and `expected` are elements, by rank, as they lie in `sent` and in `received`.
        """

    def all_reduce(self, flat: torch.Tensor, reduction: Reduction) -> None:
        """Replaces a dense, flat tensor by the reduction of all, with the same bits on all ranks.

        16-bit floats are summed in float32 and rounded once.
        """
