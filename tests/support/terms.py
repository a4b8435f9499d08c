"""A model whose averages are known exactly, and what tests do with it.

Rank r's input is n (r + 1) with n the world size, so every average is exact and no term is: the
gradient of parameter p_k of `Terms` is k + 1 times the input, its average (k + 1) n (n + 1) / 2.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

BYTES = 2**-20  # in bucket_cap_mb


class Terms(nn.Module):
    """The sum over k of (k + 1) x sum(p_k); gradients become ready in reverse order of `use`."""

    def __init__(self, *sizes: int, dtypes: Sequence[torch.dtype] = (torch.float32,)):
        super().__init__()
        for k, size in enumerate(sizes):
            values = torch.zeros(size, dtype=dtypes[k % len(dtypes)])
            self.register_parameter(f"p{k}", nn.Parameter(values))

    def forward(self, x: float, use: Sequence[int] | None = None) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for k in range(len(self._parameters)) if use is None else use:
            total = total + (getattr(self, f"p{k}") * (k + 1) * x).sum().real.double()
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
def recorded(name: str) -> Iterator[list[int]]:
    """The numbers of elements of the tensors with which torch.distributed's `name` is called."""
    called: list[int] = []
    original = getattr(dist, name)

    def record(tensor, *args, **options):
        called.append(tensor.numel())
        return original(tensor, *args, **options)

    setattr(dist, name, record)
    try:
        yield called
    finally:
        setattr(dist, name, original)


CAPS = {"each its own": 0, "12 bytes": 12 * BYTES, "default": None, "all in one": math.inf}


each_cap = pytest.mark.parametrize("cap", CAPS.values(), ids=CAPS.keys())


each_overlap = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "at the end"])
each_view = pytest.mark.parametrize("view", [False, True], ids=["copy", "view"])


class Chain(nn.Module):
    """The same sum, where each layer's output is the next one's input and may be recomputed."""

    def __init__(self, *sizes: int):
        super().__init__()
        for k, size in enumerate(sizes):
            self.register_parameter(f"p{k}", nn.Parameter(torch.zeros(size)))

    def forward(self, start: torch.Tensor, x: float, reentrant: bool | None) -> torch.Tensor:
        total = start
        for k, p in enumerate(self.parameters()):

            def layer(total, p=p, factor=(k + 1) * x):
                return total + (p * factor).sum() + 0 * total.tanh()

            if reentrant is None:
                total = layer(total)
            else:
                total = checkpoint(layer, total, use_reentrant=reentrant)
        return total


def grads_of(model: nn.Module) -> list[float | None]:
    return [None if p.grad is None else p.grad[0].item() for p in model.parameters()]
