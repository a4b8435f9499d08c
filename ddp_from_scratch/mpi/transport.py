"""MPI's collectives on dense tensors of any size, and the messages that the node backend needs.

Larger tensors than MPI can count go in pieces.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, cast

import torch

from ddp_from_scratch.mpi import datatypes
from ddp_from_scratch.mpi.datatypes import operation_of, pieces, raw, values
from ddp_from_scratch.mpi.runtime import MPI
from ddp_from_scratch.node.reduction import Reduction
from ddp_from_scratch.node.staging import share_of


class MPICommunicator:
    """`node.communicator.Communicator` over mpi4py's, the `handle`, which `free` releases."""

    def __init__(self, handle: MPI.Intracomm) -> None:
        self.handle = handle
        self.rank, self.size = handle.rank, handle.size
        self.world_rank = MPI.COMM_WORLD.rank

    def allgather(self, value: Any) -> list[Any]:
        return self.handle.allgather(value)

    def split(self, color: int) -> "MPICommunicator":
        return MPICommunicator(cast(MPI.Intracomm, self.handle.Split(color)))

    def split_by_machine(self) -> "MPICommunicator":
        here = self.handle.Split_type(MPI.COMM_TYPE_SHARED)
        return MPICommunicator(cast(MPI.Intracomm, here))

    def free(self) -> None:
        self.handle.Free()

    def begin_allgather(self, own: memoryview, gathered: memoryview) -> Callable[[], bool]:
        # The bound method keeps the request, and with it both buffers, alive.
        return self.handle.Iallgather(own, gathered).Test

    def exchange(
        self, sent: torch.Tensor, sizes: list[int], received: torch.Tensor, expected: list[int]
    ) -> None:
        exchange(self.handle, sent, sizes, received, expected)

    def all_reduce(self, flat: torch.Tensor, reduction: Reduction) -> None:
        all_reduce(self.handle, flat, reduction)


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


Message: TypeAlias = tuple[int, torch.Tensor]  # the other rank, and what is sent or received

# Beyond the tags that programs use for messages of their own on the same communicator.
_TAG = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 0) - 1


class Transport:
    """Calls on one communicator. Collective, by all ranks with the same sizes."""

    def __init__(self, communicator: MPI.Intracomm) -> None:
        self._communicator = communicator
        self._rank, self._size = communicator.rank, communicator.size

    def reduce(self, flat: torch.Tensor, reduction: Reduction, root: int) -> None:
        """Leaves the undivided reduction in `flat` on the root, and keeps it on the others."""
        op = operation_of(reduction)
        for piece in pieces(flat):
            # MPI takes the root's own elements from where the result goes.
            if self._rank == root:
                self._communicator.Reduce(MPI.IN_PLACE, values(piece), op, root)
            else:
                self._communicator.Reduce(values(piece), None, op, root)

    def reduce_scatter(
        self, joined: torch.Tensor, counts: Sequence[int], reduction: Reduction
    ) -> torch.Tensor:
        """This rank's part of the undivided reduction of `joined`, which may be overwritten."""
        # Parts differ in size over ranks, so that cutting them needs a call for each rank.
        if joined.nbytes < datatypes.COUNTABLE:
            own = joined.new_empty(counts[self._rank])
            self._communicator.Reduce_scatter(
                values(joined), values(own), list(counts), operation_of(reduction)
            )
            return own
        parts: Sequence[torch.Tensor] = joined.split(list(counts))
        for root, part in enumerate(parts):
            self.reduce(part, reduction, root)
        return parts[self._rank]

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """Replaces `flat` by the root's."""
        for piece in pieces(flat):
            self._communicator.Bcast(raw(piece), root)

    def all_gather(self, gathered: torch.Tensor, sizes: list[int], flat: torch.Tensor) -> None:
        """Gathers tensors of `sizes` elements into `gathered` on every rank."""
        parts = gathered.split(sizes)
        if gathered.nbytes < datatypes.COUNTABLE:
            counts = [part.nbytes for part in parts]
            self._communicator.Allgatherv(raw(flat), [raw(gathered)[0], counts, MPI.BYTE])
        else:
            # Each part from its rank: a broadcast goes in pieces that MPI can count.
            parts[self._rank].copy_(flat)
            for root, part in enumerate(parts):
                self.broadcast(part, root)

    def gather(self, gathered: torch.Tensor | None, dense: torch.Tensor, root: int) -> None:
        """Gathers equal tensors into `gathered` on the root; None on the others."""
        if self._size * dense.nbytes < datatypes.COUNTABLE:
            into = None if gathered is None else raw(gathered)
            self._communicator.Gather(raw(dense), into, root)
        else:
            parts = [] if gathered is None else gathered.chunk(self._size)
            self.exchange([(root, dense)], enumerate(parts))

    def scatter(self, parts: Sequence[torch.Tensor], flat: torch.Tensor, root: int) -> None:
        """Sends the root's parts, one to each rank's `flat`; no parts on the others."""
        if self._size * flat.nbytes < datatypes.COUNTABLE:
            sent = raw(join(parts, flat.dtype)) if self._rank == root else None
            self._communicator.Scatter(sent, raw(flat), root)
        else:
            sends = parts if self._rank == root else ()
            self.exchange(enumerate(sends), [(root, flat)])

    def exchange(self, sends: Iterable[Message], receives: Iterable[Message]) -> None:
        """Sends to and receives from ranks of the group, at once; also from a rank to itself."""
        # Receives first: a message that finds its receive posted needs no memory in between.
        requests = [
            self._communicator.Irecv(raw(piece), rank, _TAG)
            for rank, tensor in receives
            for piece in pieces(tensor.view(-1))
        ]
        requests += [
            self._communicator.Isend(raw(piece), rank, _TAG)
            for rank, tensor in sends
            for piece in pieces(tensor.contiguous().view(-1))
        ]
        MPI.Request.Waitall(requests)

    def mismatched_pairs(
        self, expected: Sequence[int], sent: Sequence[int]
    ) -> list[tuple[int, int, int, int]]:
        """Pairs of all ranks in which one sends another number of elements than the other expects.

        Args:
            expected: elements that this rank expects, by source.
            sent: elements that it sends, by target.

        Returns:
            Source and target as ranks of the world, elements sent and expected; on all ranks alike.
        """
        # A rank can compare only what comes to it; then all ranks hear of all mismatches, since all
        # must raise.
        coming = torch.empty(self._size, dtype=torch.int64)
        self._communicator.Alltoall(raw(torch.tensor(sent)), raw(coming))
        ours, world = self._communicator.Get_group(), MPI.COMM_WORLD.Get_group()
        names = ours.Translate_ranks(group=world)
        wrong = [
            (names[source], names[self._rank], size, wanted)
            for source, (size, wanted) in enumerate(zip(coming.tolist(), expected, strict=True))
            if size != wanted
        ]
        if not self._communicator.allreduce(len(wrong)):
            return []
        return [pair for pairs in self._communicator.allgather(wrong) for pair in pairs]


def join(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """A flat copy of all parts."""
    return torch.cat([part.reshape(-1).to(dtype) for part in parts])
