"""Helpers for process groups: checks, waits, torch's private parts, and the gloo group beside one.

When a connection ends, gloo fails its operations, except for a message that is partly written or
is being written: `Pair::signalException` of the TCP transport skips those, and their collective
ends only with the group's timeout. So where ranks may be lost, each wait looks for a lost rank.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.nn import functional

from ddp_from_scratch.common import gpu
from ddp_from_scratch.common.errors import CommunicationError

# torch 2.14 renamed it, and warns about the old name.
all_gather_single: Callable[..., dist.Work | None] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)

_NOT_A_MEMBER = "this rank is not a member of the process group"


def check_group(process_group: Any) -> dist.ProcessGroup:
    """Returns the process group; None means all ranks. Raises unless this rank is a member."""
    if process_group is None:
        process_group = dist.group.WORLD
        if process_group is None:
            raise RuntimeError(
                "no process group is open: open one first, with ddp.process_group(backend) or "
                "torch.distributed.init_process_group(backend)"
            )
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(_NOT_A_MEMBER)
    if not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            f"process_group must be a torch.distributed.ProcessGroup or None, got "
            f"{type(process_group).__name__}; pass later arguments by keyword"
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


# `torch.distributed.nn.functional` keeps the group that is open at its import in default arguments
# (torch.optim imports it in the first step). The group's gloo threads would then live until the end
# of Python, which they sometimes abort. None also means the default group.
_forget_default_group()


def on_gpu_of(module: torch.nn.Module) -> AbstractContextManager[Any]:
    """Makes the module's GPU current for nccl's object collectives, not the machine's first."""
    first = next(module.parameters(), None)
    return nullcontext() if first is None else gpu.current(first.device)


def of_member(work: dist.Work | None) -> dist.Work:
    """Returns the work handle of a collective; a ValueError outside of the group."""
    if work is None:
        raise ValueError(_NOT_A_MEMBER)
    return work


def gather_objects(mine: Any, process_group: dist.ProcessGroup | None) -> list[Any]:
    """Returns every rank's object, by rank. Collective; the objects are pickled."""
    found: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(found, mine, group=process_group)
    return found


def takes_cpu_tensors(process_group: dist.ProcessGroup | None) -> bool:
    """True if the group's collectives take CPU tensors; nccl's do not."""
    return any(device.type == "cpu" for device in check_group(process_group)._device_types)


def substore(group: dist.ProcessGroup) -> dist.Store:
    """Returns a new part of the store that the group used for its rendezvous. Collective."""
    # Not `dist.new_group`, which all ranks of the job would have to call. Each rank counts its own
    # calls, so the ranks agree without a message, for which nccl would use the current GPU.
    store = dist.distributed_c10d._get_process_group_store(group)
    call = store.add(f"beside/{group.rank()}", 1)
    return dist.PrefixStore(f"beside {call}", store)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Returns how long a collective of the group may take."""
    timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return timeout


def open_gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Opens a gloo group that torch.distributed does not list. Collective."""
    store = dist.PrefixStore("gloo", store)
    group = dist.ProcessGroup(store, rank, size)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    backend = dist.ProcessGroupGloo(store, rank, size, timeout)
    group._register_backend(torch.device("cpu"), kind, backend)
    return group


# Keys are weak, so a gloo group ends with the group that it belongs to.
_gloo_beside = weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]()


def cpu_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Returns a group of the same ranks for CPU tensors. Collective.

    It is the group itself if that takes them, else an unlisted gloo group.
    """
    group = check_group(process_group)
    if takes_cpu_tensors(group):
        return group
    if group not in _gloo_beside:
        store, timeout = substore(group), timeout_of(group)
        _gloo_beside[group] = open_gloo(store, group.rank(), group.size(), timeout)
    return _gloo_beside[group]


# Waits that notice a lost rank -------------------------------------------------------------------

_LOOK_EVERY = timedelta(seconds=0.5)

# Tells whether a rank has left the default group; None in a job that ends with a lost rank.
_is_broken: Callable[[], bool] | None = None


def set_failure_detector(is_broken: Callable[[], bool]) -> None:
    """Sets the check that `wait` uses: it tells whether a rank has left the default group."""
    global _is_broken
    _is_broken = is_broken


def may_be_in_flight() -> bool:
    """True if unfinished collectives may be left behind, which may still write to their tensors."""
    return _is_broken is not None


def failure_detector() -> Callable[[], bool]:
    """Returns the current check, for waits in a group that opens now."""
    return _is_broken or (lambda: False)


def wait(work: dist.Work | None) -> None:
    """Waits for a collective of the default group: `ddp.wait(dist.all_reduce(t, async_op=True))`.

    In a run that replaces lost ranks (`ddp.elastic`), gloo may not end a collective with a lost
    rank before the group's timeout. This function ends it within half a second.

    Raises:
        CommunicationError: a rank has left the group.
        ValueError: this rank is not in the group of the collective.
    """
    work = of_member(work)
    if _is_broken is None:
        work.wait()
        return
    while True:
        try:
            work.wait(_LOOK_EVERY)
            return
        except RuntimeError:
            if work.is_completed():
                raise
        if _is_broken():
            raise CommunicationError("a rank of the group was lost")


def wait_all(works: Sequence[dist.Work]) -> None:
    """Waits for several collectives, in order."""
    for work in works:
        wait(work)


_EXCHANGE_TAG, _CLOSE_TAG = 2**30, 2**31 - 1  # no program uses these tags


def exchange(
    group: dist.ProcessGroup, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]
) -> list[dist.Work]:
    """Starts to send a tensor to each other rank and to receive one from each, all at once.

    On a wire between two hosts gloo's all-to-all and all-gather took up to twice as long, and its
    reduce-scatter sends as much as an all-reduce.
    """
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    works = []
    for rank in others:
        if received[rank].numel():
            works.append(dist.irecv(received[rank], group=group, group_src=rank, tag=_EXCHANGE_TAG))
    for rank in others:
        if sent[rank].numel():
            works.append(dist.isend(sent[rank], group=group, group_dst=rank, tag=_EXCHANGE_TAG))
    return [*map(of_member, works)]


def cut_connections(group: dist.ProcessGroup) -> None:
    """Closes a gloo group's connections, as a timeout in gloo does; `group.abort()` does not."""
    for peer in set(range(group.size())) - {group.rank()}:
        # No message arrives, so the timeout closes all connections; if closed, this raises at once.
        with suppress(RuntimeError):
            nothing = [torch.empty(0, dtype=torch.uint8, device="cpu")]
            group.recv(nothing, peer, _CLOSE_TAG).wait(timedelta(milliseconds=1))
