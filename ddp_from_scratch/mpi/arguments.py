"""Arguments of collectives: checked where the caller can see the error, and described."""

import functools
import operator
from collections.abc import Sequence

import torch

# Modes under which operations on a tensor are recorded, or stand for others, and none is computed.
_TRACING = tuple(
    getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL")
)
_INSTEAD = "use torch.distributed._functional_collectives there, or leave it out of what is traced"


def _bits(*names: str) -> int:
    keys = (getattr(torch._C.DispatchKey, name) for name in names)
    return functools.reduce(operator.or_, (torch._C.DispatchKeySet(key).raw_repr() for key in keys))


# Keys of tensors whose memory does not hold their numbers: of subclasses that compute otherwise
# (FakeTensor, DTensor), of functionalize and of vmap; and of views that are computed when read.
_TRANSFORMED = _bits("Python", "Functionalize", "FuncTorchBatched")
_LAZY = _bits("Negative", "Conjugate")


def size_of(tensor: torch.Tensor) -> str:
    """`10 x torch.float32`."""
    return elements(tensor.numel(), tensor.dtype)


def elements(numel: int, dtype: torch.dtype) -> str:
    """`10 x torch.float32`."""
    return f"{numel} x {dtype}"


def sizes_of(tensors: Sequence[torch.Tensor]) -> str:
    """`10, 20 x torch.float32`."""
    return f"{', '.join(str(tensor.numel()) for tensor in tensors)} x {tensors[0].dtype}"


def split_sizes(what: str, tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Elements for each of `size` ranks, of a tensor split along its first dimension."""
    # Rows, as torch counts splits; MPI counts elements.
    rows = tensor.shape[0] if tensor.dim() else 0
    if not splits:
        if rows % size:
            raise ValueError(
                f"all_to_all_single needs an {what} whose first dimension divides evenly over "
                f"{size} ranks, got {rows}: give split sizes"
            )
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows:
        raise ValueError(
            f"all_to_all_single needs {size} {what} split sizes that add up to {rows}, got "
            f"{list(splits)}"
        )
    row_size = tensor.numel() // rows if rows else 0
    return [count * row_size for count in splits]


def check_count(kind: str, what: str, tensors: Sequence[torch.Tensor], size: int) -> None:
    """Raises unless there is one tensor for each rank, all of one dtype."""
    if len(tensors) != size:
        raise ValueError(f"{kind} needs {size} {what} tensors, one a rank, got {len(tensors)}")
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise ValueError(f"{kind} needs {what} tensors of one dtype")


def check_memory(kind: str, *tensors: torch.Tensor) -> None:
    """Raises unless MPI will find the tensors' numbers in memory, and nothing is being traced.

    Before this rank meets the others: the group can go on.
    """
    # Asked of torch's C++ throughout: this is in every call's way, and these take no microsecond.
    if torch._C._len_torch_dispatch_stack() and any(map(torch._C._get_dispatch_mode, _TRACING)):
        raise RuntimeError(f"{kind} on the mpi backend cannot be traced: {_INSTEAD}")
    for tensor in tensors:
        if torch._C._dispatch_keys(tensor).raw_repr() & _TRANSFORMED:
            raise RuntimeError(
                f"{kind} on the mpi backend needs a tensor with numbers in memory, got a "
                f"{type(tensor).__name__} that stands for others: {_INSTEAD}"
            )
        if torch._C._dispatch_keys(tensor).raw_repr() & _LAZY:
            raise RuntimeError(
                f"{kind} on the mpi backend needs a tensor with numbers in memory, got one that is "
                f"negated or conjugated when it is read: call resolve_neg() or resolve_conj() first"
            )
        if not tensor.is_cpu or tensor.layout is not torch.strided:
            raise RuntimeError(
                f"{kind} on the mpi backend needs dense tensors on a CPU, got {tensor.layout} on "
                f"{tensor.device}"
            )


def check_dtype(kind: str, output: torch.Tensor, inputs: Sequence[torch.Tensor]) -> None:
    """Raises unless the inputs, of one dtype, are of the output's."""
    if inputs[0].dtype != output.dtype:
        raise ValueError(
            f"{kind} needs inputs and outputs of one dtype, got {inputs[0].dtype} and "
            f"{output.dtype}"
        )


def check_same(kind: str, tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> None:
    """Raises unless all have the size and the dtype of `tensor`."""
    for other in others:
        if other.numel() != tensor.numel() or other.dtype != tensor.dtype:
            raise ValueError(
                f"{kind} needs tensors of one size and dtype: got {tuple(other.shape)} "
                f"{other.dtype} beside {tuple(tensor.shape)} {tensor.dtype}"
            )


def check_share(kind: str, what: str, whole: torch.Tensor, share: torch.Tensor, size: int) -> None:
    """Raises unless `whole` is as much as `size` shares."""
    if whole.numel() != share.numel() * size or whole.dtype != share.dtype:
        raise ValueError(
            f"{kind} needs an {what} of {share.numel() * size} elements of {share.dtype}, got "
            f"{whole.numel()} of {whole.dtype}"
        )
