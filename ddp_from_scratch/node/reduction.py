"""A reduction of torch's, computed here: how the elements of several tensors become one's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TypeAlias

import torch
import torch.distributed as dist

from ddp_from_scratch.mpi.datatypes import WIDENED, operation
from ddp_from_scratch.mpi.runtime import MPI

ReduceOp: TypeAlias = "dist.ReduceOp | dist.ReduceOp.RedOpType"
Combine = Callable[..., torch.Tensor]

# Elements that are summed at a time: they stay in the processor's cache from one operation to the
# next, and each is large beside what a call costs.
CHUNK = 256 * 1024

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
    """A reduction of torch's on elements of one dtype.

    16-bit floats are reduced in float32, so that a fold rounds once, as it is put back; AVG is a
    sum, divided by `divisor`.
    """

    name: str
    dtype: torch.dtype
    op: MPI.Op
    combine: Combine
    divisor: int

    @staticmethod
    @cache
    def of(op: ReduceOp, dtype: torch.dtype, size: int) -> "Reduction":
        """The reduction `op` over `size` ranks.

        Raises:
            ValueError: it does not exist for this dtype.
        """
        wide = torch.float32 if dtype in WIDENED else dtype
        mpi = operation(op, wide)
        (kind,) = [kind for kind in _COMBINE if op == kind]
        divisor = size if kind == dist.ReduceOp.AVG else 1
        return Reduction(kind.name, wide, mpi, _COMBINE[kind], divisor)

    def fold(self, tensors: Sequence[torch.Tensor], room: torch.Tensor) -> torch.Tensor:
        """The reduction of tensors of one shape, in their order.

        Args:
            tensors: one or more.
            room: of that shape and the reduction's dtype; may be the first's own memory.

        Returns:
            `room`.
        """
        wide = tensors
        if tensors[0].dtype != self.dtype:
            wide = [tensor.to(self.dtype) for tensor in tensors]
        if self.divides_first:
            torch.mul(wide[0], 1 / self.divisor, out=room)
            for tensor in wide[1:]:
                torch.add(room, tensor, alpha=1 / self.divisor, out=room)
            return room
        if len(wide) == 1:
            room.copy_(wide[0])
        else:
            self.combine(wide[0], wide[1], out=room)
        for tensor in wide[2:]:
            self.combine(room, tensor, out=room)
        self.divide(room)
        return room

    @cached_property
    def undivided(self) -> "Reduction":
        """The sum that an average is made of; any other reduction as it is."""
        return replace(self, divisor=1)

    @property
    def divides_first(self) -> bool:
        """Whether the summands are divided rather than the sum, which then cannot overflow.

        That is, where it is exact: the bits are the same.
        """
        fractional = self.dtype.is_floating_point or self.dtype.is_complex
        return self.divisor > 1 and self.divisor & (self.divisor - 1) == 0 and fractional

    def divide(self, reduced: torch.Tensor) -> None:
        """Makes a sum an average where that was asked for, in place."""
        if self.divisor > 1:
            if reduced.is_floating_point() or reduced.is_complex():
                reduced /= self.divisor
            else:
                reduced //= self.divisor
