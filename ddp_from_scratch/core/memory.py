"""Memory of the buckets: one flat tensor for all gradients of a dtype on a device."""

import ctypes
import mmap
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist

from ddp_from_scratch.core.layout import assign

Memory: TypeAlias = dict[tuple[torch.dtype, torch.device], torch.Tensor]

# Each bucket begins at a multiple of this many elements: at a cache line, and aligned for the
# vectors of any instruction set.
ALIGNMENT = 64

_HUGE_PAGE = 2**21  # bytes
_libc = ctypes.CDLL(None) if hasattr(mmap, "MADV_HUGEPAGE") else None


class FlatMemory:
    """The memory of the flat buckets, and each parameter's shape in it.

    Args:
        parameters: those whose gradients lie in flat buckets; an index stands for one.
        memory_of: the group whose backend may offer the memory (`allocate`); None means none.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], memory_of: dist.ProcessGroup | None
    ) -> None:
        self._gradients = [(p.numel() * p.element_size(), (p.dtype, p.device)) for p in parameters]
        self._numels = [parameter.numel() for parameter in parameters]
        # Fixed now, while all ranks hold the same strides: one rank may transpose a parameter
        # later, and its bucket must still be laid out as on the others.
        self.strides = [dense_strides(parameter) for parameter in parameters]
        # Allocated once, whatever the layout: with shared memory this is collective.
        self._memory = allocate(parameters, memory_of)

    def plan(self, order: Iterable[int], caps: Sequence[int]) -> list[tuple[int, ...]]:
        """Returns the members of the buckets; see `assign`."""
        return assign(self._gradients, order, caps)

    def cut(self, plan: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Returns the buffer of each of these buckets; they lie one behind the other."""
        ends, buffers = dict.fromkeys(self._memory, 0), []
        for members in plan:
            _, key = self._gradients[members[0]]
            numel = sum(self._numels[member] for member in members)
            buffers.append(self._memory[key][ends[key] : ends[key] + numel])
            ends[key] += -(-numel // ALIGNMENT) * ALIGNMENT
        return buffers


def allocate(parameters: Sequence[torch.Tensor], process_group: dist.ProcessGroup | None) -> Memory:
    """Allocates zeros for the gradients of all parameters, enough for any layout.

    Uses the memory that the group's backend offers, if any. The node and the mpi backend offer
    memory that the ranks of a machine share, and reduce in place there; the call is then
    collective. Without a group this rank allocates alone.
    """
    numel: dict[tuple[torch.dtype, torch.device], int] = {}
    for parameter in parameters:
        key = (parameter.dtype, parameter.device)
        # ALIGNMENT more for each: in the worst case every gradient is a bucket of its own.
        numel[key] = numel.get(key, 0) + parameter.numel() + ALIGNMENT
    return {key: _zeros(number, *key, process_group) for key, number in numel.items()}


def _zeros(
    numel: int, dtype: torch.dtype, device: torch.device, process_group: dist.ProcessGroup | None
) -> torch.Tensor:
    # CPU alone: nccl offers memory, too, but its effect here has not been measured.
    if device.type == "cpu" and process_group is not None:
        backend = process_group._get_backend(device)
        if backend.supports_tensor_alloc(device):
            return backend.allocate_tensor(numel, dtype=dtype, device=device).zero_()
    return in_huge_pages(torch.empty(numel, dtype=dtype, device=device)).zero_()


def in_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Asks Linux for huge pages for a tensor that has not been written to yet; returns it."""
    # Fewer TLB misses on large buffers. Best effort: nothing depends on the result.
    if _libc is not None and tensor.device.type == "cpu" and tensor.nbytes >= _HUGE_PAGE:
        begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = tensor.data_ptr() + tensor.nbytes - begin
        _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
    return tensor


def sparse_parameters(module: torch.nn.Module) -> set[int]:
    """Returns the ids of the parameters that a layer declares to have sparse gradients."""
    return {
        id(layer.weight)
        for layer in module.modules()
        if isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and layer.sparse
    }


def dense_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Returns the strides that a gradient of this parameter has in a bucket."""
    # Autograd gives a gradient the strides of its parameter. With the same strides in the bucket no
    # copy has to transpose (channels-last models). Strides with holes need more than numel
    # elements.
    order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    dense = parameter.is_contiguous() or parameter.permute(order).is_contiguous()
    return parameter.stride() if dense else torch.empty(parameter.shape, device="meta").stride()


def split_like(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Cuts `flat` into one part for each of these tensors, of its shape."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def lies_at(tensor: torch.Tensor, place: torch.Tensor) -> bool:
    """True if two tensors of one shape and dtype are the same elements of the same memory."""
    # Identity of the objects is not enough: `module.to(...)` replaces the memory of a tensor that
    # stays the same object.
    return tensor.data_ptr() == place.data_ptr() and tensor.stride() == place.stride()
