"""torch.distributed's "mpi" backend over mpi4py, for torch wheels that were built without MPI.

Importing this module registers the backend:

    import ddp_from_scratch.mpi
    torch.distributed.init_process_group("mpi")      # under mpirun; ranks come from MPI

`BACKEND` holds the backend's name. It is "mpi" if torch prefers registered backends to its own, and
"mpi4py" if torch always uses its own for "mpi" (older versions, and builds with MPI).
`ddp.process_group("mpi")` chooses the right one. With either name, `init_method="mpi://"` takes the
ranks from MPI, and a store for the rendezvous of groups with other backends:

    torch.distributed.init_process_group(ddp_from_scratch.mpi.BACKEND, init_method="mpi://")
"""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial, partialmethod
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ddp_from_scratch.backend.mpi_group import MPI, ProcessGroupMPI, create_subgroup
from ddp_from_scratch.backend.process_group import register_backend
from ddp_from_scratch.common.errors import UsageError
from ddp_from_scratch.launch import environment
from ddp_from_scratch.launch.environment import Placement

__all__ = ["BACKEND", "ProcessGroupMPI", "empty", "placement", "store"]


def empty(
    numel: int, dtype: torch.dtype = torch.float32, process_group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Makes a flat, uninitialised tensor in memory that the machine's ranks share. Collective.

    `all_reduce` on it, or on a contiguous part of it, works in place and sends no message within
    the machine. In all other respects it is an ordinary CPU tensor. All ranks must call `empty`
    with the same arguments, in the same order as the group's other operations. The memory is freed
    once all ranks have dropped their tensors, at the group's next `empty` or at its end.

    Raises:
        ValueError: the group is not an mpi group, or `numel` is negative.
        CommunicationError: a rank is missing, or there is not enough shared memory.
    """
    group = process_group or dist.distributed_c10d._get_default_group()
    if not isinstance(group, ProcessGroupMPI):
        raise ValueError(f"mpi.empty needs a group of the mpi backend, got {group.name()}")
    if numel < 0:
        raise ValueError(f"numel must be 0 or more, got {numel}")
    return group.empty(numel, dtype)


# The job of MPI -----------------------------------------------------------------------------------


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
        elif environment.STARTED_HERE in environ:
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


# torch's C++ groups -------------------------------------------------------------------------------

# The flight recorder records only calls of C++ process groups. So each call to an mpi group goes
# through a C++ group, which records it and calls back to Python to run it.

# torch supports backends written in Python from 2.14 on.
IS_OFFERED = getattr(c10d, "FlightRecorderHook", None) is not None

Run = Callable[[str, tuple[Any, ...]], dist.Work]

# The calls that torch's group passes to a Python backend. It does not pass `gather_single`.
CALLS = (
    *("allgather", "allgather_coalesced", "all_gather_single", "all_gather_single_coalesced"),
    *("allreduce", "allreduce_coalesced", "alltoall", "all_to_all_single"),
    *("barrier", "broadcast", "gather", "scatter", "send", "recv", "recv_anysource"),
    *("reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
)


class TorchBackend(c10d.Backend):
    """A backend that passes the name and the arguments of each call to `run`."""

    # Without these attributes, torch recurses endlessly when it asks a Python backend for them.
    supports_coalescing = supports_splitting = supports_shrinking = False
    supports_reconfigure = supports_window = False
    options: Any = None

    def __init__(self, name: str, rank: int, size: int, run: Run) -> None:
        super().__init__(rank, size)
        self._name, self._run = name, run
        self.options = c10d.Backend.Options(name)

    def getBackendName(self) -> str:
        return self._name


class CPUBackend(TorchBackend):
    """Serves the CPU tensors of a torch group that has another backend for GPUs; closed with it.

    torch wraps the work handles of a Python backend: `is_completed()` of a wrapper stays False, and
    the wrapper of a receive from any source does not know the source.
    """

    def __init__(self, group: ProcessGroupMPI, timeout: timedelta) -> None:
        super().__init__(group.backend, group.rank(), group.size(), self._call)
        self._group = group
        self.options._timeout = timeout
        self._sequence = 0  # TORCH_DISTRIBUTED_DEBUG=DETAIL compares the ranks' numbers of calls

    def _call(self, name: str, arguments: tuple[Any, ...]) -> dist.Work:
        self._sequence += 1
        work: dist.Work = getattr(self._group, name)(*arguments)
        return work

    def _set_sequence_number_for_group(self) -> None:
        pass  # it starts at 0 on all ranks

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def set_timeout(self, timeout: timedelta) -> None:
        self._group.set_timeout(timeout)

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        self._group.monitored_barrier(opts.timeout, wait_all_ranks)

    def shutdown(self) -> None:
        self._group.shutdown()


for _name in CALLS:  # torch finds a method by its name in the class
    setattr(TorchBackend, _name, lambda self, *given, name=_name: self._run(name, given))
_Call = Callable[[], dist.Work]


def recorder_is_on() -> bool:
    """True if torch records this backend (from 2.15 on) and a variable sets the buffer's size."""
    # torch reads the first that is set. Its default is 2000; ours is off, which is faster.
    names = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
    name, size = next(((name, os.environ[name]) for name in names if os.environ.get(name)), ("", 0))
    try:
        # torch 2.14 records other backends, but under names that its own analyser cannot read.
        return torch.__version__ >= "2.15" and int(size) > 0
    except ValueError:
        raise UsageError(f"{name} must be a number of entries, got {size!r}") from None


class _OnItsWay(threading.local):
    call: _Call | None = None
    came_back = False
    work: dist.Work | None = None


class RecordedGroup(ProcessGroupMPI):
    """An mpi group that makes an entry in torch's flight recorder for each call."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._on_its_way = _OnItsWay()
        self._recorder: dist.ProcessGroup | None = None

    def _open_recorder(self) -> dist.ProcessGroup:
        """Makes a torch group of the same name, which owns the entries."""
        rank, size, kind = self.rank(), self.size(), dist.ProcessGroup.BackendType.MPI
        name: Any = self.getGroupName()  # torch's stubs declare a separate type
        group = dist.ProcessGroup(rank, size)  # type: ignore[call-arg, unused-ignore]
        group._set_default_backend(kind)
        # Weak, since torch's group holds the backend in C++, where the garbage collector finds no
        # cycle. The attribute keeps the Python part of the backend, which torch does not.
        come_back = weakref.WeakMethod(self._come_back)
        self._returns = TorchBackend(self.backend, rank, size, lambda *_: come_back()())  # type: ignore[misc]
        group._register_backend(torch.device("cpu"), kind, self._returns)
        group._set_group_name(name)
        group._set_group_desc(self.getGroupDesc())
        ranks: Any = self._nodes.everyone.world_ranks
        self._hook = c10d.FlightRecorderHook.attach(group, ranks)
        return group

    def note(self, name: str, *arguments: Any, **options: Any) -> dist.Work:
        call: _Call = partial(getattr(super(), name), *arguments, **options)
        mine = self._on_its_way
        if mine.call is not None:
            return call()  # part of a call that is already recorded
        if self._recorder is None:  # not in __init__: torch names a group after it is made
            self._recorder = self._open_recorder()
        mine.call, mine.came_back, mine.work = call, False, None
        try:
            try:
                getattr(self._recorder, name)(*arguments, **options)
            except Exception:
                if mine.came_back:
                    raise
            # Not torch's handle, which knows neither the end of the call nor a message's source. If
            # torch rejects the tensors there is no handle, and this group's own call raises.
            return mine.work or call()
        finally:
            mine.call = mine.work = None

    def _come_back(self) -> dist.Work:
        mine = self._on_its_way
        assert mine.call is not None, "calls come through `note` alone"
        mine.came_back = True
        mine.work = mine.call()
        return mine.work

    def shutdown(self) -> None:
        super().shutdown()
        self._recorder = None  # breaks a cycle through C++, which the collector cannot find


for _name in CALLS:
    setattr(RecordedGroup, _name, partialmethod(RecordedGroup.note, _name))


# torch's backend ----------------------------------------------------------------------------------


def register() -> str:
    """Registers backend and rendezvous; returns the name under which torch finds the backend."""
    # From 2.14 on torch looks up every backend in its registry, before only those with other names.
    name = "mpi" if torch.__version__ >= "2.14" and not dist.is_mpi_available() else "mpi4py"
    register_backend(name, _create)
    dist.register_rendezvous_handler("mpi", _rendezvous)
    if name == "mpi":
        # Programs ask this before they use "mpi". Under another name torch would use its own.
        dist.distributed_c10d._MPI_AVAILABLE = True
    return name


def _create(backend_options: Any, options: object) -> ProcessGroupMPI | CPUBackend:
    timeout = backend_options.timeout
    kind = RecordedGroup if recorder_is_on() else ProcessGroupMPI
    if ranks := list(backend_options.global_ranks_in_group):
        group = create_subgroup(MPI.COMM_WORLD, ranks, timeout, kind)
    else:
        check_world()  # before any collective: a rank that MPI takes for a job would not notice
        needs_store = is_placeholder(backend_options.store)
        own_store = store(placement(), timeout) if needs_store else None
        group = kind(MPI.COMM_WORLD, timeout, store=own_store)
    # If torch's group has no backend for GPUs, its name is "custom", and our group replaces it. A
    # backend behind torch's group has poorer work handles (`CPUBackend`).
    if not IS_OFFERED or (whole := backend_options.process_group).name() == "custom":
        return group
    group.setGroupName(backend_options.group_id)
    group.setGroupDesc("on CPUs")
    _behind[whole] = backend = CPUBackend(group, timeout)
    return backend


# Keeps each backend alive: with TORCH_DISTRIBUTED_DEBUG=DETAIL, torch keeps only its C++ part.
_behind: weakref.WeakKeyDictionary[dist.ProcessGroup, CPUBackend] = weakref.WeakKeyDictionary()


def _rendezvous(
    url: str, timeout: timedelta = dist.default_pg_timeout, **options: Any
) -> Iterator[tuple[dist.Store, int, int]]:
    check_world()
    place = placement()
    yield store(place, timeout), place.rank, place.world_size
    raise RuntimeError("ranks of an MPI job meet once; they cannot meet a second time")


BACKEND = register()
