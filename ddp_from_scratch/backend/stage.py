"""Uses of a group's shared memory: a stage for tensors that pass through, windows for others."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TypeAlias

import torch

from ddp_from_scratch.backend.barrier import CheckedBarrier
from ddp_from_scratch.backend.reduction import Reduction, share_of
from ddp_from_scratch.backend.shared_memory import LASTING, SharedMemory, Topology
from ddp_from_scratch.backend.transport import Transport, flat_bytes, write_back
from ddp_from_scratch.common.errors import NoSharedMemory

# Bytes per piece, so few that the pieces of some ranks together stay in the processor's cache.
PIECE = 1024 * 1024

# Bytes per piece with several machines; larger, since each piece pays the network's latency.
PIECE_ACROSS = 4 * 1024 * 1024

_SLOTS = 3

# Bytes, a multiple of every dtype's.
_ALIGNMENT = 64

# A piece of every rank's tensors: its offset in each tensor, the width of a lane in bytes, and a
# buffer for each rank. In a buffer the rank's lanes follow one another, one for each tensor.
Piece: TypeAlias = tuple[int, int, list[torch.Tensor]]


class Stage:
    """Shared memory that a machine's ranks pass tensors through, a piece at a time.

        rank 0's segment   | piece 0 | piece 1 | piece 2 |   | piece 3 | ...
        rank 1's segment   | piece 0 | piece 1 | piece 2 |   | piece 3 | ...

    With three slots, one barrier per piece is enough: while a fast rank copies piece k + 1 in, a
    slow one may still reduce piece k, or copy the result of piece k - 1 out.

    `owners` is how many ranks of each machine reduce a share, and `shares_memory` is True if two
    ranks of some machine share memory, and all can map a stage. The constructor is collective.
    """

    def __init__(self, topology: Topology, barrier: CheckedBarrier) -> None:
        self._topology, self._barrier = topology, barrier
        sizes = topology.world.allgather(topology.intra_node.size)
        self.owners: int = min(sizes)
        self.shares_memory: bool = max(sizes) > 1
        self._nbytes = PIECE if topology.count == 1 else PIECE_ACROSS
        self.memory: SharedMemory | None = None  # mapped at the first use
        # Not reset between tensors: a slow rank may still copy the last result out of its slot.
        self._slot = 0
        # Cached, since making these views takes as long as reducing a small piece.
        self._views = lru_cache(maxsize=3 * _SLOTS)(self._make_views)
        self.dense: torch.Tensor | None = None  # what `fill` has copied in
        self._pieces: Sequence[torch.Tensor] = ()

    def open(self) -> bool:
        """Maps the memory at first use; False if a machine cannot. Collective."""
        if self.memory is None and self.shares_memory:
            with suppress(NoSharedMemory):
                self.memory = SharedMemory(self._topology.intra_node, _SLOTS * self._nbytes)
            if not all(self._topology.world.allgather(self.memory is not None)):
                # All machines must use the same algorithm, so all use messages from now on.
                self.memory, self.shares_memory = None, False
        return self.memory is not None

    def free(self) -> None:
        self._views.cache_clear()
        if self.memory is not None:
            self.memory.free()

    def fill(self, tensor: torch.Tensor) -> None:
        """Copies a tensor's first piece in, before the ranks meet. A second call replaces it."""
        self.dense = tensor.contiguous()
        self._pieces = self.dense.view(-1).split(self._nbytes // tensor.itemsize)
        self._copy_in(self._pieces[0])

    def shares(self) -> Iterator[list[torch.Tensor]]:
        """Yields by piece every rank's part of this rank's share; the result goes to the first."""
        for number, piece in enumerate(self._pieces):
            parts, shares = self._views(piece.numel(), piece.dtype, self._slot)
            yield shares
            self._slot = (self._slot + 1) % _SLOTS
            # Before the barrier, after which piece k is reduced and also piece k + 1 is in.
            if number + 1 < len(self._pieces):
                self._copy_in(self._pieces[number + 1])
            self._barrier.wait()
            piece.copy_(parts[0])  # all owners have written to the first rank's part

    def take(self) -> torch.Tensor:
        """Returns the reduced tensor: the argument of `fill`, or a dense copy of it."""
        dense, self.dense, self._pieces = self.dense, None, ()
        assert dense is not None, "the stage is empty"
        return dense

    def exchange_pieces(
        self, sent: Sequence[torch.Tensor], most: int, lanes: int
    ) -> Iterator[Piece]:
        """Copies tensors of up to `most` bytes in, a piece at a time, and yields all ranks' pieces.

        Each piece follows a meeting at the barrier.
        """
        width = self._nbytes // lanes // _ALIGNMENT * _ALIGNMENT
        for begin in range(0, most, width):
            parts, _ = self._views(self._nbytes, torch.uint8, self._slot)
            fill_lanes(parts[self._barrier.rank], sent, begin, width)
            self._slot = (self._slot + 1) % _SLOTS
            self._barrier.wait()
            yield begin, width, parts

    def _copy_in(self, piece: torch.Tensor) -> None:
        parts, _ = self._views(piece.numel(), piece.dtype, self._slot)
        parts[self._barrier.rank].copy_(piece)

    @LASTING
    def _make_views(
        self, numel: int, dtype: torch.dtype, slot: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        assert self.memory is not None, "the stage is not open"
        begin, nbytes = slot * self._nbytes, numel * dtype.itemsize
        parts = [part[begin : begin + nbytes].view(dtype) for part in self.memory.segments]
        first, last = share_of(numel, self._barrier.rank, self.owners)
        return parts, [part[first:last] for part in parts]


def fill_lanes(buffer: torch.Tensor, sent: Sequence[torch.Tensor], begin: int, width: int) -> None:
    """Copies up to `width` bytes of each tensor, from `begin` on, into a lane of the buffer."""
    for lane, tensor in enumerate(sent):
        piece = tensor[begin : begin + width]
        buffer[lane * width : lane * width + piece.numel()].copy_(piece)


class Exchange:
    """Copies tensors from rank to rank: in shared memory on one machine, otherwise by messages.

    `sent` is one tensor for all ranks; or, with `for_each`, one for each; or none. No rank sends
    more than `most` bytes to another. `for_each` and `most` are equal on all ranks.
    """

    def __init__(self, topology: Topology, barrier: CheckedBarrier, stage: Stage) -> None:
        self._topology, self._barrier, self._stage = topology, barrier, stage
        self._rank, self._size = topology.world.rank, topology.world.size

    def prepare(self, sent: Sequence[torch.Tensor], most: int, for_each: bool = False) -> str:
        """Copies small tensors to the eager buffer before the ranks meet."""
        if self._is_eager(most, for_each):
            buffer = self._barrier.eager[self._barrier.rank][1 - self._barrier.parity]
            fill_lanes(buffer, [flat_bytes(tensor.contiguous()) for tensor in sent], 0, most)
        return ""

    def __call__(
        self,
        sent: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor | None],
        most: int,
        for_each: bool = False,
        *,
        prepared: bool = True,
    ) -> None:
        """Sends this rank's tensors and receives others' by source, after the ranks have met.

        `received` has None for nothing. `prepared` is False if `prepare` was not called for it.
        """
        wanted = {rank: tensor for rank, tensor in enumerate(received) if tensor is not None}
        dense = {rank: tensor.contiguous() for rank, tensor in wanted.items()}
        into = {rank: flat_bytes(tensor) for rank, tensor in dense.items()}
        flat = [flat_bytes(tensor.contiguous()) for tensor in sent]
        if flat and self._rank in into:  # not through shared memory
            lane = self._rank if for_each else 0
            into.pop(self._rank).copy_(flat[lane])
            if for_each:
                flat[lane] = _NOTHING
        pieces = self._pieces(flat, most, for_each, prepared)
        if pieces is None:
            self._send(flat, into)
        else:
            for begin, parts in pieces:
                for rank, tensor in into.items():
                    piece = tensor[begin : begin + parts[rank].numel()]
                    piece.copy_(parts[rank][: piece.numel()])
        for rank, tensor in wanted.items():
            write_back(dense[rank], tensor)

    def reduce(
        self, sent: Sequence[torch.Tensor], result: torch.Tensor, most: int, reduction: Reduction
    ) -> None:
        """Reduces what every rank sends to this one, one tensor for each, into a flat tensor."""
        flat = [flat_bytes(tensor.contiguous()) for tensor in sent]
        pieces = self._pieces(flat, most, for_each=True, prepared=True)
        if pieces is None:
            everybodys = result.new_empty(self._size, result.numel()).unbind()
            self._send(flat, dict(enumerate(map(flat_bytes, everybodys))))
            reduction.fold_into(result, everybodys)
            return
        for begin, parts in pieces:  # needs no memory for all ranks' tensors
            piece = flat_bytes(result)[begin : begin + parts[0].numel()]
            terms = [part[: piece.numel()].view(result.dtype) for part in parts]
            reduction.fold_into(piece.view(result.dtype), terms)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        own = self._rank
        if self._topology.count == 1:
            received = [tensor if rank == root != own else None for rank in range(self._size)]
            self([tensor] if own == root else [], received, tensor.nbytes)
            return
        # The root sends each rank a part, which that rank sends to all. This spreads the load.
        dense = tensor.contiguous()
        parts = flat_bytes(dense).tensor_split(self._size)
        nothing = [_NOTHING] * self._size
        from_root = [parts[own] if rank == root else _NOTHING for rank in range(self._size)]
        self._topology.world.exchange(parts if own == root else nothing, from_root)
        self._topology.world.exchange([parts[own]] * self._size, parts)
        write_back(dense, tensor)

    def _is_eager(self, most: int, for_each: bool) -> bool:
        # Ranks on other machines cannot read the eager buffers.
        lanes = self._size if for_each else 1
        return self._topology.count == 1 and most * lanes <= self._barrier.eager_nbytes

    def _pieces(
        self, sent: Sequence[torch.Tensor], most: int, for_each: bool, prepared: bool
    ) -> Iterator[tuple[int, list[torch.Tensor]]] | None:
        """Returns where each piece begins, and by rank its lane for this one; None: by messages."""
        if prepared and self._is_eager(most, for_each):
            eager = [pair[self._barrier.parity] for pair in self._barrier.eager]
            pieces: Iterable[Piece] = [(0, most, eager)]
        elif self._topology.count > 1 or not self._stage.open():
            return None
        else:
            pieces = self._stage.exchange_pieces(sent, most, self._size if for_each else 1)
        lane = self._rank if for_each else 0
        return (
            (begin, [part[lane * width : (lane + 1) * width] for part in parts])
            for begin, width, parts in pieces
        )

    def _send(self, flat: Sequence[torch.Tensor], into: dict[int, torch.Tensor]) -> None:
        sent = [*flat] * self._size if len(flat) == 1 else flat or [_NOTHING] * self._size
        self._topology.world.exchange(sent, [into.get(r, _NOTHING) for r in range(self._size)])


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class SharedTensors:
    """A group's tensors in shared memory, which `empty` unmaps once this rank has dropped them."""

    def __init__(self, node: Transport) -> None:
        self._node = node
        self._others = [rank for rank in range(node.size) if rank != node.rank]
        # By address of the owner's segment, which differs between ranks; the numbers are the same.
        self._memories: dict[int, tuple[int, SharedMemory]] = {}
        self._made = 0

    def empty(self, numel: int, dtype: torch.dtype, for_all: bool = False) -> torch.Tensor:
        """Makes a flat, uninitialised tensor, one per rank or for all ranks of the machine."""
        self.free_unused()
        self._made += 1  # even if it fails below, since it may succeed on other machines
        owner = 0 if for_all else self._node.rank
        mine = owner == self._node.rank
        memory = SharedMemory(self._node, numel * dtype.itemsize if mine else 0)
        self._memories[memory.addresses[owner]] = (self._made, memory)
        return memory.take(owner).view(dtype)

    def place(self, tensor: torch.Tensor) -> str:
        """Returns the tensor's place under a name equal on all ranks; empty outside a window."""
        # The storage begins where the window begins, whatever the tensor's offset in it.
        address = tensor.untyped_storage().data_ptr()
        if address not in self._memories or not tensor.is_contiguous():
            return ""
        number, memory = self._memories[address]
        # One for all ranks: an all-reduce in place would add the same memory several times.
        if not all(memory.segments[rank].numel() for rank in self._others):
            return ""
        # Not the address, which an empty tensor lacks.
        return f"window {number} at {tensor.storage_offset() * tensor.itemsize}"

    def by_rank(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        address = tensor.untyped_storage().data_ptr()
        _, memory = self._memories[address]
        begin = tensor.storage_offset() * tensor.itemsize
        place = slice(begin, begin + tensor.nbytes)
        found = [memory.segments[rank][place].view(tensor.dtype) for rank in self._others]
        found.insert(self._node.rank, tensor.view(-1))
        return found

    def free_unused(self) -> None:
        # Other ranks may still use it: each has a mapping of its own.
        for address, (_, memory) in list(self._memories.items()):
            if not memory.in_use:
                self._memories.pop(address)
                memory.free()
