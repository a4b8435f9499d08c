"""Buffers: after each average all ranks have rank 0's, and numbers are as with torch's class."""

import copy
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as Theirs
from torch.nn.parallel.distributed import _BufferCommHookLocation

from ddp_from_scratch import SGD, NodeSharedSGD, Reducer, broadcast_parameters, join
from ddp_from_scratch import DistributedDataParallel as Ours


class Net(nn.Module):
    """Batch norm, and buffers of three dtypes that forward changes and training reads."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, 3)
        self.register_buffer("centre", torch.zeros(6))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.centre.lerp_(x.mean(0), 0.1)
                self.seen |= x[0, :3] > 1
                self.calls += len(x)
        return self.head(self.body(x - self.centre)) * (1 + self.seen)


def batches(world, number, generator):
    every = torch.randn(number, world.world_size, 4, 6, generator=generator)
    return every[:, world.rank], torch.randint(3, (number, 4), generator=generator)


def trained_and_evaluated(world, class_, accumulate, join_with=None):
    """Losses of training and validation, each rank its own, then parameters and buffers."""
    generator = torch.Generator().manual_seed(3)
    torch.manual_seed(world.rank)
    model = class_(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    told = []
    for _ in range(3):
        model.train()
        xs, ys = batches(world, 2 * accumulate, generator)
        for number, (x, y) in enumerate(zip(xs, ys, strict=True), 1):
            with nullcontext() if number % accumulate == 0 else model.no_sync():
                loss = cross_entropy(model(x), y)
                loss.backward()
            told.append(loss.detach())
            if number % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            for x, y in zip(*batches(world, 2, generator), strict=True):
                told.append(cross_entropy(model(x), y))
    return [*told, *model.state_dict().values()]


def as_torch(world, accumulate):
    ours = trained_and_evaluated(world, Ours, accumulate)
    theirs = trained_and_evaluated(world, Theirs, accumulate)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_training_and_validation_have_torchs_bits(pair, accumulate):
    pair(as_torch, accumulate)


def uneven(world, accumulate, by_initial):
    """Rank 0 has the most batches: another rank sends its buffers in each step."""
    generator = torch.Generator().manual_seed(3)
    n = world.world_size
    xs, ys = batches(world, accumulate * (1 + 2 * (n - world.rank)), generator)
    results = []
    for class_ in (Ours, Theirs):
        torch.manual_seed(0)
        model = class_(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join(divide_by_initial_world_size=by_initial):
            for number, (x, y) in enumerate(zip(xs, ys, strict=True), 1):
                with nullcontext() if number % accumulate == 0 else model.no_sync():
                    cross_entropy(model(x), y).backward()
                if number % accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        results.append(model.state_dict())
    for a, b in zip(*(state.values() for state in results), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("world_size", [2, 3])
def test_with_unequal_numbers_of_batches_as_torch(ranks, world_size, accumulate):
    ranks("gloo", world_size)(uneven, accumulate, True)


def joins_without_wrapper(world):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    reducer = Reducer(model, broadcast_buffers=True)
    with join(reducer):
        for step in range(1 + world.rank):
            model(torch.full((4, 2), float(world.rank))).sum().backward()
            assert model[1].num_batches_tracked == step + 1
    assert model[1].num_batches_tracked == world.world_size


def test_join_without_the_wrapper(pair):
    pair(joins_without_wrapper)


class Counted(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.p = nn.Parameter(torch.ones(1))
        self.register_buffer("b", torch.full((2,), value))

    def forward(self, x=1.0):
        return (self.p * x * self.b).sum()


def by_reducer(world):
    """Rank 0's at the end of what averages, not of what accumulates; nothing is sent in forward."""
    model = Counted(5.0 + world.rank)
    reducer = Reducer(model, broadcast_buffers=True)
    with patch.object(dist, "broadcast", wraps=dist.broadcast) as sent:
        with reducer.no_sync():
            model().backward()
        assert model.b.tolist() == [5 + world.rank] * 2
        loss = model()
        assert not sent.called
        loss.backward()
        assert [call.args[0].dtype for call in sent.mock_calls].count(torch.uint8) == 1
    assert model.b.tolist() == [5, 5]
    model.b = torch.full((3,), 1.0 + world.rank)  # another tensor, and one more
    model.register_buffer("more", torch.tensor([world.rank, 7]))
    model.zero_grad()
    model().backward()
    assert (model.b.tolist(), model.more.tolist()) == ([1, 1, 1], [0, 7])
    plain = Counted(5.0 + world.rank)
    Reducer(plain)
    plain().backward()
    assert plain.b.tolist() == [5 + world.rank] * 2


def test_reducer_sends_them_on_request(crew):
    crew(by_reducer)


def switched(world):
    model = Ours(Counted(1.0))
    model.module.b.fill_(world.rank + 1)
    model.forward_sync_buffers = False
    assert not model.broadcast_buffers
    assert not model.will_sync_module_buffers()
    model().backward()
    assert model.module.b.tolist() == [world.rank + 1] * 2
    model.broadcast_buffers = True
    assert copy.deepcopy(model).forward_sync_buffers
    model().backward()
    assert model.module.b.tolist() == [1, 1]


def test_sending_is_switched_off_and_on(pair):
    pair(switched)


def in_unlike_modes(world):
    """Rank 0 in evaluation mode, or after an evaluation of its own."""
    model = Ours(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    x = torch.ones(4, 2) * world.rank
    for mode in (False, True):
        model.train(mode if world.rank == 0 else True)
        if world.rank == 0:
            with torch.no_grad():
                model(x)
        model(x).sum().backward()
        model.zero_grad()
    assert model.module[1].num_batches_tracked == 2  # rank 0 evaluated in training mode once


def test_ranks_in_unlike_modes_do_not_wait_for_each_other(pair):
    pair(in_unlike_modes)


# Graphs that are still alive ----------------------------------------------------------------------


def statistics_in_two_graphs(world):
    """Two forward passes, then two backward passes; one graph run through twice."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    model, alone = Ours(net), copy.deepcopy(net)
    x = torch.randn(2, world.world_size, 8, 2)
    for order in ((0, 1), (1, 0), (0, 0)):
        gradients = []
        for called, chosen in ((model, [world.rank]), (alone, range(world.world_size))):
            called.zero_grad()
            sums = [0.0, 0.0]
            for rank in chosen:
                for k in (0, 1):
                    sums[k] += called(x[k, rank]).square().sum() / len(chosen)
            for k in order:
                sums[k].backward(retain_graph=True)
            gradients.append([p.grad for p in called.parameters()])
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b)
    assert model.module[1].num_batches_tracked == 6


def test_running_statistics_while_graphs_live(pair):
    pair(statistics_in_two_graphs)


class Table(nn.Module):
    """Multiplies by a table that is saved for backward, in whole or in part."""

    def __init__(self, part):
        super().__init__()
        self.p = nn.Parameter(torch.ones(2))
        self.part = part
        self.register_buffer("table", torch.tensor([3.0, 4.0]))

    def forward(self):
        return (self.p * (self.table[:2] if self.part else self.table)).sum()


def table_is_saved(world, part):
    model = Ours(Table(part))
    first, second = model(), model()
    first.backward()
    second.backward(retain_graph=True)
    second.backward()
    assert model.module.p.grad.tolist() == [9, 12]
    loss = model()
    with torch.no_grad():
        model.module.table = model.module.table + world.rank
        last = model()
    del last
    loss.backward(retain_graph=True)  # needs the table as it was
    assert model.module.p.grad.tolist() == [12, 16]
    assert model.module.table.tolist() == [3, 4]


@pytest.mark.parametrize("part", [False, True])
def test_a_table_that_stays_the_same_may_be_saved(pair, part):
    pair(table_is_saved, part)


def changed_under_a_graph(world):
    """What a graph still needs is never changed in silence."""
    model = Ours(Table(False))
    model.module.table = model.module.table + world.rank
    loss = model()
    loss.backward(retain_graph=True)
    assert model.module.table.tolist() == [3, 4]
    if world.rank:
        with model.no_sync(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_buffer_that_changes_under_a_graph_raises(pair):
    pair(changed_under_a_graph)


# Hooks --------------------------------------------------------------------------------------------


def calls_of_hook(world, location, class_):
    """The passes of 2 x 3 micro-batches, an evaluation between them, in which a hook is called."""
    model = class_(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    called, number = [], 0
    model._register_buffer_comm_hook(None, lambda state, buffers: called.append(number), location)
    for number in range(6):
        with nullcontext() if number % 3 == 2 else model.no_sync():
            model(torch.ones(2, 2)).sum().backward()
    return called


def hooks_as_torch(world):
    for location in _BufferCommHookLocation:
        assert calls_of_hook(world, location, Ours) == calls_of_hook(world, location, Theirs)


def test_hooks_are_called_in_the_passes_in_which_torch_calls_them(ranks):
    ranks("gloo", 2)(hooks_as_torch)


def ignored(world):
    model = Counted(1.0 + world.rank)
    broadcast_parameters(model, ignore=["b"])
    Reducer(model, broadcast_buffers=True, ignore=["b"])
    model().backward()
    assert model.b.tolist() == [1 + world.rank] * 2


def test_ignored_buffers_stay(pair):
    pair(ignored)


def stepped(world, send):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    options = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0}
    reducer = Reducer(model, broadcast_buffers=send, **options)
    kind = NodeSharedSGD if world.backend == "mpi" else SGD
    optimizer = kind(model.parameters(), lr=0.1, momentum=0.9, reducer=reducer)
    torch.manual_seed(world.rank)
    for _ in range(4):
        optimizer.zero_grad()
        optimizer.backward_and_step(model(torch.randn(8, 2)).square().mean())
    return [t.clone() for t in (*model.parameters(), model[1].running_mean)]


def with_buckets_stepped_as_they_land(world):
    *parameters, mean = stepped(world, True)
    *plain, own = stepped(world, False)
    for p, q in zip(parameters, plain, strict=True):
        assert torch.equal(p, q)
    dist.broadcast(own, 0)
    assert torch.equal(mean, own)


def test_optimizers_that_step_during_backward(pair):
    pair(with_buckets_stepped_as_they_land)
