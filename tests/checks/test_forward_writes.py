"""Parameters that a forward pass writes to: noticed where ranks part, and let alone where not."""

import pytest
import torch
from torch import nn
from torch.nn.functional import embedding

from ddp_from_scratch import Reducer
from ddp_from_scratch.checks.forward_writes import ForwardWrites


def test_a_write_is_named_unless_the_pass_was_broken_off():
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2), requires_grad=False)
    writes = ForwardWrites({"a": a, "b": b})
    assert writes.on_exit() == []
    writes.on_enter(True)
    assert writes.on_exit() == []
    for _ in range(2):
        writes.on_enter(True)
        b.add_(1)
        assert writes.on_exit() == ["b"]
    assert writes.names == ["b"]
    writes = ForwardWrites({"b": b})
    writes.on_enter(True)  # and an exception
    b.add_(1)  # a step
    writes.on_enter(False)  # an evaluation
    assert writes.on_exit() == []
    assert writes.names == []


class RunningAverage(nn.Module):
    """Keeps the mean of what it has seen in a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.mean = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return self.linear(x - self.mean)


class Rescaled(nn.Module):
    """Divides its weight by what this batch has made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        with torch.no_grad():
            self.linear.weight.div_(self.linear(x).std())
        return self.linear(x)


class DataDependentStart(Rescaled):
    """The same in the first forward pass alone."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = False

    def forward(self, x):
        if self.begun:
            return self.linear(x)
        self.begun = True
        return super().forward(x)


class LookedUp(nn.Module):
    """max_norm as a function has it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(10 * torch.ones(6, 3))

    def forward(self, x):
        indices = (x[:, 0].abs() * 10).long() % 6
        return embedding(indices, self.table, max_norm=1.0)


class Normalised(nn.Module):
    """Writes what follows from the parameters alone, the same on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.target = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            self.linear.weight.clamp_(-0.5, 0.5)
            for slow, fast in zip(self.target.parameters(), self.linear.parameters(), strict=True):
                slow.lerp_(fast, 0.01)
        return self.linear(x) - self.target(x)


def train(world, kind, steps, check_every=None):
    """The error that ended it, and the number of steps until then."""
    torch.manual_seed(0)
    model = kind()
    reducer = Reducer(model, check_every=check_every)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    torch.manual_seed(1 + world.rank)
    done = 0
    try:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().sum().backward()
            optimizer.step()
            done += 1
    except RuntimeError as error:
        return str(error), done
    finally:
        reducer.remove()
    return None, done


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (RunningAverage, "mean"),
        (Rescaled, "linear.weight"),
        (DataDependentStart, "linear.weight"),
        (LookedUp, "table"),
    ],
)
def test_ranks_that_part_are_named_after_the_first_average(crew, kind, name):
    results = crew(train, kind, 3)
    assert results == results[:1] * len(results)
    error, step = results[0]
    assert step == 0
    assert error.startswith(f"average 1: parameter {name} is not the same on all ranks")
    assert "Forward passes write to parameters" in error


class LaterOn(Normalised):
    """Begins in the third pass; from rank to rank alike, at first."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        return super().forward(x) if self.passes > 2 else self.linear(x)


def test_a_write_that_comes_later_is_named(ranks):
    for rank, (error, step) in enumerate(ranks("gloo", 2)(train, LaterOn, 4)):
        assert step == 2
        assert f"on rank {rank} has written to linear.weight, target.weight" in error
    for error, _ in ranks("gloo", 2)(train, LaterOn, 4, 1):
        assert error is None


def drifts_later(world):
    """Alike in the first average, and later not: found by the hundredth."""
    torch.manual_seed(0)
    model = Normalised()
    reducer = Reducer(model)
    for step in range(100):
        if step == 50 and world.rank == 1:
            with torch.no_grad():
                model.target.weight.add_(1)
        model.zero_grad()
        try:
            model(torch.ones(2, 3)).sum().backward()
        except RuntimeError as error:
            reducer.remove()
            return str(error), step
    return None, 100


def test_what_is_written_in_forward_is_compared_from_time_to_time(ranks):
    results = ranks("gloo", 2)(drifts_later)
    assert [step for _, step in results] == [99, 99]
    assert results[0][0].startswith("average 100: parameter target.weight is not the same")


def test_one_rank_may_do_what_it_likes(ranks):
    """It cannot differ from others."""
    for error, _ in ranks("gloo", 1)(train, RunningAverage, 3):
        assert error is None
