"""Puts a module's inputs where, and into the precision in which, it computes."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.func import functional_call


def moved(value: Any, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Any:
    """The same structure with its tensors on `device`, the floating ones as `dtype`.

    Looks into tuples, lists and dicts, at any depth; None leaves device or dtype as it is.
    """
    if isinstance(value, torch.Tensor):
        if device is not None:
            value = value.to(device, non_blocking=True)
        return value if dtype is None or not value.is_floating_point() else value.to(dtype)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(item, device, dtype) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(moved(item, device, dtype) for item in value)
    if isinstance(value, dict):
        return type(value)((key, moved(item, device, dtype)) for key, item in value.items())
    return value


def call_in(
    dtype: torch.dtype,
    module: torch.nn.Module,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    ignore: Collection[str],
) -> Any:
    """Calls `module` with its floating parameters, and its inputs, as `dtype`.

    The parameters themselves stay as they are: autograd takes gradients back through the cast.

    Args:
        dtype: what to compute in.
        module: what to call.
        inputs: its positional arguments.
        kwargs: its arguments by name.
        ignore: names of parameters that are not cast.
    """
    lowered = {
        name: parameter.to(dtype)
        for name, parameter in module.named_parameters()
        if parameter.is_floating_point() and name not in ignore
    }
    return functional_call(module, lowered, moved(inputs, dtype=dtype), moved(kwargs, dtype=dtype))


def check_devices(
    device_ids: Sequence[Any] | None, output_device: Any, parameters: Sequence[torch.Tensor]
) -> tuple[list[int] | None, int | None]:
    """The numbers of the GPU of inputs and of outputs; None and None if inputs are not moved.

    Raises:
        ValueError: more than one GPU, or one given for a module that is not on a single GPU.
    """
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element.")
    devices = {parameter.device for parameter in parameters}
    if device_ids and len(devices) == 1 and next(iter(devices)).type == "cuda":
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
    return torch.cuda.current_device() if index is None else int(index)
