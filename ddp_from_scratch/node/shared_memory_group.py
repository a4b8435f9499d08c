"""Abilities of process groups beyond torch's, as protocols."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist


@runtime_checkable
class SharedMemoryGroup(Protocol):
    """A process group whose ranks share memory. All but `is_shared` is collective."""

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

        Returns when this rank has it. Ranks with different labels all raise a CommunicationError.
        """

    def free_unused(self) -> None:
        """Gives memory back that no rank uses any more. Also a barrier."""

    def barrier(self) -> dist.Work: ...


@runtime_checkable
class DividesFirst(Protocol):
    """A process group whose `ReduceOp.AVG` may divide the summands, not the sum, as torch's DDP."""

    @property
    def divides_first(self) -> bool: ...


@runtime_checkable
class InstallsStore(Protocol):
    """A default process group whose store torch may not have noted yet."""

    def install_store(self) -> None:
        """Makes it the default one. Idempotent."""
