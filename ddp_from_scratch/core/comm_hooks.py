"""Comm hooks: each averages one bucket over the ranks and returns a future of the average.

    reducer.register_comm_hook(None, ddp.comm_hooks.bf16_compress_hook)

A hook is called as `hook(state, bucket) -> Future[Tensor]`, as by torch's DDP, so hooks for DDP run
here unchanged. `state` is what was registered with the hook, for this library's hooks a process
group (None means all ranks). `bucket` has the methods of torch's `dist.GradBucket`. The future's
value is the averaged flat tensor, of any floating dtype, or a list of only that tensor.

The division by the world size comes before the sum, as in torch's DDP: n summands of 1/n each
cannot overflow a 16-bit float where the average would not. A Reducer divides while it packs for
`average`, and for a hook with `hook.takes_divided = True`, which saves a pass over the bucket. If
another hook or torch's DDP calls them, `bucket.op` is None or missing, and they divide themselves.

A hook that starts exactly one collective declares it: `hook.one_collective = True`. Several buckets
may then be in flight. A second collective, as PowerSGD's, might come before the next bucket's on
one rank and after it on another.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch import gpu
from ddp_from_scratch.backend.operations import caller
from ddp_from_scratch.backend.process_group import SharedMemoryGroup
from ddp_from_scratch.core.bucket import Bucket, CommHook, Future
from ddp_from_scratch.group import of_member

Group = dist.ProcessGroup | None


def average(process_group: Group, bucket: Bucket) -> Future:
    """All-reduces the bucket to its average, with the bits of torch's DDP. The default."""
    op: Any = getattr(bucket, "op", None)  # torch's buckets have no such attribute
    if op is None:
        op = reduction(average, process_group)
        if op == dist.ReduceOp.SUM:
            bucket.buffer().mul_(1.0 / dist.get_world_size(process_group))
    # The collective's own future, whose value is a list: no callback runs on its thread.
    return all_reduce(bucket, bucket.buffer(), process_group, op)


def has_one_collective(hook: CommHook) -> bool:
    """True for `average`, and for a hook with `hook.one_collective = True`."""
    return hook is average or getattr(hook, "one_collective", False) is True


def reduction(hook: CommHook, state: Any) -> dist.ReduceOp.RedOpType | None:
    """Returns the reduction that averages. None leaves it to the hook; SUM divides in packing."""
    # Not NCCL's AVG, since NVSwitches (NVLS) compute sums of floats but no averages.
    group = state or dist.group.WORLD if hook is average else None
    if isinstance(group, SharedMemoryGroup) and group.divides_first:
        return dist.ReduceOp.AVG  # the same bits as a division before the sum
    divided = hook is average or getattr(hook, "takes_divided", False)
    return dist.ReduceOp.SUM if divided else None


def is_ours(hook: CommHook) -> bool:
    """True for the hooks of this package, which remember parameters and not buckets."""
    return getattr(hook, "__module__", "").startswith("ddp_from_scratch.")


def all_reduce(
    bucket: Bucket,
    tensor: torch.Tensor,
    process_group: Group,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> Future:
    """Starts to reduce a bucket's tensor in place; the future's value is a list of it."""
    # Ranks compare their operations; the suffix lets an error name the bucket.
    caller.suffix = f" for {getattr(bucket, 'name', 'a bucket')}"  # torch's have no name
    try:
        work = dist.all_reduce(tensor, op=op, group=process_group, async_op=True)
    finally:
        caller.suffix = ""
    if work is None:
        of_member(work)  # raises on a rank outside of the group
    return work.get_future() if tensor.is_cpu else _OnGPU(work, tensor)


class _OnGPU(Future):
    """The future of a collective on a GPU. Only `wait` makes the current stream wait for it."""

    def __init__(self, work: dist.Work, tensor: torch.Tensor) -> None:
        super().__init__()
        self._work, self._tensor = work, tensor

    def done(self) -> bool:
        return True  # the host never waits

    def wait(self) -> list[torch.Tensor]:
        self._work.wait()
        return self.value()

    def value(self) -> list[torch.Tensor]:
        return [self._tensor]

    def then(self, callback: Callable[[Any], Any]) -> Future:
        # On a second stream: from torch 2.15 on, `get_future` makes the current stream wait.
        with gpu.aside(self._tensor.device):
            return self._work.get_future().then(callback)
