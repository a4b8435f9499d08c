"""Backward and step in one, and steps on ranks."""

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_from_scratch import SGD, Reducer, broadcast_parameters
from ddp_from_scratch.buckets.gradient_bucket import BucketState
from ddp_from_scratch.optim.flat_params import FlatParams
from tests.support.optimizer_pair import (
    MOMENTUM,
    SEVERAL,
    Pair,
    assert_same,
    each_option,
    inputs,
    ours,
    torchs,
)
from tests.support.tiers import slow

pytestmark = pytest.mark.usefixtures("alone")


def train_in_one(pair: Pair, count: int, accumulates: bool = False) -> None:
    for x in inputs(count):
        for model, optimizer in pair.both:
            optimizer.zero_grad()
            if accumulates:
                with pair.reducer.no_sync():
                    model(2 * x).backward()
        pair.our_optimizer.backward_and_step(pair.ours(x))
        pair.theirs(x).backward()
        pair.their_optimizer.step()
        pair.check()


@each_option
def test_backward_and_step_is_both(options):
    train_in_one(Pair(**options), 4)


def test_backward_and_step_counts_as_a_step_after_accumulation():
    pair = Pair(**MOMENTUM)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for _, o in pair.both]
    told: list[str] = []
    pair.our_optimizer.register_step_pre_hook(lambda *_: told.append("pre"))
    pair.our_optimizer.register_step_post_hook(lambda *_: told.append("post"))
    for _ in range(3):
        train_in_one(pair, 1, accumulates=True)
        for scheduler in schedulers:
            scheduler.step()  # warns, here an error, unless it knows of a step
    assert told == ["pre", "post"] * 3


def test_backward_and_step_that_averages_nothing_steps_nothing():
    pair = Pair(**MOMENTUM)
    train_in_one(pair, 2)
    before = copy.deepcopy(pair.ours)
    with (
        pair.reducer.no_sync(),
        pytest.raises(RuntimeError, match=r"nothing was averaged.*no_sync\(\)"),
    ):
        pair.our_optimizer.backward_and_step(pair.ours(1.0))
    with pytest.raises(RuntimeError, match="nothing was averaged"):
        pair.our_optimizer.backward_and_step(torch.ones((), requires_grad=True) * 2)
    pair.ours.order = (0, 1, 2, 3, 4)
    with pytest.raises(RuntimeError, match=r"no gradient .* for: (p5, p6|p6, p5)"):
        pair.our_optimizer.backward_and_step(pair.ours(1.0))
    assert_same(pair.ours, before)


def mlp() -> nn.Module:
    torch.manual_seed(3)
    sizes = [nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 5)]
    return nn.Sequential(*sizes)


def batch(step: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(step)
    return torch.randn(count, 6), torch.randint(5, (count,))


OF_KIND = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3, "nesterov": True},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
}


def beside_torch(world, kind, prefix, in_one):
    """Beside torch's DDP with torch's optimizer."""
    n, options = world.world_size, OF_KIND[kind]
    mine = mlp()
    broadcast_parameters(mine)
    theirs = DistributedDataParallel(copy.deepcopy(mine), bucket_cap_mb=SEVERAL)
    # gloo takes the sum of three or more numbers in another order than shared memory.
    reducer = Reducer(mine, bucket_cap_mb=SEVERAL, shared_memory=n == 2 or bool(prefix))
    optimizer = ours(prefix + kind)(mine.parameters(), reducer=reducer, **options)
    their_optimizer = torchs(kind)(theirs.parameters(), **options)
    assert len(reducer.buckets) >= 3
    for step in range(6):
        x, y = (part.chunk(n)[world.rank] for part in batch(step, 4 * n))
        optimizer.zero_grad()
        their_optimizer.zero_grad()
        cross_entropy(theirs(x), y).backward()
        loss = cross_entropy(mine(x), y)
        if in_one:
            optimizer.backward_and_step(loss)
        else:
            loss.backward()
            optimizer.step()
        if step == 0 and not (prefix and in_one):
            # torch's first step has one bucket, ours several: with three ranks, another order of
            # sums. From here on they are the same.
            for p, q in zip(theirs.parameters(), mine.parameters(), strict=True):
                p.grad.copy_(q.grad)
        their_optimizer.step()
        assert_same(mine, theirs.module)


@pytest.mark.parametrize("kind", OF_KIND)
@pytest.mark.parametrize("in_one", [False, True], ids=["step", "backward and step"])
@pytest.mark.parametrize(
    "crew",
    ["gloo-3", "gloo-2-NodeShared", slow("mpi-2"), slow("mpi-2-NodeShared")],
)
def test_as_torch_bit_for_bit_on_ranks(ranks, crew, kind, in_one):
    backend, size, *prefix = crew.split("-")
    ranks(backend, int(size))(beside_torch, kind, "".join(prefix), in_one)


def steps_in_flight(world):
    """How many all-reduces are under way at the step of each bucket."""
    model = mlp()
    reducer = Reducer(model, bucket_cap_mb=SEVERAL, gradient_as_bucket_view=True)
    optimizer = SGD(model.parameters(), 0.1, 0.9, reducer=reducer)
    in_flight: list[int] = []
    original = FlatParams.update

    def record(*arguments: Any) -> None:
        in_flight.append(sum(b.state is not BucketState.FILLING for b in reducer.flat_buckets))
        original(*arguments)

    with patch.object(FlatParams, "update", record):
        for step in range(2):
            in_flight.clear()
            x, y = batch(step, 4)
            optimizer.zero_grad()
            optimizer.backward_and_step(cross_entropy(model(x), y))
    assert len(reducer.buckets) >= 3
    assert list(dict.fromkeys(in_flight)) == list(reversed(range(len(reducer.buckets))))


class Twice(nn.Module):
    """A layer that gets two gradients in one pass, the second when its bucket is under way."""

    def __init__(self):
        super().__init__()
        self.first, self.twice = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.twice, x, use_reentrant=True)
        return x


def nothing_in_a_pass_that_raises(world):
    model = Twice()
    reducer = Reducer(model, bucket_cap_mb=0, gradient_as_bucket_view=True)
    optimizer = SGD(model.parameters(), lr=0.1, reducer=reducer)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(RuntimeError, match="got a second gradient"):
        optimizer.backward_and_step(model(torch.ones(1, 2)).sum())
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("what", [steps_in_flight, nothing_in_a_pass_that_raises])
def test_backward_steps(ranks, what):
    ranks("gloo", 2)(what)
