"""Helpers for the memory of tensors."""

import ctypes
import mmap
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

_HUGE_PAGE = 2**21  # bytes
_libc = ctypes.CDLL(None) if hasattr(mmap, "MADV_HUGEPAGE") else None


def zeros(
    numel: int, dtype: torch.dtype, device: torch.device, process_group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Returns zeros, in memory that a machine's ranks share if the group's backend offers it."""
    # Only on CPUs: NCCL offers memory, too, but its effect here has not been measured.
    if device.type == "cpu" and process_group is not None:
        backend = process_group._get_backend(device)
        if backend.supports_tensor_alloc(device):
            return backend.allocate_tensor(numel, dtype=dtype, device=device).zero_()
    return in_huge_pages(torch.empty(numel, dtype=dtype, device=device)).zero_()


def in_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Asks Linux for huge pages for a tensor that has not been written yet; returns the tensor."""
    # Large buffers then miss the TLB less. The call may fail without harm.
    if _libc is not None and tensor.device.type == "cpu" and tensor.nbytes >= _HUGE_PAGE:
        begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = tensor.data_ptr() + tensor.nbytes - begin
        _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
    return tensor


# Why a tensor is refused, and what to do.
OVERLAPS = "is expanded: several of its elements share memory: clone() it on every rank"
_LAZY = "is lazy and has no shape yet: run one forward pass on every rank first"
_META = "is on the meta device and has no values: call module.to_empty(device=...) and set them"
_DTENSOR = (
    "is a DTensor: pass `device_mesh` to DistributedDataParallel, the dimension of the mesh to "
    "average over, or list it in `ignore`"
)


def unsupported(tensor: torch.Tensor) -> str:
    """Returns why a tensor can be neither averaged, sent nor compared; empty if it can."""
    if torch.nn.parameter.is_lazy(tensor):
        return _LAZY
    # Not imported here, because the import takes a second, and few programs have such tensors.
    imported = sys.modules.get("torch.distributed.tensor")
    if isinstance(tensor, getattr(imported, "DTensor", ())):
        return _DTENSOR
    if tensor.is_meta:
        return _META
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "is nested" if tensor.is_nested else f"has the layout {tensor.layout}"
        return f"{kind}, and only dense tensors work: make it dense, or list it in `ignore`"
    return ""


def overlaps(tensor: torch.Tensor) -> bool:
    """True if several elements of a dense tensor share memory, as in an expanded one."""
    extent = 1  # elements from the first to the last one, over the dimensions so far
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < extent:
            return tensor.numel() > 0
        extent += (size - 1) * stride
    return False


def overlapping(tensors: Sequence[torch.Tensor]) -> set[int]:
    """Returns the ids of dense tensors whose memory, from first to last element, is also another's.

    A tensor that is listed twice counts as two.
    """
    ranges = []
    for tensor in tensors:
        if tensor.numel():
            rows = zip(tensor.shape, tensor.stride(), strict=True)
            extent = 1 + sum((size - 1) * stride for size, stride in rows)
            begin = tensor.data_ptr()
            ranges.append((begin, begin + extent * tensor.itemsize, id(tensor)))
    found = set()
    furthest = 0, 0  # the end of all ranges so far, and the tensor that ends there
    for begin, end, this in sorted(ranges):
        if begin < furthest[0]:
            found |= {furthest[1], this}
        furthest = max(furthest, (end, this))
    return found


def give_own_gradients(parameters: Sequence[torch.Tensor]) -> None:
    """Copies each dense `.grad` that cannot be written to without changing something else.

    Such are expanded ones, and those that share memory with another `.grad` or with a parameter.
    """
    rows = [(p, p.grad) for p in parameters if p.grad is not None]
    dense = [(p, gradient) for p, gradient in rows if gradient.layout is torch.strided]
    shared = overlapping([*(gradient for _, gradient in dense), *parameters])
    for parameter, gradient in dense:
        if id(gradient) in shared or overlaps(gradient):
            own = torch.empty_strided(
                parameter.shape,
                dense_strides(parameter),
                dtype=gradient.dtype,
                device=gradient.device,
            )
            parameter.grad = own.copy_(gradient)


def sparse_parameters(module: torch.nn.Module) -> set[int]:
    """Returns the ids of the parameters for which a layer declares sparse gradients."""
    return {
        id(layer.weight)
        for layer in module.modules()
        if isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and layer.sparse
    }


def dense_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Returns the strides that a gradient of this parameter has in a bucket."""
    # Autograd gives a gradient the strides of its parameter. With the same strides in the bucket,
    # no copy has to transpose (channels-last models). Strides with holes would not fit.
    order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    dense = parameter.is_contiguous() or parameter.permute(order).is_contiguous()
    return parameter.stride() if dense else _contiguous_strides(parameter)


def _contiguous_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    return torch.empty(parameter.shape, dtype=parameter.dtype, device="meta").stride()


def split_like(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Splits `flat` into a view for each of these tensors, with that tensor's shape."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def same_memory(tensor: torch.Tensor, place: torch.Tensor) -> bool:
    """True if two tensors of one shape and dtype have the same elements in memory."""
    # Comparing the objects is not enough: `module.to(...)` gives a tensor other memory.
    return (
        tensor.data_ptr() == place.data_ptr()
        and tensor.stride() == place.stride()
        and not is_lazy(tensor)
    )


def is_lazy(tensor: torch.Tensor) -> bool:
    """True if a tensor is the conjugate or the negative of what its memory holds."""
    return tensor.is_conj() or tensor.is_neg()


def copy_one_by_one(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies each source to its target.

    `torch._foreach_copy_` takes no lazy tensor, such as the gradient of a parameter whose conjugate
    is used.
    """
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def as_real(flat: torch.Tensor) -> torch.Tensor:
    """Returns a flat complex tensor as one of twice as many reals, in the same memory."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def grad_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Returns the dtype of a parameter's gradient; usually that of the parameter.

    Raises a ValueError if it may be any (`grad_dtype` is None).
    """
    dtype: torch.dtype | None = parameter.grad_dtype
    if dtype is None:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} has grad_dtype=None, so its gradients "
            f"may have any dtype, and a bucket has one: set grad_dtype to the one they have"
        )
    return dtype
