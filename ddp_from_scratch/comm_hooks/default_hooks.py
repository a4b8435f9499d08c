"""Comm hooks that average a bucket with one all-reduce, in full precision or compressed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch import gpu
from ddp_from_scratch.buckets.bucket import Bucket
from ddp_from_scratch.buckets.gradient_bucket import CommHook
from ddp_from_scratch.group import of_member
from ddp_from_scratch.node.fingerprint import caller
from ddp_from_scratch.node.shared_memory_group import SharedMemoryGroup


class Later(torch.futures.Future[Any]):
    """A future whose value is computed by the thread that waits for it."""

    def __init__(self, compute: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self._compute = compute
        self._value: torch.Tensor | None = None

    # A callback of the first collective would be simpler, but not every backend can start a
    # collective inside a callback.
    def wait(self) -> torch.Tensor:
        """Computes the value the first time."""
        if self._value is None:
            self._value = self._compute()
        return self._value

    def value(self) -> torch.Tensor:
        """Returns the result of `wait`."""
        return self.wait()

    def then(self, callback: Callable[[Any], Any]) -> "Later":
        """Returns a future that runs `callback` when it is waited for."""
        return Later(lambda: callback(self))


Future = torch.futures.Future[Any]


def average(process_group: dist.ProcessGroup | None, bucket: Bucket) -> Future:
    """All-reduces the bucket to its average over ranks, in full precision. The default.

    The result has the same bits as torch's DDP.
    """
    # The division comes before the sum, as in torch's DDP: n summands of 1/n each cannot overflow a
    # 16-bit float where the average would not.
    # The future is the collective's own, whose value is a list: nothing runs on its thread.
    return _divided(average, process_group, bucket)


def while_packing(hook: CommHook, state: Any) -> tuple[CommHook, float]:
    """Splits a hook into the hook that runs after packing and a factor that packing multiplies by.

    Hooks other than `average` and its compressed forms are not split: their factor is 1.
    """
    if hook not in _AFTER_DIVISION:
        return hook, 1.0
    if hook is average and _backend_divides(state):
        return _average_by_backend, 1.0
    # Multiplying the whole bucket after packing would cost one more pass over memory.
    return _AFTER_DIVISION[hook], 1.0 / dist.get_world_size(state)


def _divided(hook: CommHook, process_group: dist.ProcessGroup | None, bucket: Bucket) -> Future:
    rest, factor = while_packing(hook, process_group)
    if factor != 1:
        bucket.buffer().mul_(factor)
    return rest(process_group, bucket)


def _backend_divides(process_group: dist.ProcessGroup | None) -> bool:
    """True if the backend has ReduceOp.AVG, with the bits of a division before the sum."""
    if not dist.is_initialized():
        return False
    group = process_group or dist.group.WORLD
    # Not NCCL's AVG: NVSwitches (NVLS) compute sums of floats, but no averages.
    return isinstance(group, SharedMemoryGroup) and group.divides_first


def _sum(process_group: dist.ProcessGroup | None, bucket: Bucket) -> Future:
    return _all_reduce(bucket, bucket.buffer(), process_group)


def _average_by_backend(process_group: dist.ProcessGroup | None, bucket: Bucket) -> Future:
    return _all_reduce(bucket, bucket.buffer(), process_group, dist.ReduceOp.AVG)


def keep_local(state: Any, bucket: Bucket) -> Future:
    """Sends nothing: the bucket keeps this rank's gradients."""
    future: Future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def allreduce_hook(process_group: dist.ProcessGroup | None, bucket: Bucket) -> Future:
    """Averages as `average` does, with a future of one tensor, for hooks that wrap this one."""
    return average(process_group, bucket).then(lambda future: future.value()[0])


def fp16_compress_hook(process_group: dist.ProcessGroup | None, bucket: Bucket) -> Future:
    """Sends the bucket as float16: half the bytes, 11 bits of precision, values up to 65504.

    The division comes before the cast, in the bucket's own precision. So the sent values are as
    large as the average, and rounded once. Values below 6e-8 become 0. In shared memory only what
    crosses between machines is rounded: a machine's sum.

    Follows: torch's `fp16_compress_hook`, which casts first and then divides.
    """
    return _divided(fp16_compress_hook, process_group, bucket)


def bf16_compress_hook(process_group: dist.ProcessGroup | None, bucket: Bucket) -> Future:
    """Sends the bucket as bfloat16: half the bytes, 8 bits of precision, float32's range.

    Runs on every backend; torch's own refuses builds without NCCL.
    """
    return _divided(bf16_compress_hook, process_group, bucket)


def _sum_in(dtype: torch.dtype, process_group: dist.ProcessGroup | None, bucket: Bucket) -> Future:
    buffer = bucket.buffer()
    if buffer.is_complex():
        buffer = torch.view_as_real(buffer)
    # A bucket of 16-bit gradients would not get smaller.
    if buffer.element_size() <= dtype.itemsize:
        return _sum(process_group, bucket)
    group = process_group or dist.group.WORLD
    if isinstance(group, SharedMemoryGroup):
        # Nothing is sent within a machine, so nothing is rounded there.
        with _named(bucket):
            return group.sum_compressed(buffer, dtype).get_future()
    compressed = bucket.scratch(buffer.shape, dtype)
    compressed.copy_(buffer)
    return _all_reduce(bucket, compressed, process_group)


_AFTER_DIVISION: dict[CommHook, CommHook] = {
    average: _sum,
    fp16_compress_hook: partial(_sum_in, torch.float16),
    bf16_compress_hook: partial(_sum_in, torch.bfloat16),
}


@contextmanager
def _named(bucket: Bucket) -> Iterator[None]:
    """Lets an error name the bucket, where ranks compare what they have come for."""
    caller.suffix = f" for {getattr(bucket, 'name', 'a bucket')}"  # torch's have no name
    try:
        yield
    finally:
        caller.suffix = ""


def _all_reduce(
    bucket: Bucket,
    tensor: torch.Tensor,
    process_group: dist.ProcessGroup | None,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> Future:
    with _named(bucket):
        work = dist.all_reduce(tensor, op=op, group=process_group, async_op=True)
    # `work` is None on a rank outside of the group, where `of_member` raises.
    work = work or of_member(work)
    if not gpu.is_gpu(tensor.device):
        return work.get_future()
    # From torch 2.15 on, NCCL makes the current stream wait for the collective here.
    with gpu.aside(tensor.device):
        return work.get_future()


# Hooks with at most one collective for each bucket. A hook that starts a second one when the first
# has landed, as PowerSGD does, might start it before the next bucket's on one rank and after it on
# another: ranks would no longer issue the same collectives in the same order.
_ONE_COLLECTIVE = frozenset(
    {average, keep_local, allreduce_hook, fp16_compress_hook, bf16_compress_hook}
)


def may_overlap(hook: CommHook) -> bool:
    """True if several buckets may be under way with this hook at a time.

    So it is for the hooks above, and for one that says of itself: `hook.one_collective = True`.
    """
    return hook in _ONE_COLLECTIVE or getattr(hook, "one_collective", False) is True


def is_ours(hook: CommHook) -> bool:
    """True for a hook of this package: such hooks remember parameters, not buckets."""
    return getattr(hook, "__module__", "").startswith("ddp_from_scratch.")
