"""Windows: tensors in memory that a machine's ranks share."""

import torch

from ddp_from_scratch.node.communicator import Communicator
from ddp_from_scratch.node.shared_memory import SharedMemory


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
