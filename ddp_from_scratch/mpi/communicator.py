"""Communicator of the shared-memory engine, over mpi4py."""

from collections.abc import Callable
from typing import Any, cast

import torch

from ddp_from_scratch.mpi import inter_node
from ddp_from_scratch.mpi.runtime import MPI
from ddp_from_scratch.node.reduction import Reduction


class MPICommunicator:
    """`node.communicator.Communicator` over mpi4py's, the `handle`, which `free` releases."""

    def __init__(self, handle: MPI.Intracomm) -> None:
        self.handle = handle
        self.rank, self.size = handle.rank, handle.size
        self.world_rank = MPI.COMM_WORLD.rank

    def allgather(self, value: Any) -> list[Any]:
        return self.handle.allgather(value)

    def split(self, color: int) -> "MPICommunicator":
        return MPICommunicator(cast(MPI.Intracomm, self.handle.Split(color)))

    def split_by_machine(self) -> "MPICommunicator":
        here = self.handle.Split_type(MPI.COMM_TYPE_SHARED)
        return MPICommunicator(cast(MPI.Intracomm, here))

    def free(self) -> None:
        self.handle.Free()

    def begin_allgather(self, own: memoryview, gathered: memoryview) -> Callable[[], bool]:
        # The bound method keeps the request, and with it both buffers, alive.
        return self.handle.Iallgather(own, gathered).Test

    def exchange(
        self, sent: torch.Tensor, sizes: list[int], received: torch.Tensor, expected: list[int]
    ) -> None:
        inter_node.exchange(self.handle, sent, sizes, received, expected)

    def all_reduce(self, flat: torch.Tensor, reduction: Reduction) -> None:
        inter_node.all_reduce(self.handle, flat, reduction)
