"""torch.distributed's "mpi" backend over mpi4py, for torch wheels that were built without MPI.

Importing this module registers the backend:

    import ddp_from_scratch.mpi
    torch.distributed.init_process_group("mpi")      # under mpirun; ranks come from MPI

`BACKEND` holds the backend's name: "mpi" where torch looks for registered backends before its own,
and "mpi4py" where it insists on its own for "mpi" (older versions, and a torch that was built with
MPI). `ddp.process_group("mpi")` chooses the right one. With either name, an init_method of "mpi://"
takes from MPI the ranks, and the store through which groups of other backends meet:

    torch.distributed.init_process_group(ddp_from_scratch.mpi.BACKEND, init_method="mpi://")

A collective passes these files, from the top down:

    process_group.py      torch's call: numbered, given a handle (work.py)
    collectives.py        arguments checked, turned into an operation
    worker.py             the group's thread runs it while the caller continues
    node/barrier.py       the ranks meet: asleep until all have come, and compared
    node/all_reduce.py    all_reduce within a machine: sums in shared memory, no MPI
    transport.py          every other collective: MPI's call (datatypes.py: how it sees memory)

Messages between two ranks (p2p.py) pass none of these. `ddp_from_scratch.node` imports no MPI:
transport.py sends the few messages that it needs. torch_backend.py puts a group behind one of
torch's own: beside a backend for GPUs, or to have its calls noted (flight_recorder.py).
"""

import torch
import torch.distributed as dist

from ddp_from_scratch.mpi.backend import register
from ddp_from_scratch.mpi.process_group import ProcessGroupMPI
from ddp_from_scratch.mpi.runtime import broadcast_object, check_launcher, placement, store

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


BACKEND = register()
