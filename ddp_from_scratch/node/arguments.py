"""Arguments of collectives in shared memory: checked where the caller can see the error."""

import functools
import operator
from collections.abc import Sequence

import torch

# Modes under which operations on a tensor are recorded, or stand for others, and none is computed.
_TRACING = tuple(
    getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL")
)
_INSTEAD = "use torch.distributed._functional_collectives there, or leave it out of what is traced"


def _bits(*names: str) -> int:
    keys = (getattr(torch._C.DispatchKey, name) for name in names)
    return functools.reduce(operator.or_, (torch._C.DispatchKeySet(key).raw_repr() for key in keys))


# Keys of tensors whose memory does not hold their numbers: of subclasses that compute otherwise
# (FakeTensor, DTensor), of functionalize and of vmap; and of views that are computed when read.
_TRANSFORMED = _bits("Python", "Functionalize", "FuncTorchBatched")
_LAZY = _bits("Negative", "Conjugate")

_OVERLAPS = 1  # torch's MemOverlap::Yes


def size_of(tensor: torch.Tensor) -> str:
    """`10 x torch.float32`."""
    return elements(tensor.numel(), tensor.dtype)


def elements(numel: int, dtype: torch.dtype) -> str:
    """`10 x torch.float32`."""
    return f"{numel} x {dtype}"


def check_memory(
    backend: str, kind: str, *tensors: torch.Tensor, written: Sequence[torch.Tensor] = ()
) -> None:
    """Raises unless the tensors' numbers lie in memory, dense, and nothing is being traced.

    Before this rank meets the others: the group can go on. Tensors that the call writes to are
    `written`: each of their numbers needs a place of its own.
    """
    # Asked of torch's C++ throughout: this is in every call's way, and these take no microsecond.
    if torch._C._len_torch_dispatch_stack() and any(map(torch._C._get_dispatch_mode, _TRACING)):
        raise RuntimeError(f"{kind} on the {backend} backend cannot be traced: {_INSTEAD}")
    for tensor in (*tensors, *written):
        if torch._C._dispatch_keys(tensor).raw_repr() & _TRANSFORMED:
            raise RuntimeError(
                f"{kind} on the {backend} backend needs a tensor with numbers in memory, got a "
                f"{type(tensor).__name__} that stands for others: {_INSTEAD}"
            )
        if torch._C._dispatch_keys(tensor).raw_repr() & _LAZY:
            raise RuntimeError(
                f"{kind} on the {backend} backend needs a tensor with numbers in memory, got one "
                f"that is negated or conjugated when it is read: call resolve_neg() or "
                f"resolve_conj() first"
            )
        if not tensor.is_cpu or tensor.layout is not torch.strided:
            raise RuntimeError(
                f"{kind} on the {backend} backend needs dense tensors on a CPU, got "
                f"{tensor.layout} on {tensor.device}"
            )
    for tensor in written:
        # As torch's own `copy_` decides it, which would raise too late: after the ranks have met.
        if not tensor.is_contiguous() and torch._debug_has_internal_overlap(tensor) == _OVERLAPS:
            raise RuntimeError(
                f"{kind} on the {backend} backend writes to its tensor, and several elements of "
                f"this one are one place in memory (shape {tuple(tensor.shape)}, strides "
                f"{tensor.stride()}), as after expand(): call contiguous() first"
            )
