"""`reduce="sum"`: nothing divides. The table of programs trains with it; here sums are exact."""

import pytest
import torch
from torch import nn

import ddp_from_scratch as ddp
from tests.support.on_ranks import on
from tests.support.terms import Terms, as_large

ODD = (7.0, 11.0, 15.0)  # 1/3 of each is rounded, and three times that would be rounded again


@on("gloo-3")
def test_sums_of_three_ranks_are_exact(world):
    for options in (
        {},
        {"shared_memory": False},
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 0, "overlap": False},
    ):
        with as_large():
            model = Terms(3, 5)
            reducer = ddp.Reducer(model, reduce="sum", **options)
            for number in range(3):
                model.zero_grad()
                if number == 2:
                    reducer.weight(world.rank)  # 0, 1 and 2: the sum of amounts x gradients
                model(ODD[world.rank]).backward()
                total = 41 if number == 2 else 33
                assert model.p0.grad.tolist() == [total] * 3
                assert model.p1.grad.tolist() == [2 * total] * 5
            assert 'reduce="sum"' in str(reducer)
            reducer.remove()


@on("gloo-3")
def test_other_ways_of_summing_are_exact(world):
    mine = ODD[world.rank]
    table = nn.Embedding(4, 2, sparse=True)
    ddp.Reducer(table, reduce="sum")
    (mine * table(torch.tensor([1, 2])).sum()).backward()
    assert table.weight.grad.to_dense().tolist() == [[0, 0], [33, 33], [33, 33], [0, 0]]
    reducer = ddp.Reducer(uneven := Terms(2), reduce="sum")
    sums = []
    with ddp.join(reducer):
        for _ in range(1 + world.rank):
            uneven.zero_grad()
            uneven(mine).backward()
            sums.append(uneven.p0.grad[0].item())
    assert sums == [33, 26, 15][: 1 + world.rank]


def in_join(world):
    reducer = ddp.Reducer(Terms(1), reduce="sum")
    with ddp.join(reducer, divide_by_initial_world_size=False):
        reducer.module(1.0).backward()


def with_hook(world):
    reducer = ddp.Reducer(Terms(1), reduce="sum")
    reducer.register_comm_hook(None, ddp.comm_hooks.average)
    reducer.register_comm_hook(None, ddp.comm_hooks.bf16_compress_hook)


def of_another_name(world):
    ddp.Reducer(Terms(1), reduce="max")


def of_virtual_ranks(world):
    ddp.Reducer(Terms(1), reduce="sum", virtual_ranks=2)


@pytest.mark.parametrize(
    ("error", "text", "provoke"),
    [
        (ValueError, 'reduce="sum" divides by nothing: leave it out', in_join),
        (RuntimeError, "with a comm hook: leave bf16_compress_hook out", with_hook),
        (ValueError, 'reduce must be "mean" or "sum", got .max', of_another_name),
        (ValueError, 'reduce="sum" cannot .* virtual', of_virtual_ranks),
    ],
)
@on("gloo-2")
def test_refused(world, error, text, provoke):
    with pytest.raises(error, match=text):
        provoke(world)
