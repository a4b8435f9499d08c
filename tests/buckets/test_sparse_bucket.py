"""Sparse gradients: rows that differ in number and place on every rank, averaged exactly.

Rank r's gradients are made of r + 1, so that averages are known.
"""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Theirs
from torch.nn.parallel.distributed import _MixedPrecision

import ddp_from_scratch as ddp
from ddp_from_scratch.buckets.sparse_bucket import sparse_parameters


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


def declared_on_one(world):
    model = nn.Sequential(nn.Linear(1, 1), nn.Embedding(4, 2, sparse=world.rank == 1))
    message = "rank 0 has parameter 1.weight: .*; rank 1 has .* requires_grad=True, sparse gradient"
    with pytest.raises(RuntimeError, match=message):
        ddp.broadcast_parameters(model)


def test_declared_on_one_rank_alone_is_named(pair):
    pair(declared_on_one)


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


def in_order(world):
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


def test_flat_buckets_come_first_and_hooks_see_no_others(pair):
    pair(in_order)


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


def optimizers_of(model, kind):
    if kind == "SGD":
        return [torch.optim.SGD(model.parameters(), lr=0.1)]
    return [
        torch.optim.SparseAdam(model.sparse(), lr=0.01),
        torch.optim.Adam(model.head.parameters(), lr=0.01),
    ]


def losses(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def train(model, kind, batches, before=lambda count: None, sync=lambda step: nullcontext()):
    """Every second step accumulates."""
    optimizers = optimizers_of(model, kind)
    for step, (x, y) in enumerate(batches):
        before(len(x))
        with sync(step):
            losses(model, x, y).backward()
        if step % 2:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


def as_one_process(world, kind):
    torch.manual_seed(7)
    model = Bag()
    alone = copy.deepcopy(model)
    reducer = ddp.Reducer(model)
    counts = [5 + 3 * rank for rank in range(world.world_size)]
    batches = [
        (torch.randint(50, (sum(counts), 4)), torch.randint(3, (sum(counts),))) for _ in range(8)
    ]
    own = [tuple(part.split(counts)[world.rank] for part in batch) for batch in batches]
    # Accumulated losses are averaged by the second step's weights, which are the same.
    train(
        model,
        kind,
        own,
        lambda count: reducer.weight(count) if reducer.sync else None,
        lambda step: reducer.no_sync() if step % 2 == 0 else nullcontext(),
    )
    train(alone, kind, batches)
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    ddp.check_sync(model)


@pytest.mark.parametrize("kind", ["SGD", "SparseAdam"])
def test_as_one_process_on_the_whole_batch(crew, kind):
    crew(as_one_process, kind)


def as_torch(world):
    torch.manual_seed(world.rank)
    ours = ddp.DistributedDataParallel(Bag())
    theirs = Theirs(copy.deepcopy(ours.module))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs)]
    for step in range(6):
        x, y = torch.randint(50, (4 + world.rank, 3)), torch.randint(3, (4 + world.rank,))
        for model in (ours, theirs):
            with model.no_sync() if step % 3 == 1 else nullcontext():
                losses(model, x, y).backward()
        if step % 3 != 1:
            for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert p.grad.is_sparse == q.grad.is_sparse
                # With three ranks the order of the sums is not the same.
                tolerance = {"rtol": 0, "atol": 0 if world.world_size == 2 else 1e-6}
                torch.testing.assert_close(p.grad.to_dense(), q.grad.to_dense(), **tolerance)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("world_size", [2, 3])
def test_as_torch(ranks, world_size):
    """With find_unused_parameters=True torch's raises, where a rank does not use a table."""
    ranks("gloo", world_size)(as_torch)


# Unusual passes ---------------------------------------------------------------------------------


def used_by_some(world, static):
    """`a` is used by all, `b` by rank 1, `c` by nobody, whose `.grad` stays what it was."""
    model = nn.ModuleDict({name: table() for name in "abc"})
    model["d"] = nn.Linear(2, 1)
    reducer = ddp.Reducer(model, find_unused_parameters=not static, static_graph=static)
    before = model["c"].weight.grad = torch.sparse_coo_tensor([[4]], torch.ones(1, 2), (10, 2))
    for _ in range(3):
        for name in "abd":
            model[name].zero_grad()
        x = torch.tensor([world.rank])
        h = model["a"](x) + (model["b"](x) if world.rank == 1 else 0)
        (h.sum() + model["d"](h.detach()).sum()).backward()
        assert_rows(model["a"].weight.grad, {0: 0.5, 1: 0.5})
        assert_rows(model["b"].weight.grad, {1: 0.5})
        assert model["c"].weight.grad is before
    assert len(reducer.buckets) == 4


@pytest.mark.parametrize("static", [False, True])
def test_used_by_some_ranks(pair, static):
    pair(used_by_some, static)


def several_passes(world):
    model = table()
    ddp.Reducer(model)
    x = torch.tensor([world.rank, 5])
    for _ in range(2):
        model.zero_grad()
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        assert_rows(model.weight.grad, {0: 0.5, 1: 0.5, 5: 1.0})
        loss.backward()
        assert_rows(model.weight.grad.coalesce(), {0: 1.0, 1: 1.0, 5: 2.0})


def test_two_backward_passes_through_one_graph(pair):
    pair(several_passes)


def unequal_ends(world, by_initial):
    model = table()
    reducer = ddp.Reducer(model)
    with ddp.join(reducer, divide_by_initial_world_size=by_initial):
        for step in range(1 + 2 * world.rank):
            model.zero_grad()
            model(torch.tensor([world.rank])).sum().backward()
            if step:
                assert_rows(model.weight.grad, {1: 0.5 if by_initial else 1.0})
            else:
                assert_rows(model.weight.grad, {0: 0.5, 1: 0.5})


@pytest.mark.parametrize("by_initial", [True, False])
def test_join(pair, by_initial):
    pair(unequal_ends, by_initial)


def nothing_to_say(world):
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


def test_ranks_without_a_row(pair):
    pair(nothing_to_say)


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


def dense_on_all(world):
    model = Tied()
    ddp.Reducer(model)
    for _ in range(2):
        model.zero_grad()
        (model(torch.tensor([1]), True) * (world.rank + 1)).backward()
        gradient = model.table.weight.grad
        assert gradient.layout == torch.strided
        assert gradient[0].tolist() == [1.5, 1.5]


def test_dense_on_all_ranks_is_averaged_as_dense(pair):
    pair(dense_on_all)


def dense_on_one(world):
    model = Tied()
    ddp.Reducer(model)
    message = r"parameter table.weight is dense on ranks \[1\] and sparse on \[0\]"
    with pytest.raises(RuntimeError, match=message):
        model(torch.tensor([1]), world.rank == 1).backward()
    with pytest.raises(RuntimeError, match=r"the last backward pass on rank . was broken off"):
        model(torch.tensor([1]), True)


def test_dense_on_one_rank_is_named_on_all(pair):
    pair(dense_on_one)


# Beside other parts -----------------------------------------------------------------------------


def with_power_sgd(world):
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


def test_power_sgd_sees_the_flat_buckets_alone(pair):
    pair(with_power_sgd)


def with_our_sgd(world, options, in_one):
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


@pytest.mark.parametrize("in_one", [False, True])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "maximize": True}])
def test_our_sgd_steps_them_as_torchs(pair, options, in_one):
    pair(with_our_sgd, options, in_one)


def counted(world):
    """A dense bucket costs one collective, a sparse gradient three: kinds, rows, values."""
    model = nn.ModuleDict({"table": table(), "layer": nn.Linear(2, 1)})
    ddp.Reducer(model)
    # Once in a Reducer's life ranks tell each other more.
    model["layer"](model["table"](torch.tensor([world.rank]))).sum().backward()
    calls = []
    originals = {name: getattr(dist, name) for name in ("all_reduce", "all_gather")}
    for name, original in originals.items():
        setattr(
            dist,
            name,
            lambda *a, name=name, original=original, **o: calls.append(name) or original(*a, **o),
        )
    try:
        model["layer"](model["table"](torch.tensor([world.rank]))).sum().backward()
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    assert calls == ["all_reduce", "all_gather", "all_gather", "all_gather"]


def test_number_of_collectives(ranks):
    ranks("gloo", 2)(counted)


def refused(world):
    model = nn.ModuleDict({"table": table(), "layer": nn.Linear(2, 1)})
    with pytest.raises(ValueError, match=r"parameter table\.weight has a sparse gradient, which"):
        ddp.DistributedDataParallel(
            model,
            delay_all_reduce_named_params=[("table.weight", model["table"].weight)],
            param_to_hook_all_reduce=model["layer"].weight,
        )
    with pytest.raises(ValueError, match=r"mixed_precision cannot cast parameter table\.weight"):
        ddp.DistributedDataParallel(model, mixed_precision=_MixedPrecision(torch.bfloat16))


def test_they_can_be_neither_delayed_nor_cast(ranks):
    ranks("gloo", 2)(refused)
