"""Parameters that a forward pass writes to: noticed if ranks diverge, and ignored otherwise."""

from functools import partial

import pytest
import torch
from torch import nn

from ddp_from_scratch import Reducer
from tests.support.on_ranks import on


class Writes(nn.Module):
    """A layer; `write(model, x)` comes before it, in the passes from `first` to `last`."""

    def __init__(self, write, first=1, last=100):
        super().__init__()
        self.write, self.first, self.last, self.passes = write, first, last, 0
        self.linear = nn.Linear(3, 3)
        self.mean = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x):
        self.passes += 1
        with torch.no_grad():
            if self.first <= self.passes <= self.last:
                self.write(self, x)
        return self.linear(x)


def broken(model, x):
    model.mean.add_(1)
    raise ZeroDivisionError


@on("gloo-2")
def test_a_write_is_named_unless_the_pass_was_broken_off(world):
    model = Writes(broken, first=2, last=2)
    Reducer(model)
    model(torch.ones(3)).sum().backward()
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(3))
    model.linear.weight.data.add_(0)  # a step
    with torch.no_grad():
        model.mean.add_(1)
        model(torch.ones(3))  # an evaluation
    model(torch.ones(3)).sum().backward()
    model.write, model.first, model.last = equally, 1, 100
    with pytest.raises(RuntimeError, match=r"has written to mean, linear.weight, which"):
        model(torch.ones(3))


def equally(model, x):
    model.linear.weight.clamp_(-0.5, 0.5)
    model.mean.lerp_(model.linear.bias, 0.01)


def train(world, steps, write, *passes, check_every=None):
    """The error that ended it, and the number of steps until then; rank 1 drifts in step 50."""
    torch.manual_seed(0)
    model = Writes(write, *passes)
    reducer = Reducer(model, check_every=check_every)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    torch.manual_seed(1 + world.rank)
    done = 0
    try:
        for _ in range(steps):
            if done == 50 and world.rank == 1:
                model.mean.data.add_(1)
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().sum().backward()
            optimizer.step()
            done += 1
    except RuntimeError as error:
        return str(error), done
    finally:
        reducer.remove()
    return None, done


def test_a_write_that_comes_later_is_named(ranks):
    pair = ranks("gloo", 2)
    for rank, (error, step) in enumerate(pair(train, 4, equally, 3)):
        assert step == 2
        assert f"on rank {rank} has written to mean, linear.weight" in error
    assert pair(partial(train, check_every=1), 4, equally, 3) == [(None, 4)] * 2
    # After the first ten passes every tenth is looked at.
    assert [step for _, step in pair(train, 30, equally, 12)] == [19, 19]


def test_what_is_written_in_forward_is_compared_from_time_to_time(ranks):
    assert ranks("gloo", 1)(train, 3, equally) == [(None, 3)]  # a rank alone cannot differ
    for error, step in ranks("gloo", 2)(train, 100, equally):  # compared in the first average
        assert step == 99
        assert error.startswith("average 100: parameter mean is not the same")
