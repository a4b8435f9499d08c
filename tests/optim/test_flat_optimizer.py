"""Flat optimizers beside torch's: the same bits of parameters and state.

Most tests need no second rank and run in a group of one, in this process.
"""

from typing import Any

import pytest
import torch
from torch import nn

from ddp_from_scratch import SGD, Reducer
from ddp_from_scratch.optim import flat_params
from ddp_from_scratch.optim.update_rules import AdamRule, SGDRule, UpdateRule
from tests.support.optimizer_pair import (
    ADAMW,
    ALL,
    MOMENTUM,
    SEVERAL,
    Net,
    Pair,
    assert_same,
    each_option,
    inputs,
)

pytestmark = pytest.mark.usefixtures("alone")


class OddHeads(nn.Module):
    """Products with single rows, whose rounding depends on where a weight lies in memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [(38, 138), (183, 139), (48, 189), (37, 61), (64, 64)]
        self.layers = nn.ModuleList(nn.Linear(*size) for size in sizes)

    def forward(self, x: float) -> torch.Tensor:
        return torch.stack(
            [
                layer(torch.linspace(0, x, layer.in_features)[None]).square().sum()
                for layer in self.layers
            ]
        ).sum()


@pytest.mark.parametrize("cap", [SEVERAL, ALL])
def test_parameters_begin_where_products_have_torchs_bits(cap):
    pair = Pair(OddHeads, cap=cap, lr=1e-4, momentum=0.9)
    pair.train(10)
    assert all(p.data_ptr() % 64 == 0 for p in pair.ours.parameters())


def test_parameters_that_share_memory_are_found():
    whole = torch.zeros(10)
    inside, apart, empty = whole[2:4], torch.zeros(3), torch.zeros(0)
    halves = torch.zeros(4).split(2)
    assert flat_params.overlapping([apart, inside, whole, empty, *halves]) == {
        id(whole),
        id(inside),
    }


@each_option
@pytest.mark.parametrize("cap", [0, SEVERAL, ALL], ids=["each its own", "several", "all in one"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_bits_are_those_of_torch(options, cap, set_to_none):
    Pair(cap=cap, **options).train(set_to_none=set_to_none)


@each_option
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64], ids=str
)
def test_bits_are_those_of_torch_in_every_dtype(options, dtype):
    if dtype.is_complex and "kind" in options:
        pytest.skip("torch's fused kernel takes no complex numbers")
    Pair(lambda: Net(dtype), **options).train()


def calls(monkeypatch: pytest.MonkeyPatch, rule: type[UpdateRule]) -> list[int]:
    """The number of elements of each call of the arithmetic."""
    sizes: list[int] = []
    original = rule.update_flat

    def record(self: UpdateRule, tensors: Any, *arguments: Any) -> None:
        sizes.append(tensors[0].numel())
        original(self, tensors, *arguments)

    monkeypatch.setattr(rule, "update_flat", record)
    return sizes


def even() -> nn.Module:
    """Sizes that are multiples of 16 elements, so that neighbours are stepped together."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(1, 16 * k) for k in (1, 2, 3, 1, 2)), nn.Linear(1, 30_000))


class Even(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = even()

    def forward(self, x: float) -> torch.Tensor:
        return torch.stack([layer(torch.tensor([x])).square().sum() for layer in self.layers]).sum()


@pytest.mark.parametrize(("options", "rule"), [(MOMENTUM, SGDRule), (ADAMW, AdamRule)])
def test_one_call_per_bucket(monkeypatch, options, rule):
    pair = Pair(Even, **options)
    pair.train(2)
    sizes = calls(monkeypatch, rule)
    pair.train(1)
    buckets = pair.reducer.flat_buckets
    assert 1 < len(buckets) < len(list(pair.ours.parameters()))
    assert sizes == [bucket.layout.numel for bucket in buckets]
    for bucket in buckets:
        assert len({p.untyped_storage().data_ptr() for p in bucket.parameters()}) == 1


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    own = dict(model.named_parameters())
    first = [own.pop("p1"), own.pop("p6")]
    return [{"params": own.values()}, {"params": first, "lr": 0.3, "momentum": 0.0}]


def alternating(model: nn.Module) -> list[dict[str, Any]]:
    own = list(model.parameters())
    return [{"params": own[::2]}, {"params": own[1::2], "weight_decay": 0.2, "nesterov": True}]


@pytest.mark.parametrize("groups", [two_groups, alternating])
def test_groups(groups):
    Pair(groups=groups, **MOMENTUM).train()


def test_named_parameters():
    Pair(groups=nn.Module.named_parameters, **MOMENTUM).train()


def test_group_added_later():
    def half(model: nn.Module) -> list[torch.Tensor]:
        return list(model.parameters())[:4]

    pair = Pair(groups=half, **MOMENTUM)
    pair.train(2)
    for model, optimizer in pair.both:
        optimizer.add_param_group({"params": list(model.parameters())[4:], "lr": 0.2})
    pair.train(2)


def test_group_changed_by_hand():
    pair = Pair(groups=lambda model: list(model.parameters())[:4], **MOMENTUM)
    pair.train(2)
    for model, optimizer in pair.both:
        optimizer.param_groups[0]["params"] += list(model.parameters())[4:]
    pair.train(2)


def test_parameter_of_no_bucket():
    def with_another(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model.__dict__["other"] = nn.Parameter(torch.randn(5))  # no part of the module
        return [*model.parameters(), model.__dict__["other"]]

    pair = Pair(groups=with_another, **MOMENTUM)
    for x in inputs(3):
        pair.backward(x)
        for model, optimizer in pair.both:
            other = model.__dict__["other"]
            before = other.detach().clone()
            (other * other).sum().backward()
            optimizer.step()
            assert not torch.equal(other, before)
        pair.check()
    assert torch.equal(*(model.__dict__["other"] for model, _ in pair.both))


def test_two_optimizers_for_one_reducer():
    model, reference = Net(), Net()
    reducer = Reducer(model, bucket_cap_mb=SEVERAL, gradient_as_bucket_view=True)
    own = list(model.parameters())
    halves = [SGD(own[:3], 0.1, 0.9, reducer=reducer), SGD(own[3:], 0.2, reducer=reducer)]
    other = list(reference.parameters())
    theirs = [torch.optim.SGD(other[:3], 0.1, 0.9), torch.optim.SGD(other[3:], 0.2)]
    for x in inputs(4):
        model.zero_grad()
        reference.zero_grad()
        model(x).backward()
        reference(x).backward()
        for optimizer in (*halves, *theirs):
            optimizer.step()
    assert_same(model, reference)
