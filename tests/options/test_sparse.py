"""Sparse gradients: other rows on every rank, averaged exactly; rank r's are made of r + 1."""

import torch
from torch import nn

import ddp_from_scratch as ddp
from ddp_from_scratch.common.memory import sparse_parameters
from tests.support.on_ranks import on


def table(dtype=torch.float32):
    layer = nn.Embedding(10, 2, sparse=True, dtype=dtype)
    nn.init.zeros_(layer.weight)
    return layer


def assert_rows(gradient, expected):
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


@on("gloo-2")
def test_flat_buckets_come_first_and_hooks_see_no_others(world):
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
    assert [bucket.parameters() for bucket in reducer.core.flat_buckets] == [[model["b"].weight]]


@on("gloo-2")
def test_dense_on_all_ranks_is_averaged_as_dense(world):
    model = table()
    ddp.Reducer(model)
    for _ in range(2):
        model.zero_grad()
        loss = model(torch.tensor([1])).sum() + model.weight.sum()
        (loss * (world.rank + 1)).backward()
        assert model.weight.grad.layout == torch.strided
        assert model.weight.grad[:2].tolist() == [[1.5, 1.5], [3.0, 3.0]]
