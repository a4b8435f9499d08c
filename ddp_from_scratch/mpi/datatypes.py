"""Tensors as MPI sees them: memory, element type, reduction."""

from collections.abc import Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from ddp_from_scratch.mpi.runtime import MPI
from ddp_from_scratch.node.reduction import WIDENED, ReduceOp, Reduction

# Without a count: mpi4py then divides the memory by the number of ranks where MPI wants a share.
Buffer: TypeAlias = "tuple[np.ndarray[Any, np.dtype[np.uint8]], MPI.Datatype]"

DATATYPES: dict[torch.dtype, MPI.Datatype] = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.uint8: MPI.UINT8_T,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
    torch.bool: MPI.C_BOOL,
}

# Bytes; most MPIs count in 32 bits.
COUNTABLE = 2**31 - 2**20
BLOCK = 2**30

# torch's reduction, MPI's for numbers, MPI's for booleans. AVG is a sum, which is divided. C's
# bool has logical operations only: a sum of booleans is "any", a product "all", as in torch.
_OPERATIONS = (
    (dist.ReduceOp.SUM, MPI.SUM, MPI.LOR),
    (dist.ReduceOp.AVG, MPI.SUM, MPI.LOR),
    (dist.ReduceOp.PRODUCT, MPI.PROD, MPI.LAND),
    (dist.ReduceOp.MIN, MPI.MIN, MPI.LAND),
    (dist.ReduceOp.MAX, MPI.MAX, MPI.LOR),
    (dist.ReduceOp.BAND, MPI.BAND, MPI.LAND),
    (dist.ReduceOp.BOR, MPI.BOR, MPI.LOR),
    (dist.ReduceOp.BXOR, MPI.BXOR, MPI.LXOR),
)
_BITWISE = (MPI.BAND, MPI.BOR, MPI.BXOR)
_ORDERED = (MPI.MIN, MPI.MAX)


def values(tensor: torch.Tensor) -> Buffer:
    """A dense tensor as MPI's elements, for reductions."""
    return (_memory(tensor), DATATYPES[tensor.dtype])


def pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """A flat tensor in pieces whose bytes MPI can count."""
    if tensor.nbytes <= COUNTABLE:
        return (tensor,)
    return tuple(tensor.split(COUNTABLE // tensor.itemsize))


def message(tensor: torch.Tensor) -> "Buffer | tuple[Any, int, MPI.Datatype]":
    """A dense tensor as bytes, in one message whatever its size."""
    if tensor.nbytes <= COUNTABLE:
        return raw(tensor)
    return (_memory(tensor), 1, _many_bytes(tensor.nbytes))


@cache
def _many_bytes(count: int) -> MPI.Datatype:
    """One element that is `count` bytes: blocks that MPI can count, and the rest."""
    # Cached and never freed: a committed type is a few words of memory, for each large size sent.
    blocks, rest = divmod(count, BLOCK)
    block = MPI.BYTE.Create_contiguous(BLOCK)
    places = [0, blocks * BLOCK]
    return MPI.Datatype.Create_struct([blocks, rest], places, [block, MPI.BYTE]).Commit()


def raw(tensor: torch.Tensor) -> Buffer:
    """A dense tensor as bytes of any dtype, for calls that only move it."""
    return (_memory(tensor), MPI.BYTE)


def _memory(tensor: torch.Tensor) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    # An array and not an address: it keeps a tensor alive that is nobody else's.
    # A single element is dense with any stride, and `view` keeps that stride.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy()


@cache
def reduction_of(op: ReduceOp, dtype: torch.dtype, size: int) -> Reduction:
    """Torch's reduction over `size` ranks; a RuntimeError where MPI does not have it."""
    # Asked of MPI on one machine, too: what a program may call must not depend on its placement.
    operation(op, torch.float32 if dtype in WIDENED else dtype)
    return Reduction.of(op, dtype, size)


@cache
def operation_of(reduction: Reduction) -> MPI.Op:
    """MPI's operation for a reduction, up to the division of an average."""
    return operation(reduction.op, reduction.dtype)


def operation(op: ReduceOp, dtype: torch.dtype) -> MPI.Op:
    """MPI's operation for torch's on elements of `dtype`; a RuntimeError where it has none."""
    if dtype not in DATATYPES:
        raise RuntimeError(f"the mpi backend cannot reduce tensors of {dtype}")
    for ours, numeric, logical in _OPERATIONS:
        if op != ours:
            continue
        fractional = dtype.is_floating_point or dtype.is_complex
        if (numeric in _BITWISE and fractional) or (numeric in _ORDERED and dtype.is_complex):
            raise RuntimeError(f"the mpi backend cannot reduce {dtype} with {ours}")
        return logical if dtype == torch.bool else numeric
    raise RuntimeError(f"the mpi backend has no reduction {op}")
