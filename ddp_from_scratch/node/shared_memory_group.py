"""Abilities of process groups beyond torch's, as protocols."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist


@runtime_checkable
class SharedMemoryGroup(Protocol):
    """A process group whose ranks of one machine share memory. The mpi backend's is one.

    All but `is_shared` is collective.
    """

    def is_shared(self, tensor: torch.Tensor) -> bool:
        """True for a tensor in memory that the machine's ranks share, each rank's at a place."""

    def empty_for_all(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat uninitialised tensor that is the same memory on all ranks of a machine."""

    def reduce_to_owners(
        self,
        tensor: torch.Tensor,
        op: dist.ReduceOp.RedOpType,
        receive: Callable[[int, torch.Tensor], None],
        label: str,
    ) -> None:
        """Gives each rank its share of a reduction; see `AllReduce.to_owners`.

        Raises:
            CommunicationError: a rank did not come, or has another `label`.
        """

    def free_unused(self) -> None:
        """Gives memory back that no rank uses any more. Also a barrier."""

    def barrier(self) -> dist.Work:
        """Torch's."""


@runtime_checkable
class DividesFirst(Protocol):
    """A process group that says how its `ReduceOp.AVG` divides."""

    @property
    def divides_first(self) -> bool:
        """True where AVG divides the summands, not the sum: the bits of torch's DDP."""


@runtime_checkable
class InstallsStore(Protocol):
    """A default process group whose store torch may not have noted yet."""

    def install_store(self) -> None:
        """Makes the group's store the one that `torch.distributed` has noted. Idempotent."""
