"""Moves a module's inputs to its device and casts them to its precision."""

from typing import Any

import torch


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
