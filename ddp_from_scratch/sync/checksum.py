"""Checksums of tensors by their bits, computed on the tensors' own devices."""

from collections.abc import Sequence

import torch

from ddp_from_scratch import gpu

# Elements summed at a time: intermediate results stay in a CPU's cache.
_WORDS = 2**16
# Knuth's multiplier of MMIX. Each piece multiplies the sum so far: the order of pieces counts.
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
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    # On a CPU intermediate results stay in its cache. A GPU gets many pieces at a time: it takes as
    # long to launch an operation as to run it.
    pieces_at_a_time = 256 if gpu.is_gpu(words.device) else 1
    for part in words.split(pieces_at_a_time * _WORDS):
        whole, rest = divmod(len(part), _WORDS)
        sums = (part[: whole * _WORDS].view(whole, _WORDS) * weights).sum(1)
        if rest:
            sums = torch.cat([sums, (part[-rest:] * weights[:rest]).sum().view(1)])
        first, *powers = (_signed(pow(_FACTOR, k, 2**64)) for k in range(len(sums), -1, -1))
        total = total * first + (sums * torch.tensor(powers, device=words.device)).sum()
    return total


def _signed(number: int) -> int:
    # The same bits as an int64.
    return number - 2**64 if number >= 2**63 else number


def _weights() -> torch.Tensor:
    """Returns odd numbers, the same on every rank and in every version of torch."""
    numbers = torch.arange(1, _WORDS + 1, dtype=torch.int64)
    # Spreads every bit of a small number over all 64.
    for shift in (29, 32):
        numbers = numbers * _FACTOR
        numbers = numbers ^ (numbers >> shift)
    # An odd factor has an inverse modulo 2**64: no change of one element can vanish.
    return numbers | 1
