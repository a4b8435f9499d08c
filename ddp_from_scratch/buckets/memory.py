"""The memory that buckets lie in: one flat tensor for all gradients of a dtype on a device."""

import ctypes
import mmap
from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist

from ddp_from_scratch.group import check_group

Memory: TypeAlias = dict[tuple[torch.dtype, torch.device], torch.Tensor]

# Elements that a bucket begins at a multiple of: cache lines, and vectors of any instruction set.
ALIGNMENT = 64

_HUGE_PAGE = 2**21  # bytes
_libc = ctypes.CDLL(None) if hasattr(mmap, "MADV_HUGEPAGE") else None


def allocate(parameters: Sequence[torch.Tensor], process_group: dist.ProcessGroup | None) -> Memory:
    """Zeros for the gradients of all parameters, however they are distributed over buckets.

    Where the group's backend has memory of its own for what it sends, it is that: on the mpi
    backend memory that the ranks of a machine share, and reduce in place. Collective there.
    """
    numel: dict[tuple[torch.dtype, torch.device], int] = {}
    for parameter in parameters:
        key = (parameter.dtype, parameter.device)
        numel[key] = numel.get(key, 0) + parameter.numel() + ALIGNMENT
    return {key: _zeros(number, *key, process_group) for key, number in numel.items()}


def _zeros(
    numel: int, dtype: torch.dtype, device: torch.device, process_group: dist.ProcessGroup | None
) -> torch.Tensor:
    # Not nccl's, which nobody has measured here.
    if device.type == "cpu":
        backend = check_group(process_group)._get_backend(device)
        if backend.supports_tensor_alloc(device):
            return backend.allocate_tensor(numel, dtype=dtype, device=device).zero_()
    return in_huge_pages(torch.empty(numel, dtype=dtype, device=device)).zero_()


def in_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Asks Linux for huge pages where `tensor` lies, which nobody has written to yet; returns it.

    The processor then finds its way through large memory with fewer looks into page tables. A wish:
    where it cannot be granted, and for small tensors, nothing changes.
    """
    if _libc is not None and tensor.device.type == "cpu" and tensor.nbytes >= _HUGE_PAGE:
        begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = tensor.data_ptr() + tensor.nbytes - begin
        _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
    return tensor


def dense_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """The strides that a gradient of this parameter has in a bucket.

    They are the parameter's own where these leave no hole, so that autograd, which lays a gradient
    out as its parameter, never has to transpose (channels-last models).
    """
    dense = parameter.is_contiguous() or parameter.permute(_memory_order(parameter)).is_contiguous()
    return parameter.stride() if dense else torch.empty(parameter.shape, device="meta").stride()


def window(
    buffer: torch.Tensor, offset: int, parameter: torch.Tensor, strides: tuple[int, ...]
) -> torch.Tensor:
    """The elements of `buffer` from `offset` on, in the parameter's shape, with these strides."""
    return buffer.as_strided(parameter.shape, strides, buffer.storage_offset() + offset)


def lies_at(tensor: torch.Tensor, place: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype are the same elements of the same memory.

    Being the same object says less: `module.to(...)` puts other memory under a tensor that stays.
    """
    return tensor.data_ptr() == place.data_ptr() and tensor.stride() == place.stride()


def _memory_order(tensor: torch.Tensor) -> list[int]:
    return sorted(range(tensor.dim()), key=lambda dim: tensor.stride(dim), reverse=True)
