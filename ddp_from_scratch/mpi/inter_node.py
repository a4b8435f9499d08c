"""all_reduce among ranks of several machines: what crosses the network.

MPI reduces what it can compute with. It has no 16-bit floats, and float32 would be twice the bytes:
they cross as they are, to be summed in float32 by the rank that owns the part.

    rank 0   | a0 | b0 |             | a0 | a1 |  sum             | a | b |
    rank 1   | a1 | b1 |  Alltoallv  | b0 | b1 |  ->  Allgatherv  | a | b |

Each rank sends 2 (n - 1) / n of its bytes, as in an all-reduce of MPI's. One rank sums a part for
everybody, in the order of ranks, and rounds once: all have the same bits.
"""

from collections.abc import Sequence

import torch

from ddp_from_scratch.mpi.datatypes import pieces, raw, values
from ddp_from_scratch.mpi.runtime import MPI
from ddp_from_scratch.node.reduction import CHUNK, Reduction
from ddp_from_scratch.node.staging import share_of

# Bytes of all ranks' 16-bit floats up to which each rank gets them all and sums them by itself:
# with so few it is the number of messages that takes time.
GATHERED = 64 * 1024


class Across:
    """all_reduce over a communicator of MPI's.

    Args:
        communicator: the ranks; MPI.COMM_NULL where this one is none of them, and will not call it.
    """

    def __init__(self, communicator: MPI.Comm) -> None:
        self._communicator = communicator

    def __call__(self, flat: torch.Tensor, reduction: Reduction) -> None:
        """Replaces `flat` by the reduction of everybody's: dense, of the same size on all ranks.

        Averages of fractions are divided first where that is exact. 16-bit floats are rounded once.
        """
        for piece in pieces(flat):
            if piece.dtype == reduction.dtype:
                self._by_mpi(piece, reduction)
            elif piece.nbytes * self._communicator.size <= GATHERED:
                self._gathered(piece, reduction)
            else:
                self._in_parts(piece, reduction)

    def free(self) -> None:
        """Gives the communicator back. Collective."""
        if self._communicator != MPI.COMM_NULL:
            self._communicator.Free()

    def _by_mpi(self, flat: torch.Tensor, reduction: Reduction) -> None:
        if reduction.divides_first:
            flat /= reduction.divisor
        self._communicator.Allreduce(MPI.IN_PLACE, values(flat), reduction.op)
        if not reduction.divides_first:
            reduction.divide(flat)

    def _gathered(self, flat: torch.Tensor, reduction: Reduction) -> None:
        everybodys = flat.new_empty(self._communicator.size, flat.numel())
        self._communicator.Allgather(raw(flat), raw(everybodys))
        _fold(everybodys.unbind(), flat, reduction)

    def _in_parts(self, flat: torch.Tensor, reduction: Reduction) -> None:
        size = self._communicator.size
        shares = [share_of(flat.numel(), rank, size) for rank in range(size)]
        nbytes = [(end - begin) * flat.itemsize for begin, end in shares]
        begin, end = shares[self._communicator.rank]
        own = flat[begin:end]
        everybodys = own.new_empty(size, own.numel())
        self._communicator.Alltoallv(
            [raw(flat)[0], nbytes, MPI.BYTE], [raw(everybodys)[0], [own.nbytes] * size, MPI.BYTE]
        )
        _fold(everybodys.unbind(), own, reduction)
        self._communicator.Allgatherv(MPI.IN_PLACE, [raw(flat)[0], nbytes, MPI.BYTE])


def _fold(parts: Sequence[torch.Tensor], result: torch.Tensor, reduction: Reduction) -> None:
    """The reduction of 16-bit parts, in their order; a chunk at a time, in the cache."""
    room = torch.empty(min(CHUNK, result.numel()), dtype=reduction.dtype)
    chunks = zip(*(part.split(CHUNK) for part in parts), strict=True)
    for into, chunk in zip(result.split(CHUNK), chunks, strict=True):
        into.copy_(reduction.fold(chunk, room[: into.numel()]))
