"""all_reduce among ranks that share memory, and across machines in shares.

A machine's ranks need no messages: each sums its share of everybody's elements and writes the sum
back to everybody.

    rank 0's elements   | a0 | b0 |  ->  | a0+a1 | b0+b1 |
    rank 1's elements   | a1 | b1 |  ->  | a0+a1 | b0+b1 |
                          ^    ^ rank 1's share
                          rank 0's share

Several machines: each rank's share, summed on its machine, is all-reduced with the ranks that have
the same share on the other machines. So every element crosses the network once for each machine,
however many ranks it has.

In shared memory the sum is taken in the order of ranks by whoever owns the share, so all ranks have
the same bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeAlias

import torch
import torch.distributed as dist

from .datatypes import WIDENED, operation, pieces, values
from .meeting import LUGGAGE, Meeting, Nodes
from .runtime import MPI
from .shared_memory import SharedMemory
from .windows import Windows

ReduceOp: TypeAlias = "dist.ReduceOp | dist.ReduceOp.RedOpType"
Combine = Callable[..., torch.Tensor]

# Elements that are summed at a time, while they are in the processor's cache.
CHUNK = 64 * 1024

# Bytes from which on staging is faster than MPI (benchmarks/allreduce.py).
STAGED_FROM = 512 * 1024

# Bytes of a rank's staging memory, for tensors that are not in shared memory themselves.
STAGE = 1024 * 1024

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

    16-bit floats are reduced in float32 and rounded once; AVG is a sum, divided afterwards.
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
        """The reduction of flat tensors of one size, in their order.

        Args:
            tensors: one or more.
            room: of the reduction's dtype and at least their size; may be the first's own memory.

        Returns:
            A part of `room`.
        """
        numel = tensors[0].numel()
        reduced = room if room.numel() == numel else room[:numel]
        wide = tensors
        if tensors[0].dtype != self.dtype:
            wide = [tensor.to(self.dtype) for tensor in tensors]
        if len(wide) == 1:
            reduced.copy_(wide[0])
        else:
            self.combine(wide[0], wide[1], out=reduced)
        for tensor in wide[2:]:
            self.combine(reduced, tensor, out=reduced)
        self.divide(reduced)
        return reduced

    def divide(self, reduced: torch.Tensor) -> None:
        """Makes a sum an average where that was asked for, in place."""
        if self.divisor > 1:
            if reduced.is_floating_point() or reduced.is_complex():
                reduced /= self.divisor
            else:
                reduced //= self.divisor


class AllReduce:
    """all_reduce over a group.

    Four ways, the same on all ranks:

    - at the meeting: a small tensor is brought along, and each rank sums them all by itself;
    - in place: a larger one in shared memory (`Windows`), at the same place on all ranks;
    - staged: any other that is large goes through shared memory, a piece at a time;
    - by MPI: what is left, and where no two ranks share memory.

    Args:
        nodes: the group's ranks by machine.
        meeting: where they meet.
        windows: the tensors in shared memory.
    """

    def __init__(self, nodes: Nodes, meeting: Meeting, windows: Windows) -> None:
        self._nodes, self._meeting, self._windows = nodes, meeting, windows
        self._stage: SharedMemory | None = None
        self._typed_bags: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}
        self._sums: dict[torch.dtype, torch.Tensor] = {}
        # As many shares as the smallest machine has ranks: each share has an owner everywhere.
        self._owners = nodes.communicator.allreduce(nodes.node.size, MPI.MIN)
        owns = nodes.node.rank < self._owners
        self._across = nodes.communicator.Split(nodes.node.rank if owns else MPI.UNDEFINED)
        most = nodes.communicator.allreduce(nodes.node.size, MPI.MAX)
        self._shares_memory = most > 1

    def prepare(self, tensor: torch.Tensor) -> str:
        """Before the ranks meet: brings a small tensor along; says where a large one lies."""
        if self._small(tensor):
            mine = self._bags(tensor.dtype, 1 - self._meeting.parity)[self._meeting.rank]
            mine[: tensor.numel()].copy_(tensor.flatten())
            return ""
        return self._windows.place(tensor)

    def __call__(self, tensor: torch.Tensor, reduction: Reduction) -> None:
        """Replaces `tensor` by the reduction of everybody's, when they have met for it."""
        if self._small(tensor):
            bags = self._bags(tensor.dtype, self._meeting.parity)
            brought = [bag[: tensor.numel()] for bag in bags]
            if tensor.is_contiguous() and tensor.dtype == reduction.dtype:
                reduction.fold(brought, tensor.view(-1))
            else:
                tensor.copy_(reduction.fold(brought, self._sum(reduction)).view(tensor.shape))
        elif self._meeting.same_place and self._windows.place(tensor):
            self._reduce(self._windows.everybodys(tensor), reduction)
            self._meeting.barrier()  # nobody reads before all shares are summed
        elif self._shares_memory and tensor.nbytes >= STAGED_FROM:
            self._staged(tensor, reduction)
        else:
            total = tensor.to(reduction.dtype).contiguous()
            _across(self._nodes.communicator, total.view(-1), reduction)
            reduction.divide(total)
            if total is not tensor:
                tensor.copy_(total)

    def _bags(self, dtype: torch.dtype, parity: int) -> list[torch.Tensor]:
        """Each rank's room for small tensors at even or odd meetings."""
        key = (dtype, parity)
        if key not in self._typed_bags:
            luggage = self._meeting.luggage
            self._typed_bags[key] = [pair[parity].view(dtype) for pair in luggage]
        return self._typed_bags[key]

    def _sum(self, reduction: Reduction) -> torch.Tensor:
        """Room for a chunk, which stays in the cache from one chunk to the next."""
        if reduction.dtype not in self._sums:
            self._sums[reduction.dtype] = torch.empty(CHUNK, dtype=reduction.dtype)
        return self._sums[reduction.dtype]

    def _small(self, tensor: torch.Tensor) -> bool:
        return self._nodes.count == 1 and tensor.nbytes <= LUGGAGE

    def free(self) -> None:
        """Gives memory and communicators back. Collective."""
        if self._stage is not None:
            self._stage.free()
        if self._across != MPI.COMM_NULL:
            self._across.Free()

    def _staged(self, tensor: torch.Tensor, reduction: Reduction) -> None:
        """In pieces: copy in, reduce, copy out; the next piece in the stage's other half."""
        if self._stage is None:
            self._stage = SharedMemory(self._nodes.node, 2 * STAGE)
        dense = tensor.contiguous()
        flat = dense.view(-1)
        halves = [
            [segment.view(2, STAGE)[i].view(tensor.dtype) for segment in self._stage.segments]
            for i in range(2)
        ]
        for number, piece in enumerate(flat.split(STAGE // tensor.itemsize)):
            parts = [half[: piece.numel()] for half in halves[number % 2]]
            parts[self._meeting.rank].copy_(piece)
            self._meeting.barrier()
            self._reduce(parts, reduction)
            self._meeting.barrier()
            piece.copy_(parts[self._meeting.rank])
        if dense is not tensor:
            tensor.copy_(dense)

    def _reduce(self, parts: list[torch.Tensor], reduction: Reduction) -> None:
        """Replaces this rank's share of every rank's part by the reduction over all machines."""
        begin, end = share_of(parts[0].numel(), self._meeting.rank, self._owners)
        shares = [part[begin:end] for part in parts]
        room = self._sum(reduction)
        chunks = zip(*(share.split(CHUNK) for share in shares), strict=True)
        if self._nodes.count == 1:
            for chunk in chunks:
                # In the first rank's memory where that is wide enough.
                total = reduction.fold(
                    chunk, room if chunk[0].dtype != reduction.dtype else chunk[0]
                )
                for summand in chunk:
                    if summand is not total:
                        summand.copy_(total)
            return
        mine = shares[self._meeting.rank]
        total = mine if mine.dtype == reduction.dtype else torch.empty(end - begin)
        here = replace(reduction, divisor=1)  # divided when all machines' sums are in
        for chunk, part in zip(chunks, total.split(CHUNK), strict=True):
            part.copy_(here.fold(chunk, room))
        if begin < end:
            _across(self._across, total, reduction)
        reduction.divide(total)
        for share in shares:
            share.copy_(total)


def share_of(numel: int, rank: int, owners: int) -> tuple[int, int]:
    """Begin and end of the share of `numel` elements that `rank` reduces; empty past the owners.

    Shares begin at multiples of 16 elements, so that no two ranks write to one cache line.
    """
    step = -(-numel // (16 * owners)) * 16
    return min(rank * step, numel), min((rank + 1) * step, numel)


def _across(communicator: MPI.Comm, total: torch.Tensor, reduction: Reduction) -> None:
    for piece in pieces(total):
        communicator.Allreduce(MPI.IN_PLACE, values(piece), reduction.op)
