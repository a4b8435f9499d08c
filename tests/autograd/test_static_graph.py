"""A graph learnt in the first step."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp_from_scratch import Reducer
from ddp_from_scratch.autograd.used_parameters import StaticGraph
from tests.support.terms import BYTES, Terms, grads_of, mean, own, recorded

each_view = pytest.mark.parametrize("view", [False, True], ids=["copy", "view"])


def test_counts_are_learnt_in_the_first_pass_and_expected_after_it():
    graph = StaticGraph(3)
    assert graph.unused() == set()
    assert [graph.count(index) for index in (0, 1, 1)] == [False] * 3
    assert graph.end_pass() == []
    assert graph.unused() == {2}
    assert [graph.count(index) for index in (1, 0, 1)] == [False, True, True]
    assert graph.end_pass() == []


def test_what_differs_is_told_and_the_next_pass_begins_anew():
    graph = StaticGraph(3)
    graph.count(0), graph.count(1)
    graph.end_pass()
    graph.count(1), graph.count(1), graph.count(2)
    assert graph.end_pass() == [(0, 0, 1), (1, 2, 1), (2, 1, 0)]
    assert graph.count(0)
    assert graph.count(1)
    assert graph.end_pass() == []


class Shared(nn.Module):
    """p0 in two checkpointed segments: it gets two gradients in one backward pass."""

    def __init__(self, reentrant):
        super().__init__()
        self.p0, self.p1 = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2))
        self.p2, self.reentrant = nn.Parameter(torch.zeros(3)), reentrant

    def forward(self, x):
        start = torch.zeros((), requires_grad=True)

        def segment(total, p, factor):
            return total + (p * factor).sum() + (self.p0 * x).sum() + 0 * total.tanh()

        total = checkpoint(segment, start, self.p1, 2 * x, use_reentrant=self.reentrant)
        return checkpoint(segment, total, self.p2, 3 * x, use_reentrant=self.reentrant)


def shared_by_checkpoints(world, reentrant, view, overlap):
    model = Shared(reentrant)
    reducer = Reducer(
        model,
        bucket_cap_mb=0,
        static_graph=True,
        gradient_as_bucket_view=view,
        overlap=overlap,
    )
    for _ in range(3):
        model.zero_grad()
        with reducer.no_sync():
            model(own(world)).backward()
        with recorded("all_reduce") as sent:
            model(own(world)).backward()
        assert sorted(sent)[:3] == [1, 2, 3]
        assert grads_of(model) == [4 * mean(world), 4 * mean(world), 6 * mean(world)]


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@each_view
@pytest.mark.parametrize("overlap", [True, False])
def test_a_parameter_shared_by_checkpointed_segments(pair, reentrant, view, overlap):
    pair(shared_by_checkpoints, reentrant, view, overlap)


def communication(world):
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


def test_ranks_agree_once(pair):
    pair(communication)


def unused_on_one_rank(world):
    model = Terms(1, 2, 3)
    Reducer(model, static_graph=True, bucket_cap_mb=0)
    for _ in range(3):
        model.zero_grad()
        model(own(world), (0, 1) if world.rank else (1,)).backward()
        assert grads_of(model) == [2.0, 2 * mean(world), None]


def test_each_rank_has_a_static_graph_of_its_own(pair):
    pair(unused_on_one_rank)


def violated(world, use, told):
    """What came is averaged all the same, so ranks stay together."""
    model = Terms(1, 2, 3)
    Reducer(model, static_graph=True, bucket_cap_mb=12 * BYTES)
    model(own(world), (0, 1)).backward()
    model.zero_grad()
    loss = model(own(world), use)
    with pytest.raises(RuntimeError, match=f"on rank {world.rank} gave other .*: {told}"):
        loss.backward()
    model.zero_grad()
    model(own(world), (0, 1)).backward()
    assert grads_of(model) == [mean(world), 2 * mean(world), None]


@pytest.mark.parametrize(
    ("use", "told"),
    [((0,), "p1 0 instead of 1"), ((1,), "p0 0 instead of 1")],
)
def test_a_gradient_that_does_not_come_is_named(pair, use, told):
    pair(violated, use, told)


def extra(world):
    model = Terms(1, 2, 3)
    Reducer(model, static_graph=True, bucket_cap_mb=0)
    for _ in range(2):
        model(own(world), (0, 1)).backward()
    loss = model(own(world), (0, 1, 2))
    with pytest.raises(RuntimeError, match=f"p2 .* on rank {world.rank}|p2 1 instead of 0"):
        loss.backward()


def test_a_gradient_that_should_not_come_is_named(pair):
    pair(extra)


def violated_otherwise_on_each_rank(world, view, overlap):
    """Every rank comes to all buckets before it raises, so that none waits for another."""
    model = Terms(1, 2, 3)
    Reducer(
        model, static_graph=True, bucket_cap_mb=0, gradient_as_bucket_view=view, overlap=overlap
    )
    for _ in range(2):
        model.zero_grad()
        model(own(world), (0, 1)).backward()
    loss = model(own(world), ((0,), (0, 1, 2))[world.rank])
    told = "p1 0 instead of 1" if world.rank == 0 else "p2 1 instead of 0"
    with pytest.raises(RuntimeError, match=told):
        loss.backward()
    model.zero_grad()
    model(own(world), (0, 1)).backward()
    assert grads_of(model) == [mean(world), 2 * mean(world), None]


@each_view
@pytest.mark.parametrize("overlap", [True, False])
def test_ranks_that_break_the_promise_in_different_ways(pair, view, overlap):
    pair(violated_otherwise_on_each_rank, view, overlap)


def extra_under_no_sync(world):
    """Nobody used p1 in the first pass: what it accumulates would never be averaged."""
    model = Terms(1, 2)
    reducer = Reducer(model, static_graph=True)
    model(own(world), (0,)).backward()
    with reducer.no_sync():
        model(own(world), (1,)).backward()
    with pytest.raises(
        RuntimeError, match=f"on rank {world.rank} gave other .*: p1 1 instead of 0"
    ):
        model(own(world), (0,)).backward()


def test_a_gradient_that_should_not_come_is_named_also_under_no_sync(pair):
    pair(extra_under_no_sync)


def late(world):
    model = Terms(1, 2, 3)
    reducer = Reducer(model)
    model(own(world)).backward()
    reducer.set_static_graph()
    reducer.set_static_graph()
    for _ in range(3):
        model.zero_grad()
        model(own(world), (0, 2)).backward()
        assert grads_of(model) == [mean(world), None, 3 * mean(world)]


def test_a_graph_may_be_declared_static_later(pair):
    pair(late)


class Hidden(Shared):
    """Its checkpoints hide all parameters from a walk over the graph, once they are switched on."""

    def __init__(self):
        super().__init__(reentrant=True)
        self.on = False

    def forward(self, x):
        def segment(total, inside, factor):
            return total + (inside[0] * factor).sum() + (self.p0 * x).sum() + 0 * total.tanh()

        total = torch.zeros((), requires_grad=True)
        for p, factor in ((self.p1, 2 * x), (self.p2, 3 * x)):
            if self.on:
                total = checkpoint(segment, total, [p], factor, use_reentrant=True)
            else:
                total = segment(total, [p], factor)
        return total


def late_with_another_graph(world):
    model = Hidden()
    reducer = Reducer(model, find_unused_parameters=True)
    model(own(world)).backward()
    model.on = True
    reducer.set_static_graph()
    for _ in range(2):
        model.zero_grad()
        model(own(world)).backward()
        assert grads_of(model) == [2 * mean(world), 2 * mean(world), 3 * mean(world)]


def test_a_graph_declared_static_later_may_differ_from_those_before(pair):
    pair(late_with_another_graph)


def set_again(world):
    """The first pass stays what later ones are compared with."""
    model = Terms(1, 2, 3)
    reducer = Reducer(model)
    reducer.set_static_graph()
    model(own(world), (0, 1)).backward()
    reducer.set_static_graph()
    model.zero_grad()
    with pytest.raises(RuntimeError, match="p1 0 instead of 1, p2 1 instead of 0"):
        model(own(world), (0, 2)).backward()


def test_declaring_it_again_changes_nothing(pair):
    pair(set_again)
