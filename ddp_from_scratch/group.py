"""Checks a process group before anything is sent through it, and opens others beside it."""

import weakref
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.nn import functional

_NOT_A_MEMBER = "this rank is not a member of the process group"


def check_group(process_group: Any) -> dist.ProcessGroup:
    """Returns the group itself; None stands for all ranks.

    Raises:
        RuntimeError: `process_group` is None, and no process group is open.
        TypeError: `process_group` is something else.
        ValueError: this rank is not in the group.
    """
    if process_group is None:
        process_group = dist.group.WORLD
        if process_group is None:
            raise RuntimeError(
                "no process group is open: open one before, with ddp.process_group(backend) or "
                "torch.distributed.init_process_group(backend)"
            )
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(_NOT_A_MEMBER)
    if not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            f"process_group must be a torch.distributed.ProcessGroup or None, got "
            f"{type(process_group).__name__}; what comes behind it is given by name"
        )
    if dist.get_rank(process_group) < 0:
        raise ValueError(_NOT_A_MEMBER)
    return process_group


def _forget_default_group() -> None:
    """Replaces the default group by None in the default arguments of torch's functions."""
    for function in vars(functional).values():
        if isinstance(function, FunctionType) and function.__defaults__ is not None:
            function.__defaults__ = tuple(
                None if isinstance(value, dist.ProcessGroup) else value
                for value in function.__defaults__
            )


# `torch.distributed.nn.functional` takes the group that is open while it is imported as a default
# argument (torch.optim imports it in the first step). So the group, and gloo's threads with it,
# would live to the end of Python, which they sometimes abort. None means the default group, too.
#
# Called at import, since a group may have been opened before.
_forget_default_group()


def on_gpu_of(module: torch.nn.Module) -> AbstractContextManager[Any]:
    """Makes the module's GPU current for nccl's object collectives, which put their bytes there."""
    first = next(module.parameters(), None)
    # Without this, ranks that never chose a GPU would all use the machine's first.
    if first is None or first.device.type != "cuda":
        return nullcontext()
    return torch.cuda.device(first.device)


def of_member(work: dist.Work | None) -> dist.Work:
    """Returns the work of a collective.

    Raises:
        ValueError: `work` is None: this rank is not in the group.
    """
    if work is None:
        raise ValueError(_NOT_A_MEMBER)
    return work


def takes_cpu_tensors(process_group: dist.ProcessGroup | None) -> bool:
    """True if the group's collectives take CPU tensors; nccl's do not."""
    return any(device.type == "cpu" for device in check_group(process_group)._device_types)


def gloo_beside(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Opens a gloo group with the same ranks and timeout. Collective."""
    return open_beside(check_group(process_group), "gloo")


# Of each group, the groups that were opened beside it so far: the same number on all its ranks.
_opened_beside: "weakref.WeakKeyDictionary[dist.ProcessGroup, int]" = weakref.WeakKeyDictionary()


def open_beside(group: dist.ProcessGroup, backend: str, options: Any = None) -> dist.ProcessGroup:
    """Opens a group of this backend with the same ranks and timeout. Collective."""
    # Not by `dist.new_group`, which names groups by their number on this rank. Where ranks are in
    # different groups, these differ, and the ranks would wait for each other under two names; or
    # they would differ from now on, for the program's next `new_group`.
    number = _opened_beside[group] = _opened_beside.get(group, 0) + 1
    ranks = dist.get_process_group_ranks(group)
    opened, _ = c10d._new_process_group_helper(
        group.size(),
        group.rank(),
        ranks,
        backend,
        c10d._get_default_store(),
        c10d.GroupName(f"{backend} {number} beside {c10d._get_process_group_name(group)}"),
        backend_options=options,
        timeout=group._get_backend(group._device_types[0]).options._timeout,
        device_id=c10d._get_default_group().bound_device_id,
    )
    assert isinstance(opened, dist.ProcessGroup), "this rank is in the group"
    c10d._world.pg_group_ranks[opened] = {rank: index for index, rank in enumerate(ranks)}
    return opened
