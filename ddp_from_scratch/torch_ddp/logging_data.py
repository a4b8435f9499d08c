"""Settings and statistics of a wrapper, as torch's DDP logging data."""

import os
from typing import Any

import torch.distributed as dist

from ddp_from_scratch.comm_hooks.default_hooks import average
from ddp_from_scratch.reducer.reducer import Reducer


def wrapper_data(wrapper: Any, reducer: Reducer, builtin_hook: str | None) -> dict[str, Any]:
    """Returns settings and statistics of a `DistributedDataParallel`.

    Their keys are those of torch's logging data if they mean the same.
    """
    group, stats = wrapper.process_group, reducer.stats()
    data = {
        "module_name": type(reducer.module).__name__,
        "bucket_cap_bytes": stats.bucket_cap_bytes,
        "find_unused_parameters": int(stats.find_unused_parameters),
        "static_graph": int(stats.static_graph),
        "gradient_as_bucket_view": int(stats.gradient_as_bucket_view),
        "num_parameter_tensors": stats.parameters,
        "total_parameter_size_bytes": stats.parameter_bytes,
        "bucket_sizes": ", ".join(map(str, stats.bucket_bytes)),
        "has_rebuilt_buckets": int(stats.rebuilt),
        "iteration": stats.iteration,
        "world_size": dist.get_world_size(group),
        "rank": dist.get_rank(group),
        "backend_name": dist.get_backend(group),
        "device_ids": ", ".join(str(index) for index in wrapper.device_ids or ()),
        "output_device": -1 if wrapper.output_device is None else wrapper.output_device,
        "broadcast_buffers": int(wrapper.forward_sync_buffers),
        "has_sync_bn": any("SyncBatchNorm" in type(m).__name__ for m in wrapper.module.modules()),
        "join_uneven_inputs": wrapper.joined_before(),
        "torch_distributed_debug": os.environ.get("TORCH_DISTRIBUTED_DEBUG", "N/A"),
    }
    if reducer.comm.hook is not average:
        # torch's name of a built-in hook, in place of the name of its function here.
        data["comm_hook"] = builtin_hook or stats.comm_hook
    return data
