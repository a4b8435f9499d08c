"""Uses of a group's shared memory: a stage for tensors that pass through, windows for others."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TypeAlias

import torch

from ddp_from_scratch.backend.barrier import CheckedBarrier
from ddp_from_scratch.backend.shared_memory import LASTING, SharedMemory, Topology
from ddp_from_scratch.backend.transport import Transport
from ddp_from_scratch.common.errors import NoSharedMemory

# Bytes per piece, so few that the pieces of some ranks together stay in the processor's cache.
PIECE = 1024 * 1024

# Bytes per piece with several machines; larger, since each piece pays the network's latency.
PIECE_ACROSS = 4 * 1024 * 1024

_SLOTS = 3

# Bytes, a multiple of every dtype's.
_ALIGNMENT = 64

# The place of a piece in what each rank sends, and by rank its elements there for this rank.
Piece: TypeAlias = tuple[slice, list[torch.Tensor]]


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
        # Cached, since making views takes as long as reducing a small piece.
        self._views = lru_cache(maxsize=3 * _SLOTS)(self._make_views)
        self._prepared = False  # whether all ranks' first piece is in

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

    def prepare(self, sent: Sequence[torch.Tensor], lanes: int = 1) -> None:
        """Copies the first piece in before the ranks meet, which saves it a barrier.

        If one rank does this, all do, unless they meet at different places.
        """
        self._copy_in(sent, self._width(lanes), 0)
        self._prepared = True

    def pieces(
        self, sent: Sequence[torch.Tensor], most: int, dtype: torch.dtype, lanes: int = 1
    ) -> Iterator[Piece]:
        """Passes flat tensors of up to `most` elements through, after the ranks have met.

        A rank sends one tensor to all, or one to each through as many lanes, or nothing. The ranks
        may write to a piece; all can read that after the next piece's barrier, or one more.
        """
        prepared, self._prepared = self._prepared and self._barrier.same_place, False
        width, lane = self._width(lanes), self._barrier.rank if lanes > 1 else 0
        for begin in range(0, most, width // dtype.itemsize):
            if begin or not prepared:
                self._copy_in(sent, width, begin)
                self._barrier.wait()
            end = min(begin + width // dtype.itemsize, most)
            parts = self._views(self._slot * self._nbytes + lane * width, end - begin, dtype)
            self._slot = (self._slot + 1) % _SLOTS
            yield slice(begin, end), parts

    def _width(self, lanes: int) -> int:
        return self._nbytes // lanes // _ALIGNMENT * _ALIGNMENT

    def _copy_in(self, sent: Sequence[torch.Tensor], width: int, begin: int) -> None:
        assert self.memory is not None, "the stage is not open"
        own = self.memory.segments[self._barrier.rank]
        for lane, tensor in enumerate(sent):
            piece = tensor[begin : begin + width // tensor.itemsize]
            place = self._slot * self._nbytes + lane * width
            own[place : place + piece.nbytes].view(piece.dtype).copy_(piece)

    @LASTING
    def _make_views(self, place: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        assert self.memory is not None, "the stage is not open"
        nbytes = numel * dtype.itemsize
        return [segment[place : place + nbytes].view(dtype) for segment in self.memory.segments]


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
