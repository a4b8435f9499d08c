"""What a process group can do beyond torch's: code above the backend asks for it here."""

from typing import NamedTuple

import torch.distributed as dist

from ddp_from_scratch.backend.process_group import SharedMemoryGroup


class GroupTraits(NamedTuple):
    """The defaults are what gloo's and nccl's groups answer."""

    # AVG has the bits of torch's DDP, which divides before it sums.
    divides_first: bool = False
    # Two ranks of a machine reduce in memory that they share.
    shares_memory: bool = False
    # None if the group does not know how many machines its ranks are on.
    machines: int | None = None
    # The group itself, for calls that torch.distributed does not have; None if it has none.
    native: SharedMemoryGroup | None = None


def traits(group: dist.ProcessGroup | None) -> GroupTraits:
    """Returns what this group can do now; it may later fail to get memory. None can do nothing."""
    if not isinstance(group, SharedMemoryGroup):
        return GroupTraits()
    return GroupTraits(group.divides_first, group.shares_memory, group.machines, group)
