"""Shared memory that a machine's ranks pass tensors through, a piece at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from ddp_from_scratch.mpi.runtime import MPI
from ddp_from_scratch.node.barrier import Meeting
from ddp_from_scratch.node.shared_memory import SharedMemory

# Bytes of a piece. Those of a few ranks stay in the processor's cache from one step to the next.
PIECE = 1024 * 1024

# The same where pieces cross a network, too: every one of them waits for its latency.
PIECE_ACROSS = 4 * 1024 * 1024

_SLOTS = 3


@dataclass(frozen=True)
class Place:
    """Where a piece is staged.

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

    Collective to make and to free.

    Args:
        node: the ranks of this machine.
        meeting: where they meet.
        owners: how many of them reduce a share.
        piece: bytes of one.
    """

    def __init__(self, node: MPI.Intracomm, meeting: Meeting, owners: int, piece: int) -> None:
        self._memory = SharedMemory(node, _SLOTS * piece)
        self._meeting, self._owners, self._piece = meeting, owners, piece
        self._slot = 0
        # Making so many views takes as long as reducing a small piece: those last used are kept.
        self._place = lru_cache(maxsize=3 * _SLOTS)(self._make_place)
        self._tensor: torch.Tensor | None = None
        self._pieces: tuple[torch.Tensor, ...] = ()

    @property
    def brought(self) -> bool:
        """Whether a tensor is waiting to be reduced."""
        return self._tensor is not None

    def bring(self, tensor: torch.Tensor) -> None:
        """Copies the tensor's first piece in, before the ranks meet. Again: in its place."""
        self._tensor = tensor.contiguous()
        flat = self._tensor.view(-1)
        small = flat.nbytes <= self._piece
        self._pieces = (flat,) if small else tuple(flat.split(self._piece // flat.itemsize))
        self._copy_in(self._pieces[0])

    def places(self) -> Iterator[Place]:
        """Where each piece is, when all ranks have brought it: then it can be reduced.

        The result, in the first rank's part, has replaced that piece of `tensor()` before the next
        but one is given.
        """
        for number, piece in enumerate(self._pieces):
            place = self._place(piece.numel(), piece.dtype, self._slot)
            yield place
            self._slot = (self._slot + 1) % _SLOTS
            if number + 1 < len(self._pieces):
                self._copy_in(self._pieces[number + 1])
            self._meeting.barrier()
            piece.copy_(place.parts[0])

    def take(self) -> torch.Tensor:
        """The reduced tensor: the one that was brought, or a dense copy of it."""
        tensor, self._tensor, self._pieces = self._tensor, None, ()
        assert tensor is not None, "nothing was brought"
        return tensor

    def free(self) -> None:
        """Gives the memory back. Collective."""
        self._place.cache_clear()
        self._memory.free()

    def _copy_in(self, piece: torch.Tensor) -> None:
        parts = self._place(piece.numel(), piece.dtype, self._slot).parts
        parts[self._meeting.rank].copy_(piece)

    def _make_place(self, numel: int, dtype: torch.dtype, slot: int) -> Place:
        begin, nbytes = slot * self._piece, numel * dtype.itemsize
        parts = [s[begin : begin + nbytes].view(dtype) for s in self._memory.segments]
        first, last = share_of(numel, self._meeting.rank, self._owners)
        return Place(parts, [part[first:last] for part in parts])


def share_of(numel: int, rank: int, owners: int) -> tuple[int, int]:
    """Begin and end of the share of `numel` elements that `rank` reduces; empty past the owners.

    Shares begin at multiples of 16 elements, so that no two ranks write to one cache line.
    """
    step = -(-numel // (16 * owners)) * 16
    return min(rank * step, numel), min((rank + 1) * step, numel)
