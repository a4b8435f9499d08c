"""A model whose averages are known exactly, and what tests do with it.

Rank r's input is n (r + 1) with n the world size, so every average is exact and no term is: the
gradient of parameter p_k of `Terms` is k + 1 times the input, its average (k + 1) n (n + 1) / 2.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from ddp_from_scratch.core import bucket
from ddp_from_scratch.options import fused_wgrad

BYTES = 2**-20  # in bucket_cap_mb


class Terms(nn.Module):
    """The sum over k of (k + 1) x sum(p_k); gradients become ready in reverse order of `use`."""

    def __init__(self, *sizes: int):
        super().__init__()
        for k, size in enumerate(sizes):
            self.register_parameter(f"p{k}", nn.Parameter(torch.zeros(size)))

    def forward(self, x: float, use: Sequence[int] | None = None) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for k in range(len(self._parameters)) if use is None else use:
            total = total + (getattr(self, f"p{k}") * (k + 1) * x).sum().double()
        return total


def own(world) -> float:
    return float(world.world_size * (world.rank + 1))


def mean(world) -> float:
    return world.world_size * (world.world_size + 1) / 2


def assert_grads(model: nn.Module, x: float) -> None:
    """The gradients are those of `Terms` at input `x`, exactly."""
    for name, p in model.named_parameters():
        k = int(name[-1])
        assert torch.equal(p.grad, torch.full_like(p, (k + 1) * x)), f"{name}: {p.grad}"


@contextmanager
def recorded(name: str, owner: Any = dist) -> Iterator[list[int]]:
    """The numbers of elements (of tensors, of a list) that a module's `name` is given."""
    called: list[int] = []
    original = getattr(owner, name)

    def record(tensor, *args, **options):
        called.append(len(tensor) if isinstance(tensor, list) else tensor.numel())
        return original(tensor, *args, **options)

    setattr(owner, name, record)
    try:
        yield called
    finally:
        setattr(owner, name, original)


@contextmanager
def as_large() -> Iterator[None]:
    """Gradients and layers are treated as large ones are, whatever their size."""
    with patch.object(bucket, "_SMALL", 0), patch.object(fused_wgrad, "_MIN_FUSED_NUMEL", 0):
        yield


def grads_of(model: nn.Module) -> list[float | None]:
    return [None if p.grad is None else p.grad[0].item() for p in model.parameters()]


def is_rank_0s(tensor: torch.Tensor) -> bool:
    theirs = tensor.detach().clone()
    dist.broadcast(theirs, 0)
    return torch.equal(theirs, tensor)


def torchs(kind: str) -> Callable[..., Any]:
    """torch's optimizer, with the settings that have the library's bits."""
    settings = {"foreach": False} if kind == "SGD" else {"fused": True}
    return partial(getattr(torch.optim, kind), **settings)
