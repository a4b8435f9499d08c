"""Buffers: after each average all ranks have rank 0's. The table of programs trains with them."""

import copy
from contextlib import nullcontext
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Theirs
from torch.nn.parallel.distributed import _BufferCommHookLocation

from ddp_from_scratch import SGD, NodeSharedSGD, Reducer, broadcast_parameters
from ddp_from_scratch import DistributedDataParallel as Ours
from tests.support.fuzz import check
from tests.support.fuzz_case import Backward, Case, Forward, Join, Parameter, Step, Zero
from tests.support.tiers import slow


def test_a_rank_with_data_sends_them_in_join(ranks):
    """Not rank 0, which has run out; and after it all have those of the last that trained."""
    all_use = Forward(((0,),) * 3)
    step = all_use, Backward(), Step(), Zero()
    operations = *step, Join((1, 3, 2)), *step, Join((0, 2, 3), initial=False), *step
    case = Case(3, (Parameter(3), Parameter(2)), ((0, 1),), operations, buffers=True, wrapped=True)
    assert check(ranks("gloo", 3), case)["operations"] == len(operations)


# What the Reducer sends, and when -----------------------------------------------------------------


class Counted(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.p = nn.Parameter(torch.ones(1))
        self.register_buffer("b", torch.full((2,), value))

    def forward(self, x=1.0):
        return (self.p * x * self.b.clone()).sum()  # a hook may change it at once


def rank_0s_at_the_end_of_what_averages(world):
    """Not of what accumulates; nothing is sent in forward, and nothing that is ignored."""
    model = Counted(5.0 + world.rank)
    model.register_buffer("own", torch.tensor(world.rank))
    broadcast_parameters(model, ignore=["b", "own"])
    reducer = Reducer(model, broadcast_buffers=True, ignore=["own"])
    with patch.object(dist, "broadcast", wraps=dist.broadcast) as sent:
        with reducer.no_sync():
            model().backward()
        assert model.b.tolist() == [5 + world.rank] * 2
        loss = model()
        assert not sent.called
        loss.backward()
        assert [call.args[0].dtype for call in sent.mock_calls].count(torch.uint8) == 1
    assert (model.b.tolist(), model.own) == ([5, 5], world.rank)
    model.b = torch.full((3,), 1.0 + world.rank)  # another tensor, and one more
    model.register_buffer("more", torch.tensor([world.rank, 7]))
    model().backward()
    assert (model.b.tolist(), model.more.tolist()) == ([1, 1, 1], [0, 7])
    plain = Counted(5.0 + world.rank)
    Reducer(plain)
    plain().backward()
    assert plain.b.tolist() == [5 + world.rank] * 2


def as_switched(world):
    model = Ours(Counted(1.0 + world.rank))
    assert model.module.b.tolist() == [1, 1]  # with the parameters

    def after_an_average(model):
        model.module.b.fill_(world.rank + 1)
        model().backward()
        return model.module.b.tolist()

    own = [world.rank + 1] * 2
    model.forward_sync_buffers = False
    assert not model.broadcast_buffers
    assert not model.will_sync_module_buffers()
    assert after_an_average(model) == own
    model.broadcast_buffers = True
    assert copy.deepcopy(model).forward_sync_buffers
    assert after_an_average(model) == [1, 1]
    model = Ours(Counted(1.0 + world.rank), forward_sync_buffers=False)
    assert model.module.b.tolist() == [1, 1]
    assert after_an_average(model) == own
    with pytest.warns(FutureWarning, match="is deprecated"):
        model = Ours(Counted(1.0 + world.rank), broadcast_buffers=False)
    assert model.module.b.tolist() == own
    assert after_an_average(model) == own


def in_unlike_modes(world):
    """Rank 0 in evaluation mode, and after an evaluation of its own: ranks do not wait."""
    model = Ours(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    x = torch.ones(4, 2) * world.rank
    for mode in (False, True):
        model.train(mode or world.rank > 0)
        if world.rank == 0:
            with torch.no_grad():
                model(x)
        model(x).sum().backward()
        model.zero_grad()
    assert model.module[1].num_batches_tracked == 2  # rank 0 evaluated in training mode once


def with_buckets_that_are_stepped_as_they_land(world):
    found = []
    for send in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        reducer = Reducer(model, broadcast_buffers=send, bucket_cap_mb=0)
        kind = NodeSharedSGD if world.backend == "mpi" else SGD
        optimizer = kind(model.parameters(), lr=0.1, momentum=0.9, reducer=reducer)
        torch.manual_seed(world.rank)
        for _ in range(4):
            optimizer.zero_grad()
            optimizer.backward_and_step(model(torch.randn(8, 2)).square().mean())
        found.append([t.clone() for t in (*model.parameters(), model[1].running_mean)])
    dist.broadcast(found[1][-1], 0)
    assert all(map(torch.equal, *found))


# Graphs that are still alive ----------------------------------------------------------------------


def statistics_while_graphs_live(world):
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


class Table(nn.Module):
    """Multiplies by a table that is saved for backward, in whole or in part."""

    def __init__(self, part):
        super().__init__()
        self.p, self.part = nn.Parameter(torch.ones(2)), part
        self.register_buffer("table", torch.tensor([3.0, 4.0]))

    def forward(self):
        return (self.p * (self.table[:2] if self.part else self.table)).sum()


def tables_that_a_graph_needs(world):
    """One that stays the same may be saved; what changes raises, and is never wrong in silence."""
    for part in (False, True):
        model = Ours(Table(part))
        first, second = model(), model()
        first.backward()
        second.backward(retain_graph=True)
        second.backward()
        assert model.module.p.grad.tolist() == [9, 12]
        loss = model()
        with torch.no_grad():
            model.module.table = model.module.table + world.rank
            model()
        loss.backward()  # needs the table as it was
        assert model.module.p.grad.tolist() == [12, 16]
        assert model.module.table.tolist() == [3, 4]
    model = Ours(Table(False))
    model.module.table = model.module.table + world.rank
    loss = model()
    loss.backward(retain_graph=True)
    if world.rank:
        with model.no_sync(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# Hooks --------------------------------------------------------------------------------------------


def hooks_in_place_of_rank_0s(world):
    def add_up(before, buffers):
        assert list(buffers) == ["b"]
        futures = [dist.all_reduce(b, async_op=True).get_future() for b in buffers.values()]
        if before:  # forward reads them
            torch.futures.wait_all(futures)
        return None if before else futures

    n = world.world_size
    for location in (_BufferCommHookLocation.PRE_FORWARD, None):
        model = Ours(Counted(0.0))
        model.module.b.fill_(world.rank)
        model._register_buffer_comm_hook(location is not None, add_up, location)
        model().backward()
        assert model.module.b.tolist() == [n * (n - 1) / 2] * 2
        assert model.module.p.grad == (n - 1) * (n if location else 1)


def calls_of_hook(world, location, class_):
    """The passes of 2 x 3 micro-batches, an evaluation between them, in which a hook is called."""
    model = class_(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    called, number = [], 0
    model._register_buffer_comm_hook(None, lambda state, buffers: called.append(number), location)
    for number in range(6):
        with nullcontext() if number % 3 == 2 else model.no_sync():
            model(torch.ones(2, 2)).sum().backward()
    return called


def hooks_in_the_passes_in_which_torch_calls_them(world):
    for location in _BufferCommHookLocation:
        assert calls_of_hook(world, location, Ours) == calls_of_hook(world, location, Theirs)


class Halves(Counted):
    def __init__(self, value):
        super().__init__(value)
        self.q = nn.Parameter(torch.zeros(1))

    def forward(self, both=True):
        return super().forward() + (self.q.sum() if both else 0)


def no_buffers_of_a_rank_that_misses_a_gradient(world):
    """Rank 0 waits for rank 1 in vain, and rank 1 must not wait for rank 0's buffers."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    model = Ours(Halves(1.0), process_group=group)
    if world.rank == 0:
        with pytest.raises(RuntimeError):
            model().backward()
    else:
        model(both=False).backward()
        with pytest.raises(RuntimeError, match="pass on rank 1 for: q"):
            model()
    dist.barrier()
    dist.destroy_process_group(group)


@pytest.mark.parametrize(
    ("backend", "program"),
    [
        *(("gloo", rank_0s_at_the_end_of_what_averages), ("gloo", as_switched)),
        *(("gloo", in_unlike_modes), ("gloo", with_buckets_that_are_stepped_as_they_land)),
        *(("gloo", statistics_while_graphs_live), ("gloo", tables_that_a_graph_needs)),
        *(("gloo", hooks_in_place_of_rank_0s), slow("mpi", hooks_in_place_of_rank_0s)),
        ("gloo", hooks_in_the_passes_in_which_torch_calls_them),
        ("gloo", no_buffers_of_a_rank_that_misses_a_gradient),
        slow("mpi", rank_0s_at_the_end_of_what_averages),
        slow("mpi", with_buckets_that_are_stepped_as_they_land),
    ],
)
def test_buffers(ranks, backend, program):
    ranks(backend, 2)(program)
