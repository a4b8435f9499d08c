"""`check_finite`: all ranks raise one text, which names the rank and parameter, before any step."""

import math

import pytest
import torch
from torch import nn

import ddp_from_scratch as ddp
from tests.support.on_ranks import on
from tests.support.terms import Terms, assert_grads, mean, own
from tests.support.tiers import slow

NAN, INF = math.nan, math.inf


def scaled(model, world, factors):
    """A loss whose gradient of p0 is `factors` on rank 1, by element."""
    factors = torch.tensor(factors if world.rank == 1 else (1.0, 1.0, 1.0))
    return (model.p0 * factors).sum() + model(own(world), (1, 2))


@pytest.mark.parametrize("crew", ["gloo-2", slow("mpi-2"), slow("gloo-3")], indirect=True)
@pytest.mark.parametrize("views", [False, True])
@on("crew")
def test_named_on_every_rank_and_nothing_is_stepped(world, views):
    model = Terms(3, 2, 4)
    reducer = ddp.Reducer(model, check_finite=True, gradient_as_bucket_view=views, bucket_cap_mb=0)
    optimizer = ddp.SGD(model.parameters(), lr=1.0, reducer=reducer)
    found = {(NAN, 1.0, INF): "1 nan and 1 inf in 3", (-INF, INF, 2.0): "0 nan and 2 inf in 3"}
    for number, (factors, counts) in enumerate(found.items(), 1):
        text = rf"^average {number}: a gradient is not finite: p0 on rank 1 \({counts} elements\)$"
        with pytest.raises(RuntimeError, match=text):
            optimizer.backward_and_step(scaled(model, world, factors))
        assert not any(p.any() for p in model.parameters())
        model.zero_grad()
    scaled(model, world, (3e38, 3e38, 3e38)).backward()  # only their sum is not finite
    model.zero_grad()
    model(own(world)).backward()
    assert_grads(model, mean(world))


def until_nan(world, reducer):
    """Rank 1 has no data left when rank 0 has a nan."""
    with ddp.join(reducer):
        for factor in (1.0, NAN)[: 2 - world.rank]:
            reducer.module.zero_grad()
            reducer.module(factor).backward()


@on("gloo-2")
def test_several_parameters_a_rank_of_weight_0_and_sparse_rows(world):
    model = Terms(1, 2)
    reducer = ddp.Reducer(model, check_finite=True)
    both = r"finite: p1 on rank 0 \(0 nan and 2 inf in 2 elements\) and 1 more there; p1 on rank 1"
    with pytest.raises(RuntimeError, match=both):
        model(INF).backward()
    model.zero_grad()
    reducer.weight(1 - world.rank)  # rank 1 sends zeros
    model([2.0, NAN][world.rank]).backward()
    assert_grads(model, 2.0)
    with pytest.raises(RuntimeError, match=r"finite: p1 on rank 0 .* and 1 more there$"):
        until_nan(world, reducer)
    reducer.remove()
    table = nn.Embedding(4, 2, sparse=True)
    ddp.Reducer(table, check_finite=True)
    loss = table(torch.tensor([1, 2])).sum() * (NAN if world.rank else 1.0)
    with pytest.raises(RuntimeError, match=r"finite: weight on rank 1 \(4 nan and 0 inf in 8"):
        loss.backward()
