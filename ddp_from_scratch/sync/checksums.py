"""Checksums of tensors of every kind, by which ranks compare them without sending them."""

from collections.abc import Sequence

import torch

from ddp_from_scratch.common import gpu

_WORDS = 2**16  # elements of a row
# Knuth's MMIX multiplier. Row sums are multiplied by its powers, so that the order of rows counts.
_FACTOR = 6364136223846793005
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BY_COLUMN = (torch.sparse_csc, torch.sparse_bsc)
_BY_ROW = (torch.sparse_csr, torch.sparse_bsr)


@torch.no_grad()
def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Returns a 64-bit checksum of each tensor, of its bits in logical order.

    A sum of integers times odd weights: a change of one element always shows; changes of several
    cancel out at most about once in 2**32 times. A tensor without data (meta, lazy) has 0.
    """
    parts = [[*map(_words, dense_parts(tensor))] for tensor in tensors]
    devices = {words.device for each in parts for words in each}
    weights = {device: _weights().to(device) for device in devices}
    sums = [_sum(words, weights[words.device]) for each in parts for words in each]
    # One transfer for each device, not for each tensor.
    rows = {at: iter(torch.stack([s for s in sums if s.device == at]).tolist()) for at in devices}
    return [_fold([next(rows[words.device]) for words in each]) for each in parts]


def kind_of(tensor: torch.Tensor) -> str:
    """Returns the dtype and the shape of a tensor, and its layout if it is not dense."""
    if torch.nn.parameter.is_lazy(tensor):
        return f"{tensor.dtype}, lazy"
    # A nested tensor has no shape, or one with a name that is not the same on all ranks.
    nested = f"nested, {tensor.size(0)} tensors" if tensor.is_nested else ""
    shape = nested or str(tuple(tensor.shape))
    layout = "" if tensor.layout is torch.strided else f", {tensor.layout}"
    return f"{tensor.dtype} {shape}{layout}"


def dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns dense tensors that together hold what a tensor of any kind holds.

    Of a subclass that consists of other tensors (DTensor), these are this rank's.
    """
    if torch.nn.parameter.is_lazy(tensor) or tensor.is_meta:
        return []
    if hasattr(type(tensor), "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = [getattr(tensor, name) for name in names]  # not all of them are tensors
        return [part for one in inner if torch.is_tensor(one) for part in dense_parts(one)]
    tensor = tensor.detach()
    if tensor.is_nested:
        rows = tensor.unbind()
        shapes = [torch.tensor(row.shape, dtype=torch.int64, device=row.device) for row in rows]
        return [*shapes, *(part for row in rows for part in dense_parts(row))]
    if tensor.is_quantized:
        return [tensor.int_repr(), *_quantizer(tensor)]
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values()]
    if tensor.layout in _BY_ROW:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in _BY_COLUMN:
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.layout is not torch.strided:  # mkldnn
        tensor = tensor.to_dense()
    return [tensor.resolve_conj().resolve_neg()]


def _quantizer(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        numbers = [tensor.q_scale(), float(tensor.q_zero_point())]
        return [torch.tensor(numbers, dtype=torch.float64, device=tensor.device)]
    axis = torch.tensor(tensor.q_per_channel_axis(), dtype=torch.int64, device=tensor.device)
    return [tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points(), axis]


def _words(dense: torch.Tensor) -> torch.Tensor:
    """Returns the bits of a dense tensor as integers."""
    values = torch.view_as_real(dense) if dense.is_complex() else dense
    return values.contiguous().view(-1).view(_INTEGERS[values.element_size()])


def _fold(numbers: Sequence[int]) -> int:
    """Makes one checksum of those of a tensor's parts; that of a single part stays."""
    total: int = sum(number * _FACTOR**index for index, number in enumerate(numbers))
    return (total + 2**63) % 2**64 - 2**63


def _sum(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    if len(words) <= _WORDS:
        return (words * weights[: len(words)]).sum()
    # On a CPU one row stays in the cache. On a GPU, kernel launches dominate.
    rows = 256 if gpu.is_gpu(words.device) else 1
    sums = []
    for part in words.split(rows * _WORDS):
        rest = len(part) % _WORDS
        if rest < len(part):
            sums.append((part[: len(part) - rest].view(-1, _WORDS) * weights).sum(1))
        if rest:
            sums.append((part[-rest:] * weights[:rest]).sum().view(1))
    of_rows = torch.cat(sums)
    return (of_rows * torch.full_like(of_rows, _FACTOR).cumprod(0)).sum()


def _weights() -> torch.Tensor:
    """Returns odd numbers, the same on every rank and in every version of torch."""
    numbers = torch.arange(1, _WORDS + 1, dtype=torch.int64, device="cpu")
    # Spreads the bits of small numbers over all 64.
    for shift in (29, 32):
        numbers = numbers * _FACTOR
        numbers = numbers ^ (numbers >> shift)
    # Odd factors have inverses modulo 2**64, so no change of one element can vanish.
    return numbers | 1
