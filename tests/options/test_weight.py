"""Ranks that count by their number of samples: exactly the gradient of the whole batch."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.functional import cross_entropy

from ddp_from_scratch import Reducer
from ddp_from_scratch.group import gloo_beside
from ddp_from_scratch.options.weight import GradientWeight
from tests.support.on_ranks import on
from tests.support.terms import Terms
from tests.support.tiers import slow


@pytest.mark.parametrize("crew", ["gloo-3", slow("mpi-3")], indirect=True)
@on("crew")
def test_averages_are_weighted(world):
    sizes = [5, 2, 0][: world.world_size]
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        torch.manual_seed(0)
        ours = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).double()
        whole = copy.deepcopy(ours)
        reducer = Reducer(ours, bucket_cap_mb=1e-3, **options)
        reducer.register_comm_hook(None, default_hooks.allreduce_hook)
        for _ in range(4):
            x, y = torch.randn(sum(sizes), 6).double(), torch.randint(4, (sum(sizes),))
            ours.zero_grad()
            whole.zero_grad()
            reducer.weight(sizes[world.rank])
            logits = ours(x.split(sizes)[world.rank])
            cross_entropy(logits, y.split(sizes)[world.rank]).backward()
            cross_entropy(whole(x), y).backward()
            for p, q in zip(ours.parameters(), whole.parameters(), strict=True):
                assert (p.grad - q.grad).abs().max() < 1e-15


WRONG = (-1, float("nan"), float("inf"), 10**400, "many", None)


@on("gloo-3")
def test_refusing_what_is_no_weight(world):
    """Where one rank's is wrong all raise: the others would wait for gradients that do not come."""
    model = Terms(1)
    for amount in WRONG:
        reducer = Reducer(model)
        loss = model(1.0)
        if world.rank == 1:
            got = re.escape(f"a weight must be 0 or more, and finite, got {amount};")
            with pytest.raises(ValueError, match=got):
                reducer.weight(amount)
        else:
            reducer.weight(1)
            with pytest.raises(ValueError, match="another rank's weight is negative or not finite"):
                loss.backward()
        reducer.remove()
    reducer = Reducer(model)
    reducer.weight(0)
    loss = model(1.0)
    with pytest.raises(ValueError, match="all ranks are 0"):
        loss.backward()


@on("gloo-3")
def test_beside_some_ranks(world):
    """torch names the groups that come later by a count that all ranks must agree on."""
    some = dist.new_group([0, 1])
    if world.rank < 2:
        assert GradientWeight(world.rank + 1.0, gloo_beside(some)).total() == 3.0
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=dist.new_group(list(range(world.world_size))))
    assert tensor.item() == world.world_size
