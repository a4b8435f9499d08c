"""Arguments of collectives: checked where the caller can see the error, and described."""

from collections.abc import Sequence
from functools import partial

import torch

from ddp_from_scratch.node import arguments

check_memory = partial(arguments.check_memory, "mpi")


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
