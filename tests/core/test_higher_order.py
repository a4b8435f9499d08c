"""Derivatives of gradients: `.grad` with a graph of its own. The reference is one process."""

import copy
import math

import pytest
import torch
from torch import nn

from ddp_from_scratch import Reducer
from tests.support.on_ranks import on
from tests.support.terms import as_large

pytestmark = pytest.mark.filterwarnings("ignore:Using backward() with create_graph=True")


def norm_of_the_average(model, x):
    model(x).square().mean().backward(create_graph=True)
    torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().backward()


def penalty(model, x):
    """A penalty on the gradient with respect to the inputs, as for Wasserstein GANs."""
    x = x.clone().requires_grad_()
    score = model(x).mean()
    (slope,) = torch.autograd.grad(score * len(x), x, create_graph=True)
    (score + slope.square().sum(1).mean()).backward()


@pytest.mark.parametrize("cap", [0, math.inf])
@pytest.mark.parametrize(
    ("loss", "fused"), [(norm_of_the_average, False), (penalty, False), (penalty, True)]
)
@on("gloo-3")
def test_as_one_process_on_the_whole_batch(world, loss, fused, cap):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    whole = torch.randn(4 * world.world_size, 3, dtype=torch.float64)
    alone = copy.deepcopy(model)
    with as_large():
        Reducer(model, bucket_cap_mb=cap, fuse_wgrad=fused)
    for _ in range(3):
        for net, x in ((model, whole.chunk(world.world_size)[world.rank]), (alone, whole)):
            net.zero_grad()
            loss(net, x)
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)
            with torch.no_grad():
                p -= 0.01 * p.grad
                q -= 0.01 * q.grad
