"""What a Reducer is set to and has done, for logs."""

from typing import Any

from .comm_hooks import average
from .reducer import Reducer


def facts(reducer: Reducer) -> dict[str, Any]:
    """Settings and buckets; keys as those of torch's DDP logging data, where they mean the same."""
    parameters = reducer._buckets.parameters
    hook = reducer._comm_hook
    told: dict[str, Any] = {
        "module_name": type(reducer.module).__name__,
        "bucket_cap_bytes": max(reducer._buckets.caps),
        "find_unused_parameters": int(reducer._usage.varies),
        "static_graph": int(reducer._usage.is_static),
        "gradient_as_bucket_view": int(reducer._buckets.gradient_as_bucket_view),
        "can_set_static_graph": reducer._usage.stayed,
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(parameter.nbytes for parameter in parameters),
        "bucket_sizes": ", ".join(str(bucket.buffer().nbytes) for bucket in reducer._buckets),
        "has_rebuilt_buckets": int(reducer.ready_order is not None),
        "iteration": reducer.iteration,
    }
    if hook is not average:
        told["comm_hook"] = getattr(hook, "__qualname__", str(hook))
    return told
