"""Stage: shared memory that a machine's ranks pass tensors through, a piece at a time."""

from collections.abc import Iterator
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
    """One piece of every rank's tensor, in shared memory.

    Attributes:
        parts: each rank's, flat.
        shares: the share of each part that this rank reduces.
    """

    parts: list[torch.Tensor]
    shares: list[torch.Tensor]


class Stage:
    """Slots for pieces of one tensor of every rank.

        rank 0's segment   | piece 0 | piece 1 | piece 2 |   | piece 3 | ...
        rank 1's segment   | piece 0 | piece 1 | piece 2 |   | piece 3 | ...

    Three slots let one barrier a piece be enough: while a fast rank copies piece k + 1 in, a slow
    one may still reduce piece k, or copy the result of piece k - 1 out. The next tensor begins in
    the slot after the last one's.

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
        self._tensor: torch.Tensor | None = None
        self._pieces: tuple[torch.Tensor, ...] = ()

    @property
    def filled(self) -> bool:
        return self._tensor is not None

    def fill(self, tensor: torch.Tensor) -> None:
        """Copies the tensor's first piece in, before the ranks meet. Repeated: in its place."""
        self._tensor = tensor.contiguous()
        flat = self._tensor.view(-1)
        small = flat.nbytes <= self._piece
        self._pieces = (flat,) if small else tuple(flat.split(self._piece // flat.itemsize))
        self._copy_in(self._pieces[0])

    def pieces(self) -> Iterator[StagedPiece]:
        """Pieces that all ranks have copied in.

        The caller leaves each one's result in the first rank's part before it asks for the next.
        """
        for number, piece in enumerate(self._pieces):
            staged = self._views(piece.numel(), piece.dtype, self._slot)
            yield staged
            self._slot = (self._slot + 1) % _SLOTS
            # Before the barrier, so that one barrier serves two ends: after it piece k is reduced
            # and piece k + 1 is in.
            if number + 1 < len(self._pieces):
                self._copy_in(self._pieces[number + 1])
            self._barrier.wait()
            # In the first rank's part all owners have left their shares; all ranks read it.
            piece.copy_(staged.parts[0])

    def take(self) -> torch.Tensor:
        """The reduced tensor: the one that was given to `fill`, or a dense copy of it."""
        tensor, self._tensor, self._pieces = self._tensor, None, ()
        assert tensor is not None, "the stage is empty"
        return tensor

    def free(self) -> None:
        self._views.cache_clear()
        self._memory.free()

    def _copy_in(self, piece: torch.Tensor) -> None:
        parts = self._views(piece.numel(), piece.dtype, self._slot).parts
        parts[self._barrier.rank].copy_(piece)

    @LASTING
    def _make_views(self, numel: int, dtype: torch.dtype, slot: int) -> StagedPiece:
        begin, nbytes = slot * self._piece, numel * dtype.itemsize
        parts = [s[begin : begin + nbytes].view(dtype) for s in self._memory.segments]
        first, last = share_of(numel, self._barrier.rank, self._owners)
        return StagedPiece(parts, [part[first:last] for part in parts])


def share_of(numel: int, rank: int, owners: int) -> tuple[int, int]:
    """Begin and end of the share of `numel` elements that `rank` reduces; empty past the owners.

    Shares begin at multiples of 16 elements, so that no two ranks write to one cache line.
    """
    step = -(-numel // (16 * owners)) * 16
    return min(rank * step, numel), min((rank + 1) * step, numel)
