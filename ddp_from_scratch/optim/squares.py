"""The sum of the squares of gradients, block by block: the same bits on any number of ranks."""

from collections.abc import Sequence
from itertools import accumulate

import torch

from ddp_from_scratch.common.memory import dense_strides
from ddp_from_scratch.optim.update_rules import CACHE_LINE

# Elements. Shares of a bucket are multiples of it, so each block is one rank's.
BLOCK = 1024


def padded_zeros(numel: int, like: torch.Tensor) -> torch.Tensor:
    """Returns zeros for so many elements, in whole blocks."""
    return like.new_zeros(-(-numel // BLOCK) * BLOCK)


def squares_of_blocks(padded: torch.Tensor) -> torch.Tensor:
    """Returns the sum of squares of each block, in float64."""
    rows = padded.view(-1, BLOCK)
    if rows.is_complex():
        rows = torch.view_as_real(rows).flatten(1)
    return rows.double().square().sum(1)


def squares_of_gradients(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the same of a bucket's gradients, which lie in blocks as if in a flat tensor."""
    first = parameters[0]
    line = CACHE_LINE // first.itemsize
    lines = (-(-parameter.numel() // line) * line for parameter in parameters)
    *begins, numel = accumulate(lines, initial=0)
    padded = padded_zeros(numel, first)
    for parameter, begin in zip(parameters, begins, strict=True):
        if parameter.grad is not None:
            window = padded.as_strided(parameter.shape, dense_strides(parameter), begin)
            window.copy_(parameter.grad)
    return squares_of_blocks(padded)


def total(squares: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the sum over the blocks of all buckets."""
    if not squares:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    return torch.cat([*squares]).sum()
