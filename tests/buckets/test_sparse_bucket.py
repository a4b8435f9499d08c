"""Sparse gradients: rows that differ in number and place on every rank, averaged exactly.

Rank r's gradients are made of r + 1, so that averages are known.
"""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import ddp_from_scratch as ddp
from ddp_from_scratch.buckets.sparse_bucket import sparse_parameters
from tests.support.on_ranks import on
from tests.support.terms import recorded


def table(rows=10, width=2, dtype=torch.float32):
    layer = nn.Embedding(rows, width, sparse=True, dtype=dtype)
    with torch.no_grad():
        layer.weight.zero_()
    return layer


def assert_rows(gradient, expected):
    """The gradient is sparse, coalesced, and holds exactly these rows, each of equal values."""
    assert gradient.is_sparse
    assert gradient.is_coalesced()
    rows = gradient.indices()[0].tolist()
    assert rows == sorted(expected)
    for row, values in zip(rows, gradient.values(), strict=True):
        assert torch.equal(values, torch.full_like(values, expected[row])), (row, values)


# What is declared -------------------------------------------------------------------------------


def test_what_modules_declare():
    shared = table()
    model = nn.ModuleList([shared, nn.Embedding(3, 2), nn.EmbeddingBag(3, 2, sparse=True)])
    assert sparse_parameters(model) == {id(shared.weight), id(model[2].weight)}
    assert sparse_parameters(shared) == {id(shared.weight)}


# Exact averages ---------------------------------------------------------------------------------


def averaged(world, view, dtype):
    """Every rank has row 1, twice; rank r has row r + 3 alone; rank 0 has more rows than others."""
    model = table(dtype=dtype)
    ddp.Reducer(model, gradient_as_bucket_view=view)
    n, r = world.world_size, world.rank
    rows = torch.tensor([1, 1, r + 3] + ([7, 8] if r == 0 else []))
    expected = {1: n + 1.0, **{q + 3: (q + 1) / n for q in range(n)}, 7: 1 / n, 8: 1 / n}
    for _ in range(3):
        model.zero_grad()
        (model(rows).sum() * (r + 1)).backward()
        if n == 2:
            assert_rows(model.weight.grad, expected)
        else:
            dense = torch.zeros_like(model.weight)
            for row, value in expected.items():
                dense[row] = value
            torch.testing.assert_close(model.weight.grad.to_dense(), dense)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_average_is_exact(crew, dtype):
    crew(averaged, dtype == torch.float32, dtype)


@on("pair")
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


# Against others ---------------------------------------------------------------------------------


class Bag(nn.Module):
    """Two sparse tables and two dense layers."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 8, sparse=True)
        self.bag = nn.EmbeddingBag(40, 8, mode="sum", sparse=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x, bags=True):
        h = self.words(x).sum(1)
        return self.head(h + self.bag(x % 40) if bags else h)

    def sparse(self):
        return [self.words.weight, self.bag.weight]


def losses(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


@on("crew")
def test_sparse_adam_as_in_one_process_on_the_whole_batch(world):
    """Unequal batches, weighed, and accumulated in every second step."""
    torch.manual_seed(7)
    model = Bag()
    alone = copy.deepcopy(model)
    reducer = ddp.Reducer(model)
    counts = [5 + 3 * rank for rank in range(world.world_size)]
    optimizers = [
        optimizer
        for net in (model, alone)
        for optimizer in (
            torch.optim.SparseAdam(net.sparse(), lr=0.01),
            torch.optim.Adam(net.head.parameters(), lr=0.01),
        )
    ]
    for step in range(8):
        batch = torch.randint(50, (sum(counts), 4)), torch.randint(3, (sum(counts),))
        own = [part.split(counts)[world.rank] for part in batch]
        if step % 2:
            reducer.weight(counts[world.rank])
        with nullcontext() if step % 2 else reducer.no_sync():
            losses(model, *own).backward()
        losses(alone, *batch).backward()
        if step % 2:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    ddp.check_sync(model)


# Unusual passes ---------------------------------------------------------------------------------


@on("pair")
def test_ranks_without_a_row(world):
    """Weights of 0, and a batch without a single row."""
    model = table()
    reducer = ddp.Reducer(model)
    reducer.weight(world.rank)
    model(torch.tensor([3 + world.rank])).sum().backward()
    assert_rows(model.weight.grad, {4: 1.0})
    model.zero_grad()
    model(torch.tensor([2] if world.rank else [], dtype=torch.int64)).sum().backward()
    assert_rows(model.weight.grad, {2: 0.5})
    model.zero_grad()
    model(torch.tensor([], dtype=torch.int64)).sum().backward()
    assert_rows(model.weight.grad, {})


# Dense, too -------------------------------------------------------------------------------------


class Tied(nn.Module):
    """The table's weight is also that of the last layer, which makes its gradient dense."""

    def __init__(self):
        super().__init__()
        self.table = table()
        self.other = nn.Linear(2, 1)

    def forward(self, x, tied):
        h = self.table(x)
        total = self.other(h).sum()
        return total + self.table.weight.sum() if tied else total


@on("pair")
def test_dense_on_all_ranks_is_averaged_as_dense(world):
    model = Tied()
    ddp.Reducer(model)
    for _ in range(2):
        model.zero_grad()
        (model(torch.tensor([1]), True) * (world.rank + 1)).backward()
        gradient = model.table.weight.grad
        assert gradient.layout == torch.strided
        assert gradient[0].tolist() == [1.5, 1.5]


# Beside other parts -----------------------------------------------------------------------------


@on("pair")
def test_power_sgd_sees_the_flat_buckets_alone(world):
    torch.manual_seed(0)
    model = nn.ModuleDict({"table": table(10, 16), "layer": nn.Linear(16, 16)})
    reducer = ddp.Reducer(model)
    state = ddp.power_sgd.PowerSGDState(start=2)
    reducer.register_comm_hook(state, ddp.power_sgd.power_sgd_hook)
    for _ in range(4):
        model.zero_grad()
        h = model["table"](torch.tensor([world.rank]))
        (h.sum() * (world.rank + 1) + model["layer"](h.detach()).sum()).backward()
        assert_rows(model["table"].weight.grad, {0: 0.5, 1: 1.0})
    assert state.iteration == 4


@pytest.mark.parametrize("in_one", [False, True])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "maximize": True}])
@on("pair")
def test_our_sgd_steps_them_as_torchs(world, options, in_one):
    torch.manual_seed(0)
    model = Bag()
    reference = copy.deepcopy(model)
    reducer = ddp.Reducer(model, gradient_as_bucket_view=True)
    ddp.Reducer(reference)
    ours = ddp.SGD(model.parameters(), lr=0.1, reducer=reducer, **options)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1, foreach=False, **options)
    for _ in range(4):
        x, y = torch.randint(50, (4, 3)), torch.randint(3, (4,))
        if in_one:
            ours.zero_grad()
            ours.backward_and_step(losses(model, x, y))
        else:
            ours.zero_grad()
            losses(model, x, y).backward()
            ours.step()
        theirs.zero_grad()
        losses(reference, x, y).backward()
        theirs.step()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(p, q)


@on("gloo-2")
def test_number_of_collectives(world):
    """A dense bucket costs one collective, a sparse gradient three: kinds, rows, values."""
    model = nn.ModuleDict({"table": table(), "layer": nn.Linear(2, 1)})
    ddp.Reducer(model)
    for _ in range(2):  # once in a Reducer's life ranks tell each other more
        with recorded("all_reduce") as sums, recorded("all_gather") as gathered:
            model["layer"](model["table"](torch.tensor([world.rank]))).sum().backward()
    assert (len(sums), len(gathered)) == (1, 3)
