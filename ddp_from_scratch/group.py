"""The process group that a call is for, looked at before anything is sent."""

from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.nn import functional

_NOT_A_MEMBER = "this rank is not a member of the process group"


def check_group(process_group: Any) -> dist.ProcessGroup:
    """The group itself, or that of all ranks for None.

    Raises:
        RuntimeError: None is given, and no process group is open.
        TypeError: it is something else.
        ValueError: this rank is not in it.
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
    """Lets go of a default group that torch's functions hold as a default argument.

    They take the one that is open when `torch.distributed.nn.functional` is imported (torch.optim
    does so in the first step), and would keep it alive to the end, and with it gloo's threads,
    which now and then abort a Python that is about to end. None means the default group, too.
    """
    for function in vars(functional).values():
        if isinstance(function, FunctionType) and function.__defaults__ is not None:
            function.__defaults__ = tuple(
                None if isinstance(value, dist.ProcessGroup) else value
                for value in function.__defaults__
            )


# A group of torch's `init_process_group` may have been opened before this import.
_forget_default_group()


def on_gpu_of(module: torch.nn.Module) -> AbstractContextManager[Any]:
    """Makes the module's GPU the current one, where object collectives of nccl put their bytes.

    A program that has not chosen one would meet the others on the machine's first GPU.
    """
    first = next(module.parameters(), None)
    if first is None or first.device.type != "cuda":
        return nullcontext()
    return torch.cuda.device(first.device)


def of_member(work: dist.Work | None) -> dist.Work:
    """What a collective returned.

    Raises:
        ValueError: None, as on a rank that is not in the group.
    """
    if work is None:
        raise ValueError(_NOT_A_MEMBER)
    return work


def takes_cpu_tensors(process_group: dist.ProcessGroup | None) -> bool:
    """Whether collectives of the group take tensors on a CPU; nccl's do not."""
    return any(device.type == "cpu" for device in check_group(process_group)._device_types)


def gloo_beside(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A group of gloo with the same ranks and timeout. Collective."""
    group = check_group(process_group)
    timeout = group._get_backend(group._device_types[0]).options._timeout
    ranks = dist.get_process_group_ranks(group)
    return check_group(
        dist.new_group(ranks, timeout, backend="gloo", use_local_synchronization=True)
    )
