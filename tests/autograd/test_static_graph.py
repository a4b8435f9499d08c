"""A graph learnt in the first step."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp_from_scratch import Reducer
from ddp_from_scratch.autograd.used_parameters import StaticGraph
from tests.support.on_ranks import on
from tests.support.terms import BYTES, Terms, grads_of, mean, own, recorded


def test_counts_are_learnt_in_the_first_pass_and_what_differs_later_is_told():
    graph = StaticGraph(3)
    assert graph.unused() == set()
    assert [graph.count(index) for index in (0, 1, 1)] == [False] * 3
    assert graph.end_pass() == []
    assert graph.unused() == {2}
    assert [graph.count(index) for index in (1, 0, 1)] == [False, True, True]
    assert graph.end_pass() == []
    graph.count(1), graph.count(1), graph.count(1), graph.count(2)
    assert graph.end_pass() == [(0, 0, 1), (1, 3, 2), (2, 1, 0)]
    assert [graph.count(index) for index in (0, 1, 1)] == [True, False, True]
    assert graph.end_pass() == []


class Shared(nn.Module):
    """p0 in two checkpointed segments: it gets two gradients in one backward pass."""

    def __init__(self):
        super().__init__()
        self.p0, self.p1 = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2))
        self.p2, self.on = nn.Parameter(torch.zeros(3)), True

    def forward(self, x):
        # In a list, so that a walk over the graph does not see it once checkpoints are on.
        def segment(total, inside, factor):
            return total + (inside[0] * factor).sum() + (self.p0 * x).sum() + 0 * total.tanh()

        total = torch.zeros((), requires_grad=True)
        for p, factor in ((self.p1, 2 * x), (self.p2, 3 * x)):
            if self.on:
                total = checkpoint(segment, total, [p], factor, use_reentrant=True)
            else:
                total = segment(total, [p], factor)
        return total


@on("pair")
def test_ranks_agree_once(world):
    """Who used what is agreed on once; the buckets are rebuilt once, the unused last."""
    model = Terms(1, 2, 3, 4)
    reducer = Reducer(model, bucket_cap_mb=0, static_graph=True)
    expected = ([4, 3, 2, 1, 4], [1, 3, 4, 2], [1, 3, 4, 2])
    for sizes in expected:
        model.zero_grad()
        with recorded("all_reduce") as sent, recorded("broadcast") as orders:
            model(own(world), (2, 0)).backward()
        assert sent == sizes
        assert orders == ([4] if sizes is expected[0] else [])
        assert reducer.buckets == (("p0",), ("p2",), ("p3",), ("p1",))
        assert grads_of(model) == [mean(world), None, 3 * mean(world), None]


def violated(world, uses, told, options):
    """What came is averaged all the same, so ranks stay together."""
    model = Terms(1, 2, 3)
    Reducer(model, static_graph=True, **options)
    for _ in range(2):
        model.zero_grad()
        model(own(world), (0, 1)).backward()
    loss = model(own(world), uses[world.rank % len(uses)])
    with pytest.raises(RuntimeError, match=told[world.rank % len(told)].format(rank=world.rank)):
        loss.backward()
    model.zero_grad()
    model(own(world), (0, 1)).backward()
    assert grads_of(model) == [mean(world), 2 * mean(world), None]


MISSING, EXTRA = "p1 0 instead of 1", "p2 1 instead of 0"


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("cap", [0, 12 * BYTES])
@pytest.mark.parametrize(
    ("uses", "told"),
    [
        ([(0,)], ["on rank {rank} gave other .*: " + MISSING]),
        ([(1,)], ["on rank {rank} gave other .*: p0 0 instead of 1"]),
        # Every rank comes to all buckets before it raises, so that none waits for another.
        ([(0,), (0, 1, 2)], [MISSING, EXTRA]),
    ],
    ids=["p1", "p0", "otherwise on each rank"],
)
def test_a_gradient_that_does_not_come_is_named(pair, uses, told, cap, view, overlap):
    options = {"gradient_as_bucket_view": view, "overlap": overlap, "bucket_cap_mb": cap}
    pair(violated, uses, told, options)


@on("pair")
def test_a_gradient_that_should_not_come_is_named_also_under_no_sync(world):
    """Nobody used p1 in the first pass: what it accumulates would never be averaged."""
    model = Terms(1, 2)
    reducer = Reducer(model, static_graph=True)
    model(own(world), (0,)).backward()
    with reducer.no_sync():
        model(own(world), (1,)).backward()
    with pytest.raises(RuntimeError, match=f"on rank {world.rank} gave other .*: p1 1 instead"):
        model(own(world), (0,)).backward()


@on("pair")
def test_a_graph_may_be_declared_static_later(world):
    """Declared when it has averaged already, and again: the first pass stays what counts."""
    model = Terms(1, 2, 3)
    reducer = Reducer(model)
    model(own(world)).backward()
    reducer.set_static_graph()
    reducer.set_static_graph()
    for _ in range(3):
        model.zero_grad()
        model(own(world), (0, 2)).backward()
        assert grads_of(model) == [mean(world), None, 3 * mean(world)]
        reducer.set_static_graph()
    with pytest.raises(RuntimeError, match="p1 1 instead of 0, p2 0 instead of 1"):
        model(own(world), (0, 1)).backward()


@on("pair")
def test_a_graph_declared_static_later_may_differ_from_those_before(world):
    model = Shared()
    reducer = Reducer(model, find_unused_parameters=True)
    model.on = False
    model(own(world)).backward()
    model.on = True
    reducer.set_static_graph()
    for _ in range(2):
        model.zero_grad()
        model(own(world)).backward()
        assert grads_of(model) == [2 * mean(world), 2 * mean(world), 3 * mean(world)]
