"""Arithmetic of a reduction: several tensors become one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TypeAlias

import torch
import torch.distributed as dist

ReduceOp: TypeAlias = "dist.ReduceOp | dist.ReduceOp.RedOpType"
Combine = Callable[..., torch.Tensor]

# Elements per call: few enough to stay in the processor's cache, enough to make a call worth it.
CHUNK = 256 * 1024

WIDENED = (torch.float16, torch.bfloat16)  # reduced in float32, so a fold rounds only once

REDUCED = (  # torch cannot add other dtypes on a CPU, or only some of them
    *WIDENED,
    *(torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)

_BITWISE = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
_ORDERED = (dist.ReduceOp.MIN, dist.ReduceOp.MAX)

_COMBINE: dict[dist.ReduceOp.RedOpType, Combine] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


@dataclass(frozen=True)
class Reduction:
    """One of torch's reductions on elements of one dtype."""

    op: dist.ReduceOp.RedOpType
    dtype: torch.dtype  # in which it computes: float32 for 16-bit floats
    combine: Combine
    divisor: int  # 1, except for an average

    @staticmethod
    @cache
    def of(op: ReduceOp, dtype: torch.dtype, size: int) -> "Reduction":
        """Returns the reduction over `size` ranks; a RuntimeError if it is undefined."""
        if dtype not in REDUCED:
            raise RuntimeError(f"cannot reduce tensors of {dtype}")
        kind = next((kind for kind in _COMBINE if op == kind), None)
        if kind is None:
            raise RuntimeError(f"there is no reduction {op} in shared memory")
        fractional = dtype.is_floating_point or dtype.is_complex
        if (kind in _BITWISE and fractional) or (kind in _ORDERED and dtype.is_complex):
            raise RuntimeError(f"tensors of {dtype} cannot be reduced with {kind.name}")
        wide = torch.float32 if dtype in WIDENED else dtype
        return Reduction(kind, wide, _COMBINE[kind], size if kind == dist.ReduceOp.AVG else 1)

    @property
    def name(self) -> str:
        return self.op.name

    def fold(self, tensors: Sequence[torch.Tensor], scratch: torch.Tensor) -> torch.Tensor:
        """Reduces tensors of one shape into `scratch`, maybe the first itself, and returns it."""
        # Always in rank order, since sums of floats depend on the order.
        wide = tensors
        if tensors[0].dtype != self.dtype:
            wide = [tensor.to(self.dtype) for tensor in tensors]
        # A division: see `core/comm_hooks.py`.
        if self.divides_first:
            torch.mul(wide[0], 1 / self.divisor, out=scratch)
            for tensor in wide[1:]:
                torch.add(scratch, tensor, alpha=1 / self.divisor, out=scratch)
            return scratch
        if len(wide) == 1:
            scratch.copy_(wide[0])
        else:
            self.combine(wide[0], wide[1], out=scratch)
        for tensor in wide[2:]:
            self.combine(scratch, tensor, out=scratch)
        if self.divisor > 1:
            fractional = scratch.is_floating_point() or scratch.is_complex()
            scratch.div_(self.divisor, rounding_mode=None if fractional else "floor")
        return scratch

    def fold_into(self, result: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Replaces `result` by the reduction of parts of its dtype, a chunk at a time."""
        scratch = torch.empty(min(CHUNK, result.numel()), dtype=self.dtype, device="cpu")
        chunks = zip(*(part.split(CHUNK) for part in parts), strict=True)
        for into, chunk in zip(result.split(CHUNK), chunks, strict=True):
            into.copy_(self.fold(chunk, scratch[: into.numel()]))

    def split(
        self, dtype: torch.dtype, machines: int, shares_memory: bool
    ) -> tuple["Reduction", "Reduction"]:
        """Returns the reduction of tensors of `dtype` on one machine, and the one across machines.

        If they average, one of the two divides.
        """
        # A division: see `core/comm_hooks.py`.
        # On this machine where that is exact, or keeps a sum in 16 bits from overflow, else across
        # machines, so a machine with one rank rounds nothing.
        first = self.divides_first if dtype == self.dtype else shares_memory
        if machines == 1 or first:
            return self, self.undivided
        return self.undivided, self

    @cached_property
    def undivided(self) -> "Reduction":
        return replace(self, divisor=1)

    @property
    def divides_first(self) -> bool:
        """True if a fold divides the summands, so that their sum cannot overflow."""
        # Only where 1/divisor is exact, so the bits stay the same.
        fractional = self.dtype.is_floating_point or self.dtype.is_complex
        return self.divisor > 1 and self.divisor.bit_count() == 1 and fractional


def share_of(numel: int, rank: int, owners: int) -> tuple[int, int]:
    """Returns begin and end of the share that `rank` reduces; empty if `rank` is no owner.

    Shares begin at multiples of 16 elements, so no two ranks write to the same cache line.
    """
    step = -(-numel // (16 * owners)) * 16
    return min(rank * step, numel), min((rank + 1) * step, numel)
