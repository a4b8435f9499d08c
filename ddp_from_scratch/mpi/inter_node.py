"""All-reduce and exchange by messages, among ranks of several machines.

MPI reduces the dtypes that it has. It has no 16-bit floats, and float32 would be twice the bytes:
they cross as they are, and the rank that owns a part sums it in float32.

    rank 0   | a0 | b0 |             | a0 | a1 |  sum             | a | b |
    rank 1   | a1 | b1 |  Alltoallv  | b0 | b1 |  ->  Allgatherv  | a | b |

Each rank sends 2 (n - 1) / n of its bytes, as in an all-reduce of MPI's. One rank sums a part for
everybody, in the order of ranks, and rounds once: all have the same bits.
"""

from typing import Any

import torch

from ddp_from_scratch.mpi.datatypes import operation_of, pieces, raw, values
from ddp_from_scratch.mpi.runtime import MPI
from ddp_from_scratch.node.reduction import Reduction
from ddp_from_scratch.node.staging import share_of

# Bytes of all ranks' 16-bit floats up to which each rank gets them all and sums them by itself:
# with so few it is the number of messages that takes time.
GATHERED = 64 * 1024


def all_reduce(communicator: MPI.Intracomm, flat: torch.Tensor, reduction: Reduction) -> None:
    """Replaces `flat` by the reduction of everybody's: dense, of the same size on all ranks.

    Averages of fractions are divided first where that is exact. 16-bit floats are rounded once.
    """
    for piece in pieces(flat):
        if piece.dtype == reduction.dtype:
            _by_mpi(communicator, piece, reduction)
        elif piece.nbytes * communicator.size <= GATHERED:
            _gathered(communicator, piece, reduction)
        else:
            _in_parts(communicator, piece, reduction)


def _by_mpi(communicator: MPI.Intracomm, flat: torch.Tensor, reduction: Reduction) -> None:
    # Before the sum, which could overflow; only where the bits are the same.
    if reduction.divides_first:
        flat /= reduction.divisor
    communicator.Allreduce(MPI.IN_PLACE, values(flat), operation_of(reduction))
    if not reduction.divides_first:
        reduction.divide(flat)


def _gathered(communicator: MPI.Intracomm, flat: torch.Tensor, reduction: Reduction) -> None:
    everybodys = flat.new_empty(communicator.size, flat.numel())
    communicator.Allgather(raw(flat), raw(everybodys))
    reduction.fold_into(flat, everybodys.unbind())


def _in_parts(communicator: MPI.Intracomm, flat: torch.Tensor, reduction: Reduction) -> None:
    size = communicator.size
    shares = [share_of(flat.numel(), rank, size) for rank in range(size)]
    sizes = [end - begin for begin, end in shares]
    begin, end = shares[communicator.rank]
    own = flat[begin:end]  # the part that this rank sums for all
    everybodys = own.new_empty(size, own.numel())
    exchange(communicator, flat, sizes, everybodys, [own.numel()] * size)
    reduction.fold_into(own, everybodys.unbind())
    communicator.Allgatherv(MPI.IN_PLACE, _parts(flat, sizes))


def exchange(
    communicator: MPI.Intracomm,
    sent: torch.Tensor,
    sizes: list[int],
    received: torch.Tensor,
    expected: list[int],
) -> None:
    """See `Communicator.exchange`."""
    communicator.Alltoallv(_parts(sent, sizes), _parts(received, expected))


def _parts(tensor: torch.Tensor, sizes: list[int]) -> Any:
    return [raw(tensor)[0], [size * tensor.itemsize for size in sizes], MPI.BYTE]
