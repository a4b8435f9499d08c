"""A group's shared memory: a stage that tensors pass through, and windows, tensors that stay."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache

import torch

from ddp_from_scratch.backend.barrier import CheckedBarrier
from ddp_from_scratch.backend.reduction import share_of
from ddp_from_scratch.backend.shared_memory import LASTING, Nodes, SharedMemory
from ddp_from_scratch.backend.transport import Transport, flat_bytes
from ddp_from_scratch.errors import NoSharedMemory

# Bytes of a piece. Those of a few ranks stay in the processor's cache from one step to the next.
PIECE = 1024 * 1024

# The same where pieces cross a network, too: every one of them waits for its latency.
PIECE_ACROSS = 4 * 1024 * 1024

_SLOTS = 3


class Stage:
    """Shared memory that a machine's ranks pass tensors through, a piece at a time.

        rank 0's segment   | piece 0 | piece 1 | piece 2 |   | piece 3 | ...
        rank 1's segment   | piece 0 | piece 1 | piece 2 |   | piece 3 | ...

    Three slots let one barrier a piece be enough: while a fast rank copies piece k + 1 in, a slow
    one may still reduce piece k, or copy the result of piece k - 1 out. The next tensor begins in
    the slot after the last one's.

    Collective to make.

    Attributes:
        owners: ranks that reduce a share of each piece: as many as the smallest machine has, so
            that each share has an owner everywhere.
        shares_memory: two ranks of some machine share memory; False also once a machine had none
            for a stage.
    """

    def __init__(self, nodes: Nodes, barrier: CheckedBarrier) -> None:
        self._nodes, self._barrier = nodes, barrier
        sizes = nodes.everyone.allgather(nodes.node.size)
        self.owners, self.shares_memory = min(sizes), max(sizes) > 1
        self._nbytes = PIECE if nodes.count == 1 else PIECE_ACROSS
        self._memory: SharedMemory | None = None
        # Goes on from tensor to tensor: a slow rank may still copy the last result out of its slot.
        self._slot = 0
        # Making so many views takes as long as reducing a small piece: those last used are kept.
        self._views = lru_cache(maxsize=3 * _SLOTS)(self._make_views)
        # Of the tensor that is in.
        self._dense: torch.Tensor | None = None
        self._pieces: Sequence[torch.Tensor] = ()

    @property
    def is_open(self) -> bool:
        return self._memory is not None

    @property
    def is_filled(self) -> bool:
        return self._dense is not None

    def open(self) -> bool:
        """Makes the memory at first use; False where a machine has none for it. Collective."""
        if self._memory is None and self.shares_memory:
            with suppress(NoSharedMemory):
                self._memory = SharedMemory(self._nodes.node, _SLOTS * self._nbytes)
            if not all(self._nodes.everyone.allgather(self._memory is not None)):
                # By messages alone from now on, on all machines: their ways must not differ.
                self._memory, self.shares_memory = None, False
        return self._memory is not None

    def free(self) -> None:
        self._views.cache_clear()
        if self._memory is not None:
            self._memory.free()

    def fill(self, tensor: torch.Tensor) -> None:
        """Copies a tensor's first piece in, before the ranks meet. Repeated: in its place."""
        self._dense = tensor.contiguous()
        self._pieces = self._dense.view(-1).split(self._nbytes // tensor.itemsize)
        self._copy_in(self._pieces[0])

    def shares(self) -> Iterator[list[torch.Tensor]]:
        """This rank's share of each piece, of every rank, once all have copied the piece in.

        The caller leaves the share's result in the first one before it asks for the next.
        """
        for number, piece in enumerate(self._pieces):
            parts, shares = self._views(piece.numel(), piece.dtype, self._slot)
            yield shares
            self._slot = (self._slot + 1) % _SLOTS
            # Before the barrier, so that one barrier serves two ends: after it piece k is reduced
            # and piece k + 1 is in.
            if number + 1 < len(self._pieces):
                self._copy_in(self._pieces[number + 1])
            self._barrier.wait()
            # In the first rank's part all owners have left their shares; all ranks read it.
            piece.copy_(parts[0])

    def take(self) -> torch.Tensor:
        """The reduced tensor: the one that was given to `fill`, or a dense copy of it."""
        dense, self._dense, self._pieces = self._dense, None, ()
        assert dense is not None, "the stage is empty"
        return dense

    def publish(
        self, sent: Sequence[torch.Tensor], most: int
    ) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Yields, piece by piece, where in its rank's bytes a piece begins, and all ranks' pieces.

        `sent` are this rank's bytes, of which no rank has more than `most`.
        """
        for begin in range(0, most, self._nbytes):
            parts, _ = self._views(self._nbytes, torch.uint8, self._slot)
            at = -begin
            for tensor in sent:
                into, of = overlap(parts[self._barrier.rank], tensor, at)
                into.copy_(of)
                at += tensor.numel()
            self._slot = (self._slot + 1) % _SLOTS
            self._barrier.wait()
            yield begin, parts

    def _copy_in(self, piece: torch.Tensor) -> None:
        parts, _ = self._views(piece.numel(), piece.dtype, self._slot)
        parts[self._barrier.rank].copy_(piece)

    @LASTING
    def _make_views(
        self, numel: int, dtype: torch.dtype, slot: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Each rank's piece in a slot, and the shares of them that this rank reduces."""
        assert self._memory is not None, "the stage is not open"
        begin, nbytes = slot * self._nbytes, numel * dtype.itemsize
        parts = [part[begin : begin + nbytes].view(dtype) for part in self._memory.segments]
        first, last = share_of(numel, self._barrier.rank, self.owners)
        return parts, [part[first:last] for part in parts]


def overlap(
    piece: torch.Tensor, tensor: torch.Tensor, at: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What both hold of the same bytes, where the tensor begins `at` bytes into the piece."""
    first = max(at, 0)
    last = max(first, min(at + tensor.numel(), piece.numel()))
    return piece[first:last], tensor[first - at : last - at]


class Exchange:
    """Copies tensors from rank to rank: through shared memory on one machine, else as messages."""

    def __init__(self, nodes: Nodes, barrier: CheckedBarrier, stage: Stage) -> None:
        self._nodes, self._barrier, self._stage = nodes, barrier, stage
        self._size = nodes.everyone.size

    def prepare(self, sent: Sequence[torch.Tensor], most: int) -> str:
        """Brings few bytes along to the coming meeting: see `__call__`."""
        if self.is_eager(most):
            buffer, at = self._barrier.eager[self._barrier.rank][1 - self._barrier.parity], 0
            for tensor in sent:
                buffer[at : at + tensor.nbytes].copy_(flat_bytes(tensor.contiguous()))
                at += tensor.nbytes
        return ""

    def __call__(
        self,
        sent: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor | None],
        most: int,
        begins: Sequence[int] | None = None,
        *,
        prepared: bool = True,
    ) -> None:
        """Sends this rank's tensors and receives others', after the ranks have met.

        Args:
            sent: none, one for all ranks, or one for each.
            received: by the rank that sends it; None where that sends this rank nothing.
            most: bytes that any rank sends at most; the same on all ranks.
            begins: by rank, where in all its bytes those for this rank begin; 0 unless given.
            prepared: `prepare` was called for it.
        """
        own = self._nodes.everyone.rank
        wanted = [
            (rank, tensor, tensor.contiguous())
            for rank, tensor in enumerate(received)
            if tensor is not None and not (rank == own and any(tensor is s for s in sent))
        ]
        into = {rank: flat_bytes(dense) for rank, _, dense in wanted}
        if prepared and self.is_eager(most):
            eager = self._barrier.eager
            pieces = [(0, [pair[self._barrier.parity] for pair in eager])]
            self._read(pieces, into, begins)
        else:
            parts = [flat_bytes(tensor.contiguous()) for tensor in sent]
            if self._nodes.count == 1 and self._stage.open():
                self._read(self._stage.publish(parts, most), into, begins)
            else:
                self._send(parts, into)
        for _, tensor, dense in wanted:
            if dense is not tensor:
                tensor.copy_(dense)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Replaces the tensor by the root's, after the ranks have met."""
        own = self._nodes.everyone.rank
        if self._nodes.count == 1:
            received = [tensor if rank == root else None for rank in range(self._size)]
            self([tensor] if own == root else [], received, tensor.nbytes)
            return
        # The root sends each rank a part, for that to send to all: no rank sends more than another.
        dense = tensor.contiguous()
        parts = flat_bytes(dense).tensor_split(self._size)
        nothing = [_NOTHING] * self._size
        from_root = [parts[own] if rank == root else _NOTHING for rank in range(self._size)]
        self._nodes.everyone.exchange(parts if own == root else nothing, from_root)
        self._nodes.everyone.exchange([parts[own]] * self._size, parts)
        if dense is not tensor:
            tensor.copy_(dense)

    def is_eager(self, most: int) -> bool:
        """True if so many bytes of each rank travel in the eager buffers of a meeting."""
        # Eager buffers reach no other machine.
        return self._nodes.count == 1 and most <= self._barrier.eager_nbytes

    def _read(
        self,
        pieces: Iterable[tuple[int, list[torch.Tensor]]],
        into: dict[int, torch.Tensor],
        begins: Sequence[int] | None,
    ) -> None:
        for begin, parts in pieces:
            for rank, tensor in into.items():
                of, part = overlap(parts[rank], tensor, (begins[rank] if begins else 0) - begin)
                part.copy_(of)

    def _send(self, parts: list[torch.Tensor], into: dict[int, torch.Tensor]) -> None:
        sent = parts * self._size if len(parts) == 1 else parts or [_NOTHING] * self._size
        received = [into.get(rank, _NOTHING) for rank in range(self._size)]
        self._nodes.everyone.exchange(sent, received)


_NOTHING = torch.empty(0, dtype=torch.uint8)


class Windows:
    """A group's tensors in shared memory.

    Memory that this rank no longer uses is unmapped at the next `empty` or at the end of the group.
    The machine has it back when the last rank has unmapped it.
    """

    def __init__(self, node: Transport) -> None:
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
