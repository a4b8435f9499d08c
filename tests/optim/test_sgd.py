"""ddp.SGD beside torch.optim.SGD: the same bits of parameters and momentum.

Most tests need no second rank and run in a group of one, in this process.
"""

from typing import Any

import pytest
import torch
from torch import nn

from ddp_from_scratch import SGD, Reducer
from ddp_from_scratch.optim import flat_params, sgd
from tests.support.sgd_pair import (
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


def test_one_step_by_hand():
    """lr 0.5, decay 0.5, momentum 0.5: d = g + p / 2, m = m / 2 + d, p = p - m / 2."""
    p, g, m = torch.tensor([4.0]), torch.tensor([2.0]), torch.zeros(1)
    group = {"lr": 0.5, "momentum": 0.5, "dampening": 0.0, "weight_decay": 0.5}
    group |= {"nesterov": False, "maximize": False}
    sgd.update(p, g, m, True, group)
    assert (p.item(), g.item(), m.item()) == (2.0, 2.0, 4.0)
    sgd.update(p, g, m, False, group)
    assert (p.item(), g.item(), m.item()) == (-0.5, 2.0, 5.0)


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
    Pair(lambda: Net(dtype), **options).train()


def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of elements of each call of the arithmetic."""
    sizes: list[int] = []
    original = sgd.update

    def record(parameter: torch.Tensor, *arguments: Any) -> None:
        sizes.append(parameter.numel())
        original(parameter, *arguments)

    monkeypatch.setattr(sgd, "update", record)
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


def test_one_call_per_bucket(monkeypatch):
    monkeypatch.setattr(sgd, "_CHUNK", 10**9)
    pair = Pair(Even, **MOMENTUM)
    pair.train(2)
    sizes = calls(monkeypatch)
    pair.train(1)
    buckets = pair.reducer.flat_buckets
    assert 1 < len(buckets) < len(list(pair.ours.parameters()))
    assert sizes == [bucket.layout.numel for bucket in buckets]
    for bucket in buckets:
        assert len({p.untyped_storage().data_ptr() for p in bucket.parameters()}) == 1


def test_chunks_stay_in_the_cache(monkeypatch):
    monkeypatch.setattr(sgd, "_CHUNK", 2**14)
    pair = Pair(Even, cap=ALL)
    pair.train(1)
    sizes = calls(monkeypatch)
    pair.train(1)
    chunk = 2**14 * torch.get_num_threads()
    whole = sum(p.numel() for p in pair.ours.parameters())
    assert sizes == [chunk] * (whole // chunk) + [whole % chunk]


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
