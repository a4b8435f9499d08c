"""Comm hooks: `average` is the default, others compress. `core/comm_hooks.py` has the contract."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch.backend.operations import caller
from ddp_from_scratch.backend.traits import traits
from ddp_from_scratch.core.bucket import FlatBucket, Future
from ddp_from_scratch.core.comm_hooks import Group, all_reduce, average, comm_hook

__all__ = ["allreduce_hook", "average", "bf16_compress_hook", "fp16_compress_hook"]


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
            return native.allreduce([buffer], inter_node_dtype=dtype).get_future()
        finally:
            caller.op_label = ""
    compressed = bucket.scratch(buffer.shape, dtype)
    compressed.copy_(buffer)
    return all_reduce(bucket, compressed, process_group)
