"""PowerSGD on real ranks: exact where rank suffices, error feedback where it does not."""

import pytest
import torch
import torch.distributed as dist
from test_comm_hooks import assert_one_model, build, train
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ddp_from_scratch import Reducer
from ddp_from_scratch.power_sgd import PowerSGDState, power_sgd_hook


@pytest.fixture(params=["gloo-2", "gloo-3", "mpi-2"])
def crew(ranks, request):
    backend, world_size = request.param.split("-")
    return ranks(backend, int(world_size))


@pytest.fixture(params=["gloo", "mpi"])
def pair(ranks, request):
    return ranks(request.param, 2)


class Given(nn.Module):
    """The gradient of `matrix` is what the loss is called with; so is that of `vector`."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(12, 10))
        self.vector = nn.Parameter(torch.zeros(5))

    def forward(self, gradient, other):
        return (self.matrix * gradient).sum() + (self.vector * other).sum()


def average_of(world, model, gradient, other):
    model.zero_grad()
    model(gradient, other).backward()
    mean = gradient.clone()
    dist.all_reduce(mean)
    return mean / world.world_size


def low_rank_is_exact(world, view):
    """The average has rank 2 and so the first compressed step finds it."""
    torch.manual_seed(0)
    left, right = torch.randn(12, 2), torch.randn(2, 10)
    model = Given()
    reducer = Reducer(model, gradient_as_bucket_view=view)
    state = PowerSGDState(rank=2, start=2)
    reducer.register_comm_hook(state, power_sgd_hook)
    n = world.world_size
    for step in range(5):
        gradient = (world.rank + 1) * (left @ right)
        expected = average_of(world, model, gradient, float(n * (world.rank + 1)))
        tolerance = 1e-6 if step < 2 else 1e-4
        torch.testing.assert_close(model.matrix.grad, expected, rtol=0, atol=tolerance * 20)
        assert model.vector.grad.tolist() == pytest.approx([n * (n + 1) / 2] * 5, rel=1e-6)
        zero = model.matrix.grad.clone()
        dist.broadcast(zero, 0)
        assert torch.equal(zero, model.matrix.grad)
    assert state.iteration == 5
    assert (state.sent, state.of) == (3 * (22 * 2 + 5), 3 * 125)


@pytest.mark.parametrize("view", [False, True], ids=["copy", "view"])
def test_a_gradient_of_that_rank_is_averaged_exactly(crew, view):
    crew(low_rank_is_exact, view)


def nothing_is_lost(world):
    """One gradient again and again: with error feedback the averages add up to it."""
    torch.manual_seed(world.rank)
    gradient = torch.randn(12, 10)
    model = Given()
    reducer = Reducer(model)
    reducer.register_comm_hook(PowerSGDState(rank=1, start=2), power_sgd_hook)
    total, steps = torch.zeros(12, 10), 200
    for _ in range(steps + 2):
        expected = average_of(world, model, gradient, 0.0)
        total += model.matrix.grad
    off = (total / (steps + 2) - expected).norm() / expected.norm()
    single = (model.matrix.grad - expected).norm() / expected.norm()
    assert off < 0.1 < single, (off, single)


def test_what_one_step_leaves_out_comes_later(pair):
    pair(nothing_is_lost)


def converges(world, wrapped):
    hook = default_hooks.bf16_compress_wrapper(power_sgd_hook) if wrapped else power_sgd_hook
    losses = []
    for compress in (False, True):
        model, x, y = build(world)
        reducer = Reducer(model, bucket_cap_mb=1e-3)
        if compress:
            reducer.register_comm_hook(PowerSGDState(rank=2, start=3), hook)
        losses.append(train(world, model, x, y, 60))
        assert_one_model(model)
    assert losses[1] < 1.5 * losses[0] + 0.02, losses


def test_training_converges(crew):
    crew(converges, False)


def test_training_converges_in_torchs_wrapper(ranks):
    ranks("gloo", 2)(converges, True)


def test_settings_are_checked():
    for settings in ({"rank": 0}, {"start": 1}):
        with pytest.raises(ValueError, match="rank must be 1 or more and start 2 or more"):
            PowerSGDState(**settings)
