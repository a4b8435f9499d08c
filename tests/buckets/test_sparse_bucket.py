"""Sparse gradients: rows that differ in number and place on every rank, averaged exactly.

Rank r's gradients are made of r + 1, so that averages are known. More: tests/reducer/test_table.py.
"""

import pytest
import torch
from torch import nn

import ddp_from_scratch as ddp
from ddp_from_scratch.buckets.sparse_bucket import sparse_parameters
from tests.support.on_ranks import on
from tests.support.terms import recorded


def table(dtype=torch.float32):
    layer = nn.Embedding(10, 2, sparse=True, dtype=dtype)
    nn.init.zeros_(layer.weight)
    return layer


def assert_rows(gradient, expected):
    """The gradient is sparse, coalesced, and holds exactly these rows, each of equal values."""
    assert gradient.is_sparse
    assert gradient.is_coalesced()
    rows = gradient.indices()[0].tolist()
    assert rows == sorted(expected)
    for row, values in zip(rows, gradient.values(), strict=True):
        assert torch.equal(values, torch.full_like(values, expected[row])), (row, values)


def test_what_modules_declare():
    shared = table()
    model = nn.ModuleList([shared, nn.Embedding(3, 2), nn.EmbeddingBag(3, 2, sparse=True)])
    assert sparse_parameters(model) == {id(shared.weight), id(model[2].weight)}
    assert sparse_parameters(shared) == {id(shared.weight)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@on("gloo-2")
def test_average_is_exact(world, dtype):
    """Both ranks have row 1, twice; rank r has row r + 3 alone; rank 0 has more rows than 1."""
    model = table(dtype)
    ddp.Reducer(model, gradient_as_bucket_view=dtype == torch.float32)
    rows = torch.tensor([1, 1, world.rank + 3] + ([7, 8] if world.rank == 0 else []))
    for _ in range(3):
        model.zero_grad()
        (model(rows).sum() * (world.rank + 1)).backward()
        assert_rows(model.weight.grad, {1: 3.0, 3: 0.5, 4: 1.0, 7: 0.5, 8: 0.5})


@on("gloo-2")
def test_flat_buckets_come_first_and_hooks_see_no_others(world):
    """Sparse gradients come last, and hooks see as many buckets as if they were not there."""
    model = nn.ModuleDict({"a": table(), "b": nn.Linear(2, 1, bias=False), "c": table()})
    reducer = ddp.Reducer(model, bucket_cap_mb=0)
    seen = []

    def hook(state, bucket):
        seen.append((bucket.index(), bucket.is_last()))
        return ddp.comm_hooks.average(state, bucket)

    reducer.register_comm_hook(None, hook)
    for _ in range(2):
        model.zero_grad()
        h = model["a"](torch.tensor([world.rank])) + model["c"](torch.tensor([2]))
        (h.sum() + model["b"](h.detach()).sum()).backward()
        assert_rows(model["a"].weight.grad, {0: 0.5, 1: 0.5})
        assert_rows(model["c"].weight.grad, {2: 1.0})
    assert reducer.buckets[0] == ("b.weight",)
    assert sorted(reducer.buckets[1:]) == [("a.weight",), ("c.weight",)]
    assert seen == [(0, True)] * 2
    assert [bucket.parameters() for bucket in reducer.flat_buckets] == [[model["b"].weight]]


@on("gloo-2")
def test_ranks_without_a_row(world):
    """Weights of 0, and a batch without a single row."""
    model = table()
    reducer = ddp.Reducer(model)
    reducer.weight(world.rank)
    for rows, expected in (
        ([3 + world.rank], {4: 1.0}),
        ([2] if world.rank else [], {2: 0.5}),
        ([], {}),
    ):
        model.zero_grad()
        model(torch.tensor(rows, dtype=torch.int64)).sum().backward()
        assert_rows(model.weight.grad, expected)


@on("gloo-2")
def test_dense_on_all_ranks_is_averaged_as_dense(world):
    """The table's weight is also that of the last layer, which makes its gradient dense."""
    model = table()
    ddp.Reducer(model)
    for _ in range(2):
        model.zero_grad()
        loss = model(torch.tensor([1])).sum() + model.weight.sum()
        (loss * (world.rank + 1)).backward()
        assert model.weight.grad.layout == torch.strided
        assert model.weight.grad[:2].tolist() == [[1.5, 1.5], [3.0, 3.0]]


@on("gloo-2")
def test_number_of_collectives(world):
    """A dense bucket costs one collective, a sparse gradient three: kinds, rows, values."""
    model = nn.ModuleDict({"table": table(), "layer": nn.Linear(2, 1)})
    ddp.Reducer(model)
    for _ in range(2):  # once in a Reducer's life ranks tell each other more
        with recorded("all_reduce") as sums, recorded("all_gather") as gathered:
            model["layer"](model["table"](torch.tensor([world.rank]))).sum().backward()
    assert (len(sums), len(gathered)) == (1, 3)
