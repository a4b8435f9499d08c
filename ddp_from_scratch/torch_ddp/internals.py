"""Parts of `DistributedDataParallel`: arguments, mixed precision, Reducers."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch.common import gpu
from ddp_from_scratch.common.group import check_group
from ddp_from_scratch.common.memory import sparse_parameters
from ddp_from_scratch.core.bucket import CommHook
from ddp_from_scratch.core.reducer import CoreReducer
from ddp_from_scratch.options import comm_hooks
from ddp_from_scratch.reducer import Reducer
from ddp_from_scratch.torch_ddp.forward_sync import ForwardSync

# Arguments --------------------------------------------------------------------------------------


def chosen_group(
    module: torch.nn.Module, process_group: dist.ProcessGroup | None, device_mesh: Any
) -> dist.ProcessGroup:
    """Returns the process group, the group of a one-dimensional mesh, or the default group.

    If another dimension of the mesh shards `module`, local tensors replace its DTensor parameters.
    """
    if device_mesh is None:
        return check_group(process_group)
    if process_group is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    group: dist.ProcessGroup = device_mesh.get_group(mesh_dim=0)
    if device_mesh._get_root_mesh() != device_mesh:
        # Buckets hold plain tensors; parameters are DTensors only during forward (2-D parallelism).
        # Imported here because the import takes a second, and few programs have such a mesh.
        from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

        _pre_dp_module_transform(module)
    return group


def checked_devices(
    device_ids: Sequence[Any] | None, output_device: Any, parameters: Sequence[torch.Tensor]
) -> tuple[list[int] | None, int | None]:
    """Returns the GPU indices of inputs and outputs; None and None if inputs are not moved."""
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


def _index(device: Any) -> int:
    index = device if isinstance(device, int) else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else int(index)


# Mixed precision --------------------------------------------------------------------------------


def moved(value: Any, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Any:
    """Returns nested tuples, lists and dicts with their tensors on `device`, floats as `dtype`."""
    if isinstance(value, torch.Tensor):
        if device is not None:
            value = value.to(device, non_blocking=True)
        return value if dtype is None or not value.is_floating_point() else value.to(dtype)
    if isinstance(value, dict):
        return type(value)((key, moved(item, device, dtype)) for key, item in value.items())
    if not isinstance(value, (list, tuple)):
        return value
    items = (moved(item, device, dtype) for item in value)
    # A named tuple takes its items as arguments, not as one iterable.
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


# The comm hook for a dtype of sent gradients, as in torch's `_MixedPrecision`; None needs none.
HOOKS: dict[Any, CommHook | None] = {
    **dict.fromkeys((None, torch.float32, torch.float64)),
    torch.float16: comm_hooks.fp16_compress_hook,
    torch.bfloat16: comm_hooks.bf16_compress_hook,
}


def cast_buffers(
    module: torch.nn.Module, dtype: torch.dtype | None, ignore: Collection[str]
) -> None:
    """Casts the floating buffers to `dtype` permanently; None keeps their dtype."""
    sparse = sparse_parameters(module)
    for name, parameter in module.named_parameters():
        if name not in ignore and id(parameter) in sparse:
            raise ValueError(
                f"parameter {name} has a sparse gradient, which autograd cannot pass back through "
                f"the cast of mixed_precision: use torch.autocast, or make it dense"
            )
    for name, buffer in module.named_buffers():
        if dtype is not None and name not in ignore and buffer.is_floating_point():
            buffer.data = buffer.to(dtype)


# Reducers ---------------------------------------------------------------------------------------


class _Core(CoreReducer):
    last_error: str | None = None

    def end_pass(self) -> None:
        """As the base class; keeps the text of the error."""
        try:
            super().end_pass()
        except RuntimeError as error:
            self.last_error = f"{type(error).__name__}: {error}"
            raise


class WrappedReducer(Reducer):
    """A Reducer with the methods that pipelines and Lightning call on torch's."""

    core: _Core
    _core_type = _Core

    @property
    def last_error(self) -> str | None:
        """The text of the error that `backward()` has raised last; None without one."""
        return self.core.last_error

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        # Torch's pipelines run all forward passes under no_sync(), and call this for the last.
        if (forward_sync := self.core.observer(ForwardSync)) is not None:
            forward_sync.average_next()
        self.prepare_backward(outputs)

    def _rebuild_buckets(self) -> bool:
        return False  # buckets are only rebuilt at the end of an average


class CopiedReducer(WrappedReducer):
    """The Reducer of a copy, which one rank may make alone."""

    # Sharing memory is collective; the ranks meet when the copy first averages.
    _collective_init = False
