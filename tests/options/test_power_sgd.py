"""PowerSGD on real ranks: exact where rank suffices, error feedback where it does not."""

from functools import wraps
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_from_scratch import Reducer
from ddp_from_scratch.backend.process_group import SharedMemoryGroup
from ddp_from_scratch.node import shared_memory_group
from ddp_from_scratch.options.power_sgd import PowerSGDState, power_sgd_hook
from tests.support.machines import group_over, machines
from tests.support.on_ranks import on
from tests.support.terms import is_rank_0s
from tests.support.tiers import slow


class Given(nn.Module):
    """The gradient of `matrix` is what the loss is called with; so is that of `vector`."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(12, 10))
        self.vector = nn.Parameter(torch.zeros(5))

    def forward(self, gradient, other):
        return (self.matrix * gradient).sum() + (self.vector * other).sum()


def compressed(state, **options):
    model = Given()
    Reducer(model, state.process_group, **options).register_comm_hook(state, power_sgd_hook)
    return model


def average_of(world, model, gradient, other):
    model.zero_grad()
    model(gradient, other).backward()
    mean = gradient.clone()
    dist.all_reduce(mean)
    return mean / world.world_size


def as_if_apart(test):
    """Within a machine nothing is compressed: here no two ranks seem to share one."""

    @wraps(test)
    def on_a_rank(*arguments):
        # Opened before: where a group shares nothing, none is kept beside it.
        shared_memory_group(dist.group.WORLD)
        with patch.object(SharedMemoryGroup, "shares_memory", False):
            return test(*arguments)

    return on_a_rank


@pytest.mark.parametrize("how", ["copy", "view"])
@on("gloo-3")
@as_if_apart
def test_a_gradient_of_that_rank_is_averaged_exactly(world, how):
    torch.manual_seed(0)
    left, right = torch.randn(12, 2), torch.randn(2, 10)
    state = PowerSGDState(rank=2, start=2)
    caps = {"bucket_cap_mb": 0} if how == "copy" else {}  # a bucket of each parameter
    model = compressed(state, gradient_as_bucket_view=how != "copy", **caps)
    n = world.world_size
    for step in range(5):
        gradient = (world.rank + 1) * (left @ right)
        expected = average_of(world, model, gradient, float(n * (world.rank + 1)))
        atol = 2e-5 if step < 2 else 2e-3
        torch.testing.assert_close(model.matrix.grad, expected, rtol=0, atol=atol)
        assert model.vector.grad.tolist() == pytest.approx([n * (n + 1) / 2] * 5)
        assert is_rank_0s(model.matrix.grad)
    assert state.iteration == 5
    assert (state.elements_sent, state.elements_total) == (3 * (22 * 2 + 5), 3 * 125)


@on("gloo-2")
@as_if_apart
def test_what_one_step_leaves_out_comes_later(world):
    torch.manual_seed(world.rank)
    gradient = torch.randn(12, 10)
    model = compressed(PowerSGDState(rank=1, start=2))
    total = torch.zeros(12, 10)
    for _ in range(202):
        expected = average_of(world, model, gradient, 0.0)
        total += model.matrix.grad
    off = (total / 202 - expected).norm() / expected.norm()
    single = (model.matrix.grad - expected).norm() / expected.norm()
    assert off < 0.1 < single, (off, single)


def drawn(step, rank):
    return torch.randn(12, 10, generator=torch.Generator().manual_seed(10 * step + rank))


def average_random(world, model, step):
    average_of(world, model, drawn(step, world.rank), 1.0)
    return model.matrix.grad.clone()


def test_right_factors_of_another_rank_start_at_random():
    """tests/training/test_resume.py continues from checkpoints, with the same bits."""
    model, state, other = Given(), PowerSGDState(rank=2), PowerSGDState(rank=3)
    state.q(model.matrix, 10, torch.zeros(()))
    other.load_state_dict(model, state.state_dict(model))
    assert other.q(model.matrix, 10, torch.zeros(())).shape == (10, 3)


@pytest.mark.parametrize("view", [False, True], ids=["copy", "view"])
@on("gloo-2")
@as_if_apart
def test_an_overflow_is_not_remembered(world, view):
    """All ranks see an overflow on one rank, and the next average does not depend on it."""
    expected = None
    for infinite in (False, True):
        model = compressed(PowerSGDState(rank=2, start=0), gradient_as_bucket_view=view)
        average_random(world, model, 0)
        if infinite:
            gradient = torch.ones(12, 10)
            gradient[3, 4] = float("inf") if world.rank == 1 else 1.0
            average_of(world, model, gradient, 1.0)
            assert not model.matrix.grad.isfinite().all()
        following = [average_random(world, model, step) for step in (1, 2)]
        expected = expected or following
        assert all(torch.equal(a, b) for a, b in zip(expected, following, strict=True))


@on("gloo-2")
def test_on_one_machine_nothing_is_compressed(world):
    state, full = PowerSGDState(rank=1, start=1), Given()
    model = compressed(state)
    Reducer(full)
    for step in range(3):
        found, expected = (average_random(world, each, step) for each in (model, full))
        assert torch.equal(found, expected)
    assert (state.iteration, state.elements_sent, state.elements_total) == (3, 0, 0)
    # What was left out elsewhere, before a checkpoint, is sent at the first average that is finite.
    saved = {"iteration": 3, "qs": {}, "errors": {"matrix": torch.ones(12, 10)}}
    state.load_state_dict(model, saved)
    state.rescale(3.0)
    average_of(world, model, torch.full((12, 10), float("inf")), 1.0)
    for left in (3.0, 0.0):
        average_of(world, model, torch.ones(12, 10), 1.0)
        assert model.matrix.grad.eq(1 + left).all()


@pytest.mark.parametrize(
    ("crew", "sizes"),
    [("gloo-3", (2, 1)), slow("gloo-4", (2, 2)), slow("mpi-3", (1, 2))],
    indirect=["crew"],
)
@on("crew")
def test_between_machines_their_means_are_compressed(world, sizes):
    """As one rank a machine, with the mean of its ranks' gradients and as much weight."""
    group, alone = group_over(world, sizes), [1] * world.world_size
    states = [PowerSGDState(1, 1, g) for g in (group, group_over(world, alone))]
    models = [Given() for _ in range(2)]
    for model, state in zip(models, states, strict=True):
        reducer = Reducer(model, state.process_group)
        reducer.register_comm_hook(state, power_sgd_hook)
        assert ("via shared memory" in repr(reducer)) == (state is states[0])
    mine = machines(sizes, world.rank)
    for step in range(5):
        each = [drawn(step, r) for r in range(world.world_size)]
        near = [g for r, g in enumerate(each) if machines(sizes, r) == mine]
        mean = torch.stack(near).mean(0)
        for model, gradient in zip(models, (each[world.rank], mean), strict=True):
            model.zero_grad()
            model(gradient, 1.0).backward()
        torch.testing.assert_close(models[0].matrix.grad, models[1].matrix.grad)
        exact = torch.stack(each).mean(0)
        assert (step == 0) == torch.allclose(models[0].matrix.grad, exact, rtol=1e-3)
    for kind in ("errors", "qs"):
        first, second = (s.state_dict(m)[kind] for s, m in zip(states, models, strict=True))
        torch.testing.assert_close(first, second)
    assert (states[0].elements_sent, states[0].elements_total) == (4 * (22 + 5), 4 * 125)
    assert is_rank_0s(models[0].matrix.grad)
