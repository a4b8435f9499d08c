"""The library's optimizers and torch's, on equal models with equal gradients."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import ddp_from_scratch as ddp

SEVERAL, ALL = 5e-4, float("inf")  # MiB: a few buckets, and one


class Net(nn.Module):
    """Odd sizes, a channels-last weight, a number, nothing, and one of more than a chunk.

    The gradients become ready in another order than that of registration.
    """

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        torch.manual_seed(0)
        shapes: list[Sequence[int]] = [(3,), (5, 7), (4, 3, 2, 2), (), (0, 2), (70_001,), (17,)]
        for k, shape in enumerate(shapes):
            values = torch.randn(shape, dtype=dtype)
            if len(shape) == 4:
                values = values.to(memory_format=torch.channels_last)
            self.register_parameter(f"p{k}", nn.Parameter(values))
        self.order = (2, 0, 6, 1, 5, 3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for k in self.order:
            p = getattr(self, f"p{k}")
            total = total + ((p * p * x * (k + 1)).real.sum() + (p * x).real.sum()).double()
        return total


def inputs(count: int) -> list[float]:
    return [0.3 + 0.1 * (step % 3) for step in range(count)]


def torchs(kind: str) -> Callable[..., Any]:
    """torch's optimizer, with the settings that have the library's bits."""
    settings = {"foreach": False} if kind == "SGD" else {"fused": True}
    return partial(getattr(torch.optim, kind), **settings)


class Pair:
    def __init__(
        self,
        make: Callable[[], nn.Module] = Net,
        groups: Callable[[nn.Module], Any] = nn.Module.parameters,
        cap: float = SEVERAL,
        kind: str = "SGD",
        **options: Any,
    ):
        self.ours, self.theirs = make(), make()
        self.reducer = ddp.Reducer(self.ours, bucket_cap_mb=cap)
        options.setdefault("lr", 0.05)
        self.kind, self.options = kind, options
        ours = getattr(ddp, kind)
        self.our_optimizer = ours(groups(self.ours), reducer=self.reducer, **options)
        # A Reducer too, so that packing and averaging are the same.
        ddp.Reducer(self.theirs, bucket_cap_mb=cap, gradient_as_bucket_view=True)
        self.their_optimizer = torchs(kind)(groups(self.theirs), **options)

    @property
    def both(self) -> tuple[tuple[nn.Module, torch.optim.Optimizer], ...]:
        return (self.ours, self.our_optimizer), (self.theirs, self.their_optimizer)

    def backward(self, x: float, set_to_none: bool = True) -> None:
        for model, optimizer in self.both:
            optimizer.zero_grad(set_to_none=set_to_none)
            model(x).backward()

    def step(self, x: float, set_to_none: bool = True) -> None:
        self.backward(x, set_to_none)
        for _, optimizer in self.both:
            optimizer.step()

    def check(self) -> None:
        assert_same(self.ours, self.theirs)
        for (name, p), q in zip(
            self.ours.named_parameters(), self.theirs.parameters(), strict=True
        ):
            mine, other = self.our_optimizer.state.get(p, {}), self.their_optimizer.state.get(q, {})
            assert mine.keys() == other.keys(), name
            for key in mine:
                assert torch.equal(mine[key], other[key]), f"{name}, {key}"

    def train(self, count: int = 4, **how: Any) -> None:
        for x in inputs(count):
            self.step(x, **how)
            self.check()


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q), name
        assert p.stride() == q.stride(), name


MOMENTUM = {"momentum": 0.9, "weight_decay": 0.01}
ADAMW = {"kind": "AdamW", "weight_decay": 0.1}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weight decay": {"weight_decay": 0.01},
    "momentum": {"momentum": 0.9},
    "dampening": {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
    "nesterov": {"momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
    "maximize": {"momentum": 0.8, "maximize": True, "weight_decay": 0.01},
    "tensor lr": {"lr": torch.tensor(0.03), "momentum": 0.9},
    "AdamW": {"kind": "AdamW"},
    "AdamW, amsgrad": {"kind": "AdamW", "amsgrad": True, "weight_decay": 0.1, "maximize": True},
    "AdamW, tensor lr": ADAMW | {"lr": torch.tensor(1e-2), "betas": (0.7, 0.9), "eps": 1e-3},
    "Adam": {"kind": "Adam", "weight_decay": 0.1},
}
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
each_kind = pytest.mark.parametrize("options", [MOMENTUM, ADAMW], ids=["SGD", "AdamW"])
