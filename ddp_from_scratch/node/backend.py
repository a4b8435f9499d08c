"""Registers the node backend with torch.distributed; opens such a group beside a gloo group."""

import weakref
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch.group import store_beside, timeout_of
from ddp_from_scratch.node import semaphore
from ddp_from_scratch.node.process_group import ProcessGroupNode
from ddp_from_scratch.node.shared_memory_group import SharedMemoryGroup
from ddp_from_scratch.node.store_communicator import StoreCommunicator
from ddp_from_scratch.waiting import may_be_left_behind

_CPU = torch.device("cpu")


def register() -> None:
    """Registers the backend under its name, "node"."""
    # To others torch attaches a recorder, backend by backend; a group of ours has none but itself.
    recording: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recording.add(ProcessGroupNode.backend)
    dist.Backend.register_backend(
        ProcessGroupNode.backend, _create, extended_api=True, devices=["cpu"]
    )


def _create(options: Any, unused: object) -> ProcessGroupNode:
    """Makes torch.distributed's default group, or one of `new_group`'s (members only)."""
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return ProcessGroupNode.open(options.store, options.group_rank, ranks, options.timeout)


# For each gloo group the group that reduces in its place; None where no memory can be shared.
_beside: "weakref.WeakKeyDictionary[dist.ProcessGroup, ProcessGroupNode | None]" = (
    weakref.WeakKeyDictionary()
)


def shared_memory_beside(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns the group through which the ranks of `group` reduce CPU tensors.

    A node group of the same ranks, opened at the first call and closed with `group`, if that is a
    gloo group and two of its ranks share a machine's memory, or if it has one rank; else `group`
    itself. torch.distributed does not list it. Collective.
    """
    if not _is_gloo(group):
        return group
    if group not in _beside:
        _beside[group] = _open_beside(group)
    return _beside[group] or group


def abandon_beside(group: dist.ProcessGroup) -> None:
    """Ends what is under way in the group that `shared_memory_beside` has opened, if it has."""
    if (beside := _beside.pop(group, None)) is not None:
        beside.abandon()


def _is_gloo(group: dist.ProcessGroup) -> bool:
    return (
        semaphore.AVAILABLE
        and not isinstance(group, SharedMemoryGroup)
        and _CPU in group._device_types
        and group._get_backend(_CPU).name() == "gloo"
    )


def _open_beside(group: dist.ProcessGroup) -> ProcessGroupNode | None:
    timeout, ranks = timeout_of(group), dist.get_process_group_ranks(group)
    communicator = StoreCommunicator(store_beside(group), group.rank(), ranks, timeout)
    # A reference to gloo's group would keep its threads.
    opened = ProcessGroupNode(communicator, timeout, weakref.ref(group))
    # Between machines a wait for a lost rank might not end, nor could its thread be.
    left_behind = may_be_left_behind() and opened.machines > 1
    if (not opened.shares_memory and group.size() > 1) or left_behind:
        opened.shutdown()
        return None
    # Not at exit: closing waits for what is under way, and other ranks may wait for this one.
    weakref.finalize(group, opened.shutdown).atexit = False
    return opened
