"""Derivatives of gradients: `.grad` with a graph of its own, and what is local.

The reference is one process with the whole batch.
"""

import copy
import math

import pytest
import torch
from torch import nn

from ddp_from_scratch import Reducer

pytestmark = pytest.mark.filterwarnings("ignore:Using backward() with create_graph=True")


def model_and_batch(world):
    """A small net in float64, the whole batch and this rank's part of it."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    whole = torch.randn(4 * world.world_size, 3, dtype=torch.float64)
    return model, whole, whole.chunk(world.world_size)[world.rank]


def assert_same_gradients(model, alone):
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)


def norm_of_the_average(model, x):
    """Adds the gradient of the squared norm of the (averaged) gradient to that gradient."""
    model(x).square().mean().backward(create_graph=True)
    torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().backward()


def penalty(model, x):
    """A penalty on the gradient with respect to the inputs, as for Wasserstein GANs."""
    x = x.clone().requires_grad_()
    score = model(x).mean()
    (slope,) = torch.autograd.grad(score * len(x), x, create_graph=True)
    (score + slope.square().sum(1).mean()).backward()


def second_derivatives(world, loss, cap):
    model, whole, own = model_and_batch(world)
    alone = copy.deepcopy(model)
    Reducer(model, bucket_cap_mb=cap)
    for _ in range(3):
        for net, x in ((model, own), (alone, whole)):
            net.zero_grad()
            loss(net, x)
        assert_same_gradients(model, alone)
        with torch.no_grad():
            for net in (model, alone):
                for p in net.parameters():
                    p -= 0.01 * p.grad


@pytest.mark.parametrize("cap", [0, math.inf])
@pytest.mark.parametrize("loss", [norm_of_the_average, penalty])
def test_as_one_process_on_the_whole_batch(crew, loss, cap):
    crew(second_derivatives, loss, cap)


def with_views(world):
    model, _, own = model_and_batch(world)
    Reducer(model, gradient_as_bucket_view=True)
    with pytest.raises(RuntimeError, match=r"parameter 2.bias .* gradient_as_bucket_view=False"):
        norm_of_the_average(model, own)


def test_a_window_of_a_bucket_has_no_graph(ranks):
    ranks("gloo", 2)(with_views)
