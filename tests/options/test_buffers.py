"""Buffers: after each average all ranks have rank 0's. The table of programs trains with them."""

import copy
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_from_scratch import DistributedDataParallel as Ours
from ddp_from_scratch import Reducer, broadcast_parameters
from tests.support.on_ranks import on


class Counted(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.p = nn.Parameter(torch.ones(1))
        self.register_buffer("b", torch.full((2,), float(value)))

    def forward(self, x=1.0):
        return (self.p * x * self.b).sum()


@on("gloo_pair")
def test_rank_0s_at_the_end_of_what_averages(world):
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


@on("gloo-2")
def test_as_switched(world):
    def after_an_average(model):
        model.module.b.fill_(world.rank + 1)
        model().backward()
        return model.module.b.tolist()

    own = [world.rank + 1] * 2
    model = Ours(Counted(1.0 + world.rank), forward_sync_buffers=False)
    assert model.module.b.tolist() == [1, 1]  # with the parameters
    assert after_an_average(model) == own
    model.forward_sync_buffers = True
    assert after_an_average(model) == [1, 1]
    with pytest.warns(FutureWarning, match="is deprecated"):
        assert Ours(Counted(own[0]), broadcast_buffers=False).module.b.tolist() == own


@on("gloo-2")
def test_statistics_while_graphs_live(world):
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
    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.tensor([3.0, 4.0]))

    def forward(self):
        return (self.p * self.table).sum()


@on("gloo-2")
def test_tables_that_a_graph_needs(world):
    """One that stays the same may be saved; one that changes raises, never silently wrong."""
    model = Ours(Table())
    first, second = model(), model()
    first.backward()
    second.backward()
    loss = model()
    model.module.table = model.module.table + world.rank
    loss.backward()  # needs the table as it was
    assert model.module.p.grad.tolist() == [9, 12]
    assert model.module.table.tolist() == [3, 4]
    model.module.table = model.module.table + world.rank
    loss = model()
    loss.backward(retain_graph=True)
    if world.rank:
        with model.no_sync(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
