"""Store of an MPI job, through which groups of other backends meet."""

import os
import socket
import tempfile
from datetime import timedelta

import torch.distributed as dist

from ddp_from_scratch.launch.environment import Placement
from ddp_from_scratch.mpi.runtime import broadcast_object


def store(placement: Placement, timeout: timedelta) -> dist.Store:
    """A store that all ranks of the MPI job share. Collective.

    On one machine a private file without a name, on several a port that rank 0 opens.
    """
    if placement.one_machine:
        file = broadcast_object(_private_file() if placement.rank == 0 else None)
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


def replace_placeholder(group: dist.ProcessGroup, store: dist.Store) -> bool:
    """Replaces the store that torch noted for a group; False before it has noted one."""
    noted = dist.distributed_c10d._world.pg_map
    if group not in noted:
        return False
    noted[group] = (noted[group][0], store)
    return True


def _private_file() -> str:
    handle, name = tempfile.mkstemp(prefix="ddp-")
    os.close(handle)
    return name
