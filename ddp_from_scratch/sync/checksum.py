"""Numbers that tell tensors apart by their bits, computed where the tensors are."""

from collections.abc import Sequence

import torch

_WORDS = 2**16  # at a time: what is computed of them stays in a CPU's cache
_FACTOR = 6364136223846793005  # Knuth's, of MMIX: makes the order of pieces count
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """A 64-bit number for each tensor, equal for equal bits in equal (logical) order.

    The elements' bits, as integers, times weights that are odd and random, summed modulo 2**64: a
    change of one element always shows, and changes of several cancel out about once in 2**32
    times at worst. On a GPU nothing but these numbers leaves it.

    Args:
        tensors: dense, of any dtypes, devices and strides.
    """
    weights: dict[torch.device, torch.Tensor] = {}
    sums = []
    for tensor in tensors:
        if tensor.device not in weights:
            weights[tensor.device] = _weights().to(tensor.device)
        sums.append(_sum(_words(tensor), weights[tensor.device]))
    # One transfer for each device, not for each tensor.
    found: dict[int, int] = {}
    for device in weights:
        where = [k for k, one in enumerate(sums) if one.device == device]
        found |= dict(zip(where, torch.stack([sums[k] for k in where]).tolist(), strict=True))
    return [found[k] for k in range(len(sums))]


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """All bits of the tensor, as a flat tensor of integers."""
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return values.contiguous().view(-1).view(_INTEGERS[values.element_size()])


def _sum(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for piece in words.split(_WORDS):
        total = total * _FACTOR + (piece * weights[: len(piece)]).sum()
    return total


def _weights() -> torch.Tensor:
    """Odd numbers, the same on every rank and in every version of torch."""
    numbers = torch.arange(1, _WORDS + 1, dtype=torch.int64)
    for shift in (29, 32):  # spreads every bit of a small number over all 64
        numbers = numbers * _FACTOR
        numbers = numbers ^ (numbers >> shift)
    return numbers | 1
