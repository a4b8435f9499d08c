"""Parameters that one rank transposes. More: tests/core/test_table.py."""

import pytest
import torch
from torch import nn

import ddp_from_scratch as ddp
from tests.support.on_ranks import on


@pytest.mark.parametrize("views", [False, True])
@on("gloo-2")
def test_one_rank_transposes_its_parameters(world, views):
    """Before the buckets are laid out anew: elements must not be summed with others' elements."""
    gradients = []
    for transposes in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
        reducer = ddp.Reducer(model, gradient_as_bucket_view=views)
        if transposes and world.rank == 0:
            model.to(memory_format=torch.channels_last)
        for step in range(2):
            torch.manual_seed(10 * step + world.rank)
            model.zero_grad()
            model(torch.randn(2, 3, 8, 8)).square().mean().backward()
        reducer.remove()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)
