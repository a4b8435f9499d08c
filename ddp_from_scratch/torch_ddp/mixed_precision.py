"""Forward in a lower precision than that of the parameters and their `.grad`."""

from collections.abc import Collection
from typing import Any

import torch
from torch.func import functional_call

from ddp_from_scratch import comm_hooks
from ddp_from_scratch.core.bucket import CommHook
from ddp_from_scratch.core.memory import sparse_parameters
from ddp_from_scratch.torch_ddp.arguments import moved

_COMPRESSED = {
    torch.float16: comm_hooks.fp16_compress_hook,
    torch.bfloat16: comm_hooks.bf16_compress_hook,
}


def call_in(
    dtype: torch.dtype,
    module: torch.nn.Module,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    ignore: Collection[str],
) -> Any:
    """Calls `module` with its inputs and floating parameters, but those to ignore, as `dtype`."""
    # The parameters themselves stay as they are: autograd takes gradients back through the cast.
    lowered = {
        name: parameter.to(dtype)
        for name, parameter in module.named_parameters()
        if parameter.is_floating_point() and name not in ignore
    }
    return functional_call(module, lowered, moved(inputs, dtype=dtype), moved(kwargs, dtype=dtype))


def hook_for(precision: Any) -> CommHook | None:
    """Returns the comm hook that torch's `_MixedPrecision` asks for; None if none is needed.

    Raises:
        ValueError: there is no hook for that dtype.
    """
    sent = precision.reduce_dtype or precision.param_dtype
    if sent in (None, torch.float32, torch.float64):
        return None
    if sent not in _COMPRESSED:
        raise ValueError(f"gradients cannot be sent as {sent}")
    return _COMPRESSED[sent]


def check_castable(module: torch.nn.Module, ignore: Collection[str]) -> None:
    """Raises if autograd could not take a gradient back through the cast of its parameter.

    Raises:
        ValueError: a gradient is sparse.
    """
    sparse = sparse_parameters(module)
    for name, parameter in module.named_parameters():
        if id(parameter) in sparse and name not in ignore:
            raise ValueError(
                f"mixed_precision cannot cast parameter {name}, whose gradient is sparse: use "
                f"torch.autocast, or make it dense"
            )


def cast_buffers(
    module: torch.nn.Module, dtype: torch.dtype | None, ignore: Collection[str]
) -> None:
    """Casts the floating buffers to `dtype` for good; None leaves them."""
    for name, buffer in module.named_buffers():
        if dtype is not None and name not in ignore and buffer.is_floating_point():
            buffer.data = buffer.to(dtype)
