"""Stage: shared memory that a machine's ranks pass tensors through, a piece at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ddp_from_scratch.node.barrier import CheckedBarrier
from ddp_from_scratch.node.communicator import Communicator
from ddp_from_scratch.node.shared_memory import LASTING, SharedMemory

# Bytes of a piece. Those of a few ranks stay in the processor's cache from one step to the next.
PIECE = 1024 * 1024

# The same where pieces cross a network, too: every one of them waits for its latency.
PIECE_ACROSS = 4 * 1024 * 1024

_SLOTS = 3


@dataclass(frozen=True)
class StagedPiece:
    """One piece of every row, in shared memory.

    Attributes:
        parts: each rank's rows, flat.
        shares: the share of each row that this rank reduces, in order of ranks.
    """

    parts: list[list[torch.Tensor]]
    shares: list[torch.Tensor]


class Stage:
    """Slots for pieces of every rank's rows: tensors of one size, most often one of each rank.

        rank 0's segment   | piece 0 | piece 1 | piece 2 |   | piece 3 | ...
        rank 1's segment   | piece 0 | piece 1 | piece 2 |   | piece 3 | ...

    Three slots let one barrier a piece be enough: while a fast rank copies piece k + 1 in, a slow
    one may still reduce piece k, or copy the result of piece k - 1 out. The next tensor begins in
    the slot after the last one's. Several rows of a rank lie in a slot one after the other.

    Collective to make. `owners` ranks reduce a share each; `piece` is in bytes.
    """

    def __init__(
        self, node: Communicator, barrier: CheckedBarrier, owners: int, piece: int
    ) -> None:
        self._memory = SharedMemory(node, _SLOTS * piece)
        self._barrier, self._owners, self._piece = barrier, owners, piece
        # Goes on from tensor to tensor: a slow rank may still copy the last result out of its slot.
        self._slot = 0
        # Making so many views takes as long as reducing a small piece: those last used are kept.
        self._views = lru_cache(maxsize=3 * _SLOTS)(self._make_views)
        self._first: torch.Tensor | None = None
        # Of the tensor that is in: the rows of each rank, and this rank's rows piece by piece.
        self._counts: tuple[int, ...] = ()
        self._pieces: list[tuple[torch.Tensor, ...]] = []

    @property
    def filled(self) -> bool:
        return self._first is not None

    def fill(
        self,
        rows: Sequence[torch.Tensor],
        counts: tuple[int, ...] | None = None,
        most: int = 1,
    ) -> None:
        """Copies the rows' first piece in, before the ranks meet. Repeated: in its place.

        `counts` is how many rows each rank of the machine has, where that is not one; `most` how
        many any rank has on any machine, so that all machines have the same pieces.
        """
        dense = [row.contiguous() for row in rows]
        self._first = dense[0]
        self._counts = counts or (1,) * len(self._memory.segments)
        size = self._piece // (most * self._first.itemsize)
        flat = [row.view(-1) for row in dense]
        if self._first.numel() <= size:
            self._pieces = [tuple(flat)]
        else:
            self._pieces = list(zip(*(row.split(size) for row in flat), strict=True))
        self._copy_in(self._pieces[0])

    def pieces(self) -> Iterator[StagedPiece]:
        """Pieces that all ranks have copied in.

        The caller leaves each one's result in the first share before it asks for the next.
        """
        for number, piece in enumerate(self._pieces):
            staged = self._views_of(piece)
            yield staged
            self._slot = (self._slot + 1) % _SLOTS
            # Before the barrier, so that one barrier serves two ends: after it piece k is reduced
            # and piece k + 1 is in.
            if number + 1 < len(self._pieces):
                self._copy_in(self._pieces[number + 1])
            self._barrier.wait()
            # In the first row all owners have left their shares; all ranks read it.
            piece[0].copy_(staged.parts[0][0])

    def take(self) -> torch.Tensor:
        """The reduced tensor: the first one that was given to `fill`, or a dense copy of it."""
        first, self._first, self._pieces = self._first, None, []
        assert first is not None, "the stage is empty"
        return first

    def free(self) -> None:
        self._views.cache_clear()
        self._memory.free()

    def _copy_in(self, piece: tuple[torch.Tensor, ...]) -> None:
        parts = self._views_of(piece).parts[self._barrier.rank]
        for part, row in zip(parts, piece, strict=True):
            part.copy_(row)

    def _views_of(self, piece: tuple[torch.Tensor, ...]) -> StagedPiece:
        return self._views(piece[0].numel(), piece[0].dtype, self._slot, self._counts)

    @LASTING
    def _make_views(
        self, numel: int, dtype: torch.dtype, slot: int, counts: tuple[int, ...]
    ) -> StagedPiece:
        begin, nbytes = slot * self._piece, numel * dtype.itemsize
        parts = [
            [segment[begin + row * nbytes :][:nbytes].view(dtype) for row in range(count)]
            for segment, count in zip(self._memory.segments, counts, strict=True)
        ]
        first, last = share_of(numel, self._barrier.rank, self._owners)
        return StagedPiece(parts, [row[first:last] for rows in parts for row in rows])


def share_of(numel: int, rank: int, owners: int) -> tuple[int, int]:
    """Begin and end of the share of `numel` elements that `rank` reduces; empty past the owners.

    Shares begin at multiples of 16 elements, so that no two ranks write to one cache line.
    """
    step = -(-numel // (16 * owners)) * 16
    return min(rank * step, numel), min((rank + 1) * step, numel)
