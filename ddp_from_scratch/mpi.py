"""torch.distributed's "mpi" backend over mpi4py, for torch wheels that were built without MPI.

Importing this module registers the backend:

    import ddp_from_scratch.mpi
    torch.distributed.init_process_group("mpi")      # under mpirun; ranks come from MPI

`BACKEND` holds the backend's name: "mpi" where torch looks for registered backends before its own,
and "mpi4py" where it insists on its own for "mpi" (older versions, and a torch that was built with
MPI). `ddp.process_group("mpi")` chooses the right one. With either name, an init_method of "mpi://"
takes from MPI the ranks, and the store through which groups of other backends meet:

    torch.distributed.init_process_group(ddp_from_scratch.mpi.BACKEND, init_method="mpi://")

"""

import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch.backend.mpi_group import ProcessGroupMPI, create_subgroup
from ddp_from_scratch.backend.mpi_tools import IS_OFFERED, CPUBackend, RecordedGroup, recorder_is_on
from ddp_from_scratch.backend.mpi_transport import (
    MPI,
    broadcast_object,
    check_launcher,
    check_world,
    is_placeholder,
    placement,
    store,
)

__all__ = [
    "BACKEND",
    "ProcessGroupMPI",
    "broadcast_object",
    "check_launcher",
    "empty",
    "placement",
    "store",
]


def empty(
    numel: int,
    dtype: torch.dtype = torch.float32,
    process_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """A flat tensor in memory that the machine's ranks share.

    `all_reduce` on it, or on a contiguous part of it, works in place and sends no message on the
    machine. Otherwise it is an ordinary CPU tensor. Collective: called with the same arguments on
    all ranks, in the order of the group's other operations. The memory is given back when all ranks
    have dropped their tensors, at the next `empty` of the group or at its end.

    Args:
        numel: number of elements.
        dtype: of the elements.
        process_group: an mpi group; None means the default group.

    Returns:
        Uninitialised tensor of shape (numel,).

    Raises:
        ValueError: the group is not an mpi group, or `numel` is negative.
        CommunicationError: a rank did not come, or there is no such memory left.
    """
    group = process_group or dist.distributed_c10d._get_default_group()
    if not isinstance(group, ProcessGroupMPI):
        raise ValueError(f"mpi.empty needs a group of the mpi backend, got {group.name()}")
    if numel < 0:
        raise ValueError(f"numel must be 0 or more, got {numel}")
    return group.empty(numel, dtype)


def register() -> str:
    """Registers backend and rendezvous; returns the name under which torch finds the backend."""
    # From 2.14 on torch looks every backend up in its registry; before, it goes to its C++ for the
    # name "mpi" and never asks us.
    name = "mpi" if torch.__version__ >= "2.14" and not dist.is_mpi_available() else "mpi4py"
    # To others torch attaches a recorder, backend by backend; a group of ours has none but itself,
    # and notes its calls by other means (`RecordedGroup`).
    recording: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recording.add(name)
    dist.Backend.register_backend(name, _create, extended_api=True, devices=["cpu"])
    dist.register_rendezvous_handler("mpi", _rendezvous)
    if name == "mpi":
        # Programs ask `dist.is_mpi_available()` before they use the name, and would hear what torch
        # was built with. Not where the name is another: there torch would go on to its own C++.
        dist.distributed_c10d._MPI_AVAILABLE = True
    return name


def _create(backend_options: Any, options: object) -> ProcessGroupMPI | CPUBackend:
    """torch.distributed's factory: the default group, or one of `new_group`'s (members only)."""
    group = _open(backend_options)
    # A group of ours takes the place of torch's own, whatever other backends that was to have: a
    # backend behind torch's has handles of torch's own, which tell less (`CPUBackend`). The name of
    # torch's own group is that of its backend for GPUs, and "custom" where it has none.
    if not IS_OFFERED or (whole := backend_options.process_group).name() == "custom":
        return group
    group.setGroupName(backend_options.group_id)
    group.setGroupDesc("on CPUs")
    _behind[whole] = backend = CPUBackend(group, backend_options.timeout)
    return backend


# Keeps the backend of each whole: where torch wraps one, for TORCH_DISTRIBUTED_DEBUG=DETAIL, it
# keeps no more than what C++ sees of it.
_behind: "weakref.WeakKeyDictionary[dist.ProcessGroup, CPUBackend]" = weakref.WeakKeyDictionary()


def _open(backend_options: Any) -> ProcessGroupMPI:
    timeout = backend_options.timeout
    kind = RecordedGroup if recorder_is_on() else ProcessGroupMPI
    ranks = list(backend_options.global_ranks_in_group)
    if ranks:
        return create_subgroup(MPI.COMM_WORLD, ranks, timeout, kind)
    check_world()  # before anything is collective: ranks that MPI sees alone would go on
    needs_store = is_placeholder(backend_options.store)
    own_store = store(placement(), timeout) if needs_store else None
    return kind(MPI.COMM_WORLD, timeout, store=own_store)


def _rendezvous(
    url: str, timeout: timedelta = dist.default_pg_timeout, **options: Any
) -> Iterator[tuple[dist.Store, int, int]]:
    """Torch's handler for "mpi://": yields the store, this rank and the number of ranks."""
    check_world()
    place = placement()
    yield store(place, timeout), place.rank, place.world_size
    raise RuntimeError("ranks of an MPI job meet once; they cannot meet anew")


BACKEND = register()
