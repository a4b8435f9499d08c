"""Comm hooks: `average` is the default, others compress. `core/comm_hooks.py` has the contract."""

from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch.backend.all_reduce import crossing_in
from ddp_from_scratch.backend.operations import caller
from ddp_from_scratch.backend.traits import traits
from ddp_from_scratch.common.group import check_group, exchange, wait_all
from ddp_from_scratch.core.bucket import FlatBucket, Future
from ddp_from_scratch.core.comm_hooks import Group, all_reduce, average, comm_hook
from ddp_from_scratch.options.blockwise import Blockwise, Int8State

__all__ = [
    "Int8State",
    "allreduce_hook",
    "average",
    "bf16_compress_hook",
    "fp16_compress_hook",
    "int8_blockwise",
]


class Later(Future):
    """A future whose value is computed in the thread that waits, where it may communicate."""

    def __init__(self, compute: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self._compute = compute
        self._value: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        if self._value is None:
            self._value = self._compute()
        return self._value

    value = wait

    def then(self, callback: Callable[[Any], Any]) -> "Later":
        return Later(lambda: callback(self))


@comm_hook(one_collective=True)
def allreduce_hook(process_group: Group, bucket: FlatBucket) -> Future:
    """As `average`, but the future's value is a tensor, as hooks that wrap this one expect."""
    return average(process_group, bucket).then(lambda future: future.value()[0])


@comm_hook(one_collective=True, prescaled=True)
def fp16_compress_hook(process_group: Group, bucket: FlatBucket) -> Future:
    """Sends the bucket as float16: half the bytes, 11 bits of precision, values up to 65504.

    The hook divides before it casts, in the bucket's own precision, so values are rounded once and
    are as large as the average. Values below 6e-8 become 0. In shared memory only the sum of a
    machine is rounded, which is sent to the other machines.

    Follows: torch's `fp16_compress_hook`, which casts first and then divides.
    """
    return _compressed(torch.float16, process_group, bucket)


@comm_hook(one_collective=True, prescaled=True)
def bf16_compress_hook(process_group: Group, bucket: FlatBucket) -> Future:
    """Sends the bucket as bfloat16: half the bytes, 8 bits of precision, float32's range."""
    return _compressed(torch.bfloat16, process_group, bucket)


def _compressed(dtype: torch.dtype, process_group: Group, bucket: FlatBucket) -> Future:
    buffer = bucket.buffer()
    # A division: see `core/comm_hooks.py`.
    if bucket.op is None:  # not divided yet
        buffer.mul_(1.0 / dist.get_world_size(process_group))
    if buffer.element_size() <= dtype.itemsize:  # 16-bit gradients would not get smaller
        return all_reduce(bucket, bucket.buffer(), process_group)
    group = process_group or dist.group.WORLD
    if (native := traits(group).native) is not None:
        # Within a machine nothing is sent, so nothing is rounded.
        caller.op_label = f" for {bucket.name}"
        try:
            return native.allreduce([buffer], crossing=crossing_in(dtype)).get_future()
        finally:
            caller.op_label = ""
    compressed = bucket.scratch(buffer.shape, dtype)
    compressed.copy_(buffer)
    return all_reduce(bucket, compressed, process_group)


# Without shared memory it starts two collectives, the second while it is waited for. All ranks wait
# in the order of buckets, and only once all buckets are launched, so they call both in one order.
@comm_hook(one_collective=True)
def int8_blockwise(
    state: Int8State, bucket: FlatBucket, group: dist.ProcessGroup | None = None
) -> Future:
    """Sends matrices between machines as 8-bit integers: 0.254 of float32's bytes.

        reducer.register_comm_hook(ddp.comm_hooks.Int8State(), ddp.comm_hooks.int8_blockwise)

    `options/blockwise.py` explains the format and the error feedback. Ranks that share memory sum
    in float32; on a single machine the bits are those of `average`. Parameters of less than two
    dimensions are sent in float32, and so are all gradients of buckets of other dtypes.

    `group` is used instead of the state's group, and must have the same ranks. All ranks get the
    same bits. A value that is not finite makes its block not finite, so GradScaler skips the step;
    the part of the bucket with this block keeps its error.

    Raises:
        TypeError: the state is no `Int8State`.
        RuntimeError: the gradients are on a GPU.
    """
    if not isinstance(state, Int8State):
        raise TypeError(
            f"the state of int8_blockwise must be a ddp.comm_hooks.Int8State, got {state!r}"
        )
    if not bucket.flat.is_cpu:
        raise RuntimeError(
            f"int8_blockwise is for gradients on a CPU (gloo and mpi), and {bucket.name} is on "
            f"{bucket.flat.device}: use bf16_compress_hook"
        )
    group = group or check_group(state.process_group)
    size, native = dist.get_world_size(group), traits(group).native
    # A division: see `core/comm_hooks.py`.
    crossing = state.crossing(bucket, 1.0 / size) if bucket.flat.dtype == torch.float32 else None
    if crossing is None or size == 1 or traits(group).machines == 1:
        return allreduce_hook(group, bucket)
    if native is None:
        return _by_messages(crossing, bucket, group)
    caller.op_label = f" in 8 bits for {bucket.name}"
    try:
        return native.allreduce([bucket.buffer()], crossing=crossing).get_future()
    finally:
        caller.op_label = ""


def _by_messages(crossing: Blockwise, bucket: FlatBucket, group: dist.ProcessGroup) -> Future:
    buffer = bucket.buffer()
    exchanges = crossing.exchanges(buffer, 0, group.rank(), group.size())
    first = exchange(group, *next(exchanges))

    def finish() -> torch.Tensor:
        with closing(exchanges):  # after a failure, a second `wait` must not continue
            wait_all(first)
            for sent, received in exchanges:
                wait_all(exchange(group, sent, received))
        return buffer

    return Later(finish)
