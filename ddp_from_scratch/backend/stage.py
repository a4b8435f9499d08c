"""Stage: shared memory that a machine's ranks pass tensors through, a piece at a time.

Windows: tensors in memory that a machine's ranks share.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ddp_from_scratch.backend.barrier import CheckedBarrier
from ddp_from_scratch.backend.reduction import share_of
from ddp_from_scratch.backend.shared_memory import LASTING, SharedMemory
from ddp_from_scratch.backend.transport import Communicator

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


class Windows:
    """A group's tensors in shared memory.

    Memory that this rank no longer uses is unmapped at the next `empty` or at the end of the group.
    The machine has it back when the last rank has unmapped it.
    """

    def __init__(self, node: Communicator) -> None:
        self._node = node
        self._others = [rank for rank in range(node.size) if rank != node.rank]
        # By the address of this rank's segment, which differs over ranks; the number beside it does
        # not, and names the window between them.
        self._memories: dict[int, tuple[int, SharedMemory]] = {}
        self._made = 0

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat, uninitialised tensor, or NoSharedMemory. Collective: the same on all ranks."""
        return self._make(numel, dtype, self._node.rank)

    def empty_for_all(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """As `empty`, but one tensor for all ranks of the machine: the same memory."""
        return self._make(numel, dtype, 0)

    def _make(self, numel: int, dtype: torch.dtype, owner: int) -> torch.Tensor:
        self.free_unused()
        self._made += 1  # also where it fails: other machines may have the memory
        mine = owner == self._node.rank
        memory = SharedMemory(self._node, numel * dtype.itemsize if mine else 0)
        self._memories[memory.addresses[owner]] = (self._made, memory)
        return memory.take(owner).view(dtype)

    def place(self, tensor: torch.Tensor) -> str:
        """The tensor's place, by a name that all ranks have for it; empty outside a window."""
        # A storage begins where its window begins, at whatever offset the tensor lies in it.
        address = tensor.untyped_storage().data_ptr()
        if address not in self._memories or not tensor.is_contiguous():
            return ""
        number, memory = self._memories[address]
        # One tensor for all ranks: an all-reduce in place would add the same memory several times.
        if not all(memory.segments[rank].numel() for rank in self._others):
            return ""
        return f"window {number} at {tensor.data_ptr() - address}"

    def by_rank(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor at this one's place, flat; this one among them."""
        address = tensor.untyped_storage().data_ptr()
        _, memory = self._memories[address]
        begin = tensor.data_ptr() - address
        found = [
            memory.segments[rank][begin : begin + tensor.nbytes].view(tensor.dtype)
            for rank in self._others
        ]
        found.insert(self._node.rank, tensor.view(-1))
        return found

    def free_unused(self) -> None:
        """Unmaps the memory in which no tensor of this rank lies any more."""
        # Other ranks may still have it: each has mapped it for itself, and none reduces in place
        # without this rank's tensor.
        for address, (_, memory) in list(self._memories.items()):
            if not memory.in_use:
                self._memories.pop(address)
                memory.free()
