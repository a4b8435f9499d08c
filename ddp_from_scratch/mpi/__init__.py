"""torch.distributed's "mpi" backend over mpi4py, for torch wheels that were built without MPI.

Importing this module registers the backend:

    import ddp_from_scratch.mpi
    torch.distributed.init_process_group("mpi")      # under mpirun; ranks come from MPI

From the version on where torch looks for a registered backend before its own, the name is "mpi".
An older torch insists on its own for that name and on being built with it, and a torch that was
built with MPI keeps its own; there the name is "mpi4py". `BACKEND` is the one that holds here, and
`ddp.process_group("mpi")` chooses it. By any name, an init_method of "mpi://" takes ranks and the
store through which groups of other backends meet from MPI:

    torch.distributed.init_process_group(ddp_from_scratch.mpi.BACKEND, init_method="mpi://")

How a collective travels: `process_group.py` takes torch's call and numbers it, `collectives.py`
turns it into an operation, which `worker.py` runs on the group's thread while the caller goes on.
There the ranks first meet (`node/barrier.py`), then call MPI (`datatypes.py` says how a tensor's
memory looks to it) or, to all-reduce on one machine, use memory that they share
(`node/all_reduce.py`).
"""

import inspect
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch.mpi.process_group import ProcessGroupMPI, create
from ddp_from_scratch.mpi.runtime import check_launcher, check_world, placement, share
from ddp_from_scratch.mpi.store import store

__all__ = ["BACKEND", "ProcessGroupMPI", "check_launcher", "empty", "placement", "share", "store"]


def empty(
    numel: int,
    dtype: torch.dtype = torch.float32,
    process_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """A flat tensor in memory that the machine's ranks share.

    `all_reduce` on it, or on a contiguous part of it, works in place and sends no message on the
    machine. Otherwise it is an ordinary CPU tensor. Collective: every rank of the group calls it,
    with the same arguments and in the same order among the group's other operations. The memory
    is given back when all ranks have dropped their tensors, at the next `empty` of the group or
    when the group is destroyed.

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


def _register() -> str:
    # torch that consults its registry for every backend names MPI there too; one that does not
    # goes to its C++ for the name "mpi" and never asks us.
    helper = inspect.getsource(dist.distributed_c10d._new_process_group_helper)
    name = "mpi4py" if "is_mpi_available" in helper or dist.is_mpi_available() else "mpi"
    # To others torch attaches a recorder, backend by backend; a group of ours has none but itself.
    recording: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recording.add(name)
    dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu"])
    if name == "mpi":
        # Programs ask `dist.is_mpi_available()` before they use the name; torch says what it was
        # built with. Not where the name is another: there torch would go on to its own C++.
        dist.distributed_c10d._MPI_AVAILABLE = True
    return name


def _rendezvous(
    url: str, timeout: timedelta = dist.default_pg_timeout, **options: Any
) -> Iterator[tuple[dist.Store, int, int]]:
    """What torch calls for "mpi://": the store, this rank, how many there are."""
    check_world()
    place = placement()
    yield store(place, timeout), place.rank, place.world_size
    raise RuntimeError("ranks of an MPI job meet once; they cannot meet anew")


BACKEND = _register()
dist.register_rendezvous_handler("mpi", _rendezvous)
