"""Arguments of torch's constructor: checks them, and converts those that have several forms."""

import warnings
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch import gpu
from ddp_from_scratch.core import comm_hooks
from ddp_from_scratch.core.layout import assign
from ddp_from_scratch.core.memory import sparse_parameters
from ddp_from_scratch.group import check_group
from ddp_from_scratch.options.views import ViewBucket

NOT_LAZY = (
    "lazy_bucket_allocation=True is not supported: it frees buckets after each backward pass, and "
    "here they keep their memory: in it .grad lies (gradient_as_bucket_view=True), ddp.SGD steps "
    "and the ranks of a machine meet (mpi). Leave it False; gradient_as_bucket_view=True saves the "
    "memory that gradients take beside their buckets"
)


def chosen_group(process_group: dist.ProcessGroup | None, device_mesh: Any) -> dist.ProcessGroup:
    """Returns the process group, the group of a mesh of one dimension, or the default group.

    Raises:
        RuntimeError: both are given, or the mesh has more dimensions.
        RuntimeError, TypeError, ValueError: as `check_group`.
    """
    if device_mesh is None:
        return check_group(process_group)
    if process_group is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    group: dist.ProcessGroup = device_mesh.get_group(mesh_dim=0)
    return group


def take_local(module: torch.nn.Module, device_mesh: Any) -> None:
    """Replaces DTensor parameters, sharded by another dimension of the mesh, by local parts."""
    # A part of a larger mesh: its other dimensions may shard parameters.
    if device_mesh is not None and device_mesh._get_root_mesh() != device_mesh:
        # Buckets hold plain tensors; the parameters are DTensors again during forward alone (2-D
        # parallelism). Imported late: it takes a second, and most programs have no such mesh.
        from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

        _pre_dp_module_transform(module)


def checked_parameters(
    module: torch.nn.Module, ignore: Collection[str]
) -> list[torch.nn.Parameter]:
    """Returns the parameters that are not ignored.

    Raises:
        RuntimeError: some are lazy, or none requires a gradient.
    """
    ours = [p for name, p in module.named_parameters() if name not in ignore]
    if any(torch.nn.parameter.is_lazy(parameter) for parameter in ours):
        raise RuntimeError(
            "the module has uninitialized parameters: run one forward pass on every rank before "
            "wrapping it in DistributedDataParallel"
        )
    if not any(parameter.requires_grad for parameter in ours):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that "
            "requires a gradient."
        )
    return ours


def checked_delayed(
    module: torch.nn.Module,
    named: Sequence[tuple[str, torch.nn.Parameter]] | None,
    trigger: torch.nn.Parameter | None,
) -> list[tuple[str, torch.nn.Parameter]]:
    """Returns the parameters that are averaged on their own when the trigger's gradient is ready.

    Raises:
        ValueError: only one of the two is given, or the gradient of a parameter is sparse.
    """
    if (named is None) != (trigger is None):
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same "
            "time"
        )
    sparse = sparse_parameters(module)
    for name, parameter in named or ():
        if id(parameter) in sparse:
            raise ValueError(f"parameter {name} has a sparse gradient, which cannot be delayed")
    return list(named or ())


def checked_devices(
    device_ids: Sequence[Any] | None, output_device: Any, parameters: Sequence[torch.Tensor]
) -> tuple[list[int] | None, int | None]:
    """Returns the GPU numbers of inputs and of outputs; None and None if inputs are not moved.

    Raises:
        ValueError: more than one GPU, or one given for a module that is not on a single GPU.
    """
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element.")
    devices = {parameter.device for parameter in parameters}
    if device_ids and len(devices) == 1 and gpu.is_gpu(next(iter(devices))):
        index = _index(device_ids[0])
        return [index], index if output_device is None else _index(output_device)
    if device_ids or output_device:
        raise ValueError(
            f"device_ids and output_device are for modules on a single GPU, got device_ids "
            f"{device_ids}, output_device {output_device} and a module on "
            f"{', '.join(sorted(str(device) for device in devices))}"
        )
    return None, None


def warn_of_deprecated(broadcast_buffers: bool | None, check_reduction: bool) -> None:
    """Warns of arguments that torch will drop."""
    if check_reduction:
        # 3 levels up is the caller of the constructor.
        warnings.warn("check_reduction is deprecated", FutureWarning, stacklevel=3)
    if broadcast_buffers is not None:
        warnings.warn(
            "broadcast_buffers is deprecated; forward_sync_buffers is for forward passes alone",
            FutureWarning,
            stacklevel=3,
        )


def _index(device: Any) -> int:
    index = device if isinstance(device, int) else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else int(index)


def moved(value: Any, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Any:
    """Returns the same structure with its tensors on `device`, the floating ones as `dtype`.

    Looks into tuples, lists and dicts, at any depth. None leaves device or dtype unchanged.
    """
    if isinstance(value, torch.Tensor):
        if device is not None:
            value = value.to(device, non_blocking=True)
        return value if dtype is None or not value.is_floating_point() else value.to(dtype)
    # A named tuple takes its items as arguments, not as one iterable.
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(item, device, dtype) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(moved(item, device, dtype) for item in value)
    if isinstance(value, dict):
        return type(value)((key, moved(item, device, dtype)) for key, item in value.items())
    return value


class DelayedReduction:
    """Averages the gradients of some parameters when the gradient of a chosen one is ready.

    For gradients that are complete before the rest of backward, such as those of embeddings that a
    pipeline computes in several parts. They must be complete by then.

    Args:
        parameters: the parameters to average; one bucket for each dtype and device.
        trigger: backward's gradient for this parameter starts the all-reduce.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        trigger: torch.nn.Parameter,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self.process_group = process_group
        # A cap that nothing reaches: all gradients are launched at the same moment anyway.
        kinds = [(p.nbytes, (p.dtype, p.device)) for p in parameters]
        plan = assign(kinds, range(len(parameters)), [2**62])
        self._buckets = [ViewBucket(members, [parameters[m] for m in members]) for members in plan]
        self.hook = trigger.register_hook(self._launch)

    def _launch(self, gradient: torch.Tensor) -> None:
        for bucket in self._buckets:
            for index in bucket.members:
                # No hook counts these gradients. A member marked unused contributes its `.grad`.
                bucket.mark_unused(index)
            bucket.pack(1.0)
            bucket.launch(comm_hooks.average, self.process_group)
        # Waiting here would hold up the rest of backward.
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        for bucket in self._buckets:
            bucket.wait()
            bucket.unpack()
