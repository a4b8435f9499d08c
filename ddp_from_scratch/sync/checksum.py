"""Checksums of tensors by their bits, computed on the tensors' own devices."""

from collections.abc import Sequence

import torch

from ddp_from_scratch import gpu

# The elements of a row.
_WORDS = 2**16
# Knuth's multiplier of MMIX. The sums of rows are multiplied by its powers: their order counts.
_FACTOR = 6364136223846793005
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Computes a 64-bit number for each tensor, equal for equal bits in equal (logical) order.

    It is the sum, modulo 2**64, of the elements' bits as integers times odd random weights. A
    change of one element always shows; changes of several cancel out about once in 2**32 times at
    worst.

    Args:
        tensors: dense, of any dtypes, devices and strides.
    """
    weights: dict[torch.device, torch.Tensor] = {}
    sums = []
    for tensor in tensors:
        if tensor.device not in weights:
            weights[tensor.device] = _weights().to(tensor.device)
        sums.append(_sum(_words(tensor), weights[tensor.device]))
    # One transfer for each device, not for each tensor; only the sums leave a GPU.
    found: dict[int, int] = {}
    for device in weights:
        where = [k for k, one in enumerate(sums) if one.device == device]
        found |= dict(zip(where, torch.stack([sums[k] for k in where]).tolist(), strict=True))
    return [found[k] for k in range(len(sums))]


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Returns all bits of the tensor, as a flat tensor of integers."""
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return values.contiguous().view(-1).view(_INTEGERS[values.element_size()])


def _sum(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    if len(words) <= _WORDS:
        return (words * weights[: len(words)]).sum()
    # On a CPU, intermediate results of one row stay in the cache. On a GPU, launches take the time.
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
    numbers = torch.arange(1, _WORDS + 1, dtype=torch.int64)
    # Spreads every bit of a small number over all 64.
    for shift in (29, 32):
        numbers = numbers * _FACTOR
        numbers = numbers ^ (numbers >> shift)
    # An odd factor has an inverse modulo 2**64: no change of one element can vanish.
    return numbers | 1
