"""What a Reducer, and a wrapper around a module, are set to and have done: for logs."""

import os
from typing import Any

import torch.distributed as dist

from ddp_from_scratch.buckets.bucket_list import AnyBucket
from ddp_from_scratch.comm_hooks.default_hooks import average
from ddp_from_scratch.reducer.reducer import Reducer


def facts(reducer: Reducer) -> dict[str, Any]:
    """Settings and buckets; keys as those of torch's DDP logging data, where they mean the same."""
    parameters = reducer._buckets.parameters
    hook = reducer.sending.hook
    told: dict[str, Any] = {
        "module_name": type(reducer.module).__name__,
        "bucket_cap_bytes": max(reducer._buckets.caps),
        "find_unused_parameters": int(reducer._usage.varies),
        "static_graph": int(reducer._usage.is_static),
        "gradient_as_bucket_view": int(reducer._buckets.gradient_as_bucket_view),
        "can_set_static_graph": reducer._usage.stayed,
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(parameter.nbytes for parameter in parameters),
        "bucket_sizes": ", ".join(str(_nbytes(bucket)) for bucket in reducer._buckets),
        "has_rebuilt_buckets": int(reducer.ready_order is not None),
        "iteration": reducer.iteration,
    }
    if hook is not average:
        told["comm_hook"] = getattr(hook, "__qualname__", str(hook))
    return told


def _nbytes(bucket: AnyBucket) -> int:
    return sum(parameter.nbytes for parameter in bucket.parameters())


def facts_of_wrapper(wrapper: Any, reducer: Reducer, builtin_hook: str | None) -> dict[str, Any]:
    """`facts` of its Reducer, and what a `DistributedDataParallel` knows beside it."""
    group = wrapper.process_group
    hook = {"comm_hook": builtin_hook} if builtin_hook else {}
    return {
        **facts(reducer),
        **hook,
        "world_size": dist.get_world_size(group),
        "rank": dist.get_rank(group),
        "backend_name": dist.get_backend(group),
        "device_ids": ", ".join(str(index) for index in wrapper.device_ids or ()),
        "output_device": -1 if wrapper.output_device is None else wrapper.output_device,
        "broadcast_buffers": int(wrapper.forward_sync_buffers),
        "has_sync_bn": any("SyncBatchNorm" in type(m).__name__ for m in wrapper.module.modules()),
        "join_uneven_inputs": wrapper._joinable.last_rank is not None,
        "torch_distributed_debug": os.environ.get("TORCH_DISTRIBUTED_DEBUG", "N/A"),
    }
