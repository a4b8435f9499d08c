"""Backend registration: torch.distributed finds the node backend; a gloo group gets one beside it.

import ddp_from_scratch.node
torch.distributed.init_process_group("node")      # under torchrun, say
"""

import weakref
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch.group import open_beside
from ddp_from_scratch.node import semaphore
from ddp_from_scratch.node.process_group import ProcessGroupNode
from ddp_from_scratch.node.shared_memory_group import SharedMemoryGroup
from ddp_from_scratch.node.store_communicator import StoreCommunicator, open_gloo

_CPU = torch.device("cpu")


def register() -> None:
    """Registers the backend under its name, "node"."""
    # To others torch attaches a recorder, backend by backend; a group of ours has none but itself.
    recording: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recording.add(ProcessGroupNode.backend)
    dist.Backend.register_backend(
        ProcessGroupNode.backend, _create, extended_api=True, devices=["cpu"]
    )


def _create(options: Any, beside: "weakref.ref[dist.ProcessGroup] | None") -> ProcessGroupNode:
    """torch.distributed's factory; `beside` is a gloo group of the same ranks, if there is one."""
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    ranks = list(options.global_ranks_in_group) or list(range(size))
    if beside is None:
        own = open_gloo(options.store, rank, size, timeout)
    store = dist.PrefixStore("node", options.store)
    communicator = StoreCommunicator(store, rank, ranks, timeout)
    return ProcessGroupNode(communicator, timeout, beside or (lambda: own))


# For each gloo group the group that reduces in its place: itself, where no memory can be shared.
_beside: "weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[dist.ProcessGroup]]" = (
    weakref.WeakKeyDictionary()
)


def shared_memory_beside(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns the group through which the ranks of `group` reduce CPU tensors.

    A node group of the same ranks, opened at the first call and closed with `group`, if that is a
    gloo group and two of its ranks share a machine's memory; else `group` itself. Collective.
    """
    if not _is_gloo(group):
        return group
    found = _beside.get(group)
    reducing = None if found is None else found()
    if reducing is None:
        reducing = _open_beside(group)
        _beside[group] = weakref.ref(reducing)
    return reducing


def _is_gloo(group: dist.ProcessGroup) -> bool:
    return (
        semaphore.AVAILABLE
        and not isinstance(group, SharedMemoryGroup)
        and group.size() > 1
        and _CPU in group._device_types
        and group._get_backend(_CPU).name() == "gloo"
    )


def _open_beside(group: dist.ProcessGroup) -> dist.ProcessGroup:
    opened = open_beside(group, ProcessGroupNode.backend, weakref.ref(group))
    assert isinstance(opened, ProcessGroupNode), "this rank is in the group"
    if not opened.shares_memory:
        dist.destroy_process_group(opened)
        return group
    closing = weakref.finalize(group, _close, weakref.ref(opened))
    # Closing waits for what is under way: a rank that has failed would wait for the others.
    closing.atexit = False
    return opened


def _close(group: "weakref.ref[dist.ProcessGroup]") -> None:
    opened = group()
    # torch knows it no more if the program has closed all groups at once.
    if opened is not None and opened in dist.distributed_c10d._world.pg_map:
        dist.destroy_process_group(opened)
