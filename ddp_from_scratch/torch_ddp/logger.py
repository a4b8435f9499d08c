"""What `_get_ddp_logging_data()` tells of a wrapper, under the names of torch's `dist.Logger`."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch.core.comm_hooks import average


@dataclass(frozen=True)
class LoggingData:
    """As torch's `DDPLoggingData`."""

    strs_map: dict[str, str]
    ints_map: dict[str, int]


class Logger:
    """Knows settings, buckets and the last error of a wrapper, but takes no times."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = weakref.ref(wrapper)  # its hooks are removed when it is freed
        self._comm_hook: str | None = None  # the name that torch gives to one of its own
        self._error: str | None = None

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Records an error that is raised inside."""
        try:
            yield
        except Exception as error:
            self.set_error_and_log(f"{type(error).__name__}: {error}")
            raise

    def set_error_and_log(self, error: str) -> None:
        """Records an error."""
        self._error = error

    def _set_comm_hook_name(self, name: str) -> None:
        self._comm_hook = name

    def _get_ddp_logging_data(self) -> LoggingData:
        wrapper = self._wrapper()
        assert wrapper is not None, "a wrapper's logger ends with it"
        reducer, module = wrapper.reducer, wrapper.module
        stats = reducer.stats()
        index_of = {name: index for index, name in enumerate(reducer.core.names)}
        sizes = ", ".join(map(str, stats.bucket_bytes))
        strings = {
            "module_name": type(module).__name__,
            "device_ids": ", ".join(map(str, wrapper.device_ids or ())),
            "backend_name": str(dist.get_backend(wrapper.process_group)),
            "dtypes": ", ".join(sorted({_name(p.dtype) for p in reducer.core.parameters})),
            "bucket_sizes": sizes,
        }
        integers = {
            "world_size": dist.get_world_size(wrapper.process_group),
            "rank": dist.get_rank(wrapper.process_group),
            "output_device": -1 if wrapper.output_device is None else wrapper.output_device,
            "iteration": stats.iteration,
            "broadcast_buffers": int(wrapper.forward_sync_buffers),
            "bucket_cap_bytes": stats.bucket_cap_bytes,
            "find_unused_parameters": int(stats.find_unused_parameters),
            "gradient_as_bucket_view": int(stats.gradient_as_bucket_view),
            "total_parameter_size_bytes": stats.parameter_bytes,
            "num_parameter_tensors": stats.parameters,
            "has_rebuilt_buckets": int(stats.rebuilt),
            "has_sync_bn": int(any("SyncBatchNorm" in type(m).__name__ for m in module.modules())),
        }
        if wrapper._authoritative_rank is not None:
            integers["join_uneven_inputs"] = 1
        if stats.static_graph:
            integers["static_graph"] = 1
        if stats.rebuilt:
            buckets = [[str(index_of[name]) for name in bucket] for bucket in reducer.buckets]
            order = [str(index_of[name]) for name in reducer.ready_order]
            strings["rebuilt_bucket_sizes"] = sizes
            strings["rebuilt_per_bucket_param_indices"] = ", ".join(map(" ".join, buckets))
            strings["prev_iteration_grad_ready_order_indices"] = ", ".join(order)
        if reducer.core.comm.hook is not average:
            # torch's name of a built-in hook differs from the name of its function here.
            strings["comm_hook"] = self._comm_hook or stats.comm_hook
        if (error := self._error or reducer.last_error) is not None:
            strings["error"], integers["has_error"] = error, 1
        return LoggingData(strings, integers)


def _name(dtype: torch.dtype) -> str:
    kind = torch.empty(0, dtype=dtype, device="cpu").type()  # such as torch.FloatTensor
    return kind.removeprefix("torch.").removesuffix("Tensor").lower()
