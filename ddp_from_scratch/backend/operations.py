r"""Checks the arguments of collectives in the caller's thread, and makes fingerprints of calls.

A fingerprint holds a call and its place in a fixed number of bytes, which ranks compare:

all_reduce(SUM) of 10 x torch.float32\nwindow 3 at 4096\0 ......
operation                             place               padding
"""

import functools
import operator
import threading
import zlib
from collections.abc import Sequence
from functools import lru_cache

import torch

_TRACING = tuple(  # dispatch modes under which torch traces instead of computing
    getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL")
)
_INSTEAD = "use torch.distributed._functional_collectives there, or leave it out of what is traced"


def _bits(*names: str) -> int:
    keys = (getattr(torch._C.DispatchKey, name) for name in names)
    return functools.reduce(operator.or_, (torch._C.DispatchKeySet(key).raw_repr() for key in keys))


# Dispatch keys of tensors whose memory does not hold their values: subclasses such as DTensor,
# others under functionalize and vmap, and lazily negated or conjugated views.
_TRANSFORMED = _bits("Python", "Functionalize", "FuncTorchBatched")
_LAZY = _bits("Negative", "Conjugate")
PLAIN = _bits("CPU", "ADInplaceOrView", "AutogradCPU", "AutocastCPU")  # a plain CPU tensor's

_OVERLAPS = 1  # torch's MemOverlap::Yes


def size_of(*tensors: torch.Tensor) -> str:
    """`10, 20 x torch.float32`."""
    return f"{', '.join(str(tensor.numel()) for tensor in tensors)} x {tensors[0].dtype}"


def check_memory(
    backend: str, kind: str, *tensors: torch.Tensor, written: Sequence[torch.Tensor] = ()
) -> None:
    """Raises unless the tensors are dense, hold their values in memory, and nothing is traced.

    Runs before this rank meets the others, so the group stays usable after an error. The elements
    of tensors that the call writes to (`written`) must not overlap in memory.
    """
    # Every call pays for these checks. torch's C++ functions take less than a microsecond.
    if torch._C._len_torch_dispatch_stack() and any(map(torch._C._get_dispatch_mode, _TRACING)):
        raise RuntimeError(f"{kind} on the {backend} backend cannot be traced: {_INSTEAD}")
    for tensor in (*tensors, *written):
        needed, found = "a tensor with data in memory", ""
        if torch._C._dispatch_keys(tensor).raw_repr() & _TRANSFORMED:
            found = f"a {type(tensor).__name__} that stands for others: {_INSTEAD}"
        elif torch._C._dispatch_keys(tensor).raw_repr() & _LAZY:
            found = "one that is negated or conjugated when it is read: call resolve_neg() or "
            found += "resolve_conj() first"
        elif not tensor.is_cpu or tensor.layout is not torch.strided:
            needed, found = "dense tensors on a CPU", f"{tensor.layout} on {tensor.device}"
        if found:
            raise RuntimeError(f"{kind} on the {backend} backend needs {needed}, got {found}")
    for tensor in written:
        # The check of torch's `copy_`, which would raise only after the ranks have met.
        if not tensor.is_contiguous() and torch._debug_has_internal_overlap(tensor) == _OVERLAPS:
            raise RuntimeError(
                f"{kind} on the {backend} backend writes to its tensor, and several elements of "
                f"this one share one place in memory (shape {tuple(tensor.shape)}, strides "
                f"{tensor.stride()}), as after expand(): call contiguous() first"
            )


def split_rows(
    what: str, tensor: torch.Tensor, splits: Sequence[int], size: int
) -> Sequence[torch.Tensor]:
    """Splits a tensor along its first dimension into one part for each of `size` ranks."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if not splits:
        if rows % size:
            raise ValueError(
                f"all_to_all_single needs an {what} whose first dimension divides evenly over "
                f"{size} ranks, got {rows}: give split sizes"
            )
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows:
        raise ValueError(
            f"all_to_all_single needs {size} {what} split sizes that add up to {rows}, got "
            f"{list(splits)}"
        )
    parts: Sequence[torch.Tensor] = tensor.split(list(splits))
    return parts


def check_count(kind: str, what: str, tensors: Sequence[torch.Tensor], size: int) -> None:
    """Raises unless there is one tensor per rank and all have one dtype."""
    if len(tensors) != size:
        raise ValueError(f"{kind} needs {size} {what} tensors, one a rank, got {len(tensors)}")
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise ValueError(f"{kind} needs {what} tensors of one dtype")


def check_dtype(kind: str, output: torch.Tensor, inputs: Sequence[torch.Tensor]) -> None:
    """Raises unless the inputs, which share a dtype, have that of the output."""
    if inputs[0].dtype != output.dtype:
        raise ValueError(
            f"{kind} needs inputs and outputs of one dtype, got {inputs[0].dtype} and "
            f"{output.dtype}"
        )


def check_same(kind: str, tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> None:
    """Raises unless all tensors have the size and the dtype of `tensor`."""
    for other in others:
        if other.numel() != tensor.numel() or other.dtype != tensor.dtype:
            raise ValueError(
                f"{kind} needs tensors of one size and dtype: got {tuple(other.shape)} "
                f"{other.dtype} beside {tuple(tensor.shape)} {tensor.dtype}"
            )


FINGERPRINT_NBYTES = 256  # with the count of other calls that follows it (`barrier.py`)
COUNT_NBYTES = 8
_TEXT_NBYTES = FINGERPRINT_NBYTES - COUNT_NBYTES


class _Caller(threading.local):
    op_label = ""  # for whom this thread starts collectives: ` for bucket 0 of Reducer 2`


caller: _Caller = _Caller()


@lru_cache(maxsize=256)
def fingerprint_of(operation: str, place: str) -> bytes:
    """At most `_TEXT_NBYTES` bytes; long operations keep their beginning and a checksum."""
    # The zero keeps one fingerprint from being the beginning of another.
    encoded = f"{operation}\n{place}\0".encode()
    if len(encoded) > _TEXT_NBYTES:  # lists of many sizes
        short = f"{operation[:150]}... (checksum {zlib.crc32(operation.encode()):08x})"
        encoded = f"{short}\n{place[:50]}\0".encode()
    return encoded


def operation_in(encoded: bytes) -> str:
    """Returns the operation without the place."""
    return encoded.partition(b"\n")[0].decode()


def describe_difference(here: Sequence[tuple[int, str]], elsewhere: Sequence[str]) -> str:
    """`rank 0 broadcast(...); ranks 1, 2 all_reduce(...)`, then operations of other machines."""
    operations = dict.fromkeys(operation for _, operation in here)
    lines = [
        f"{name_ranks([rank for rank, called in here if called == operation])} {operation}"
        for operation in operations
    ]
    others = [operation for operation in dict.fromkeys(elsewhere) if operation not in operations]
    return "; ".join(lines + [f"another machine's ranks {operation}" for operation in others])


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 1` or `ranks 1, 2`; empty for none."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else ""
