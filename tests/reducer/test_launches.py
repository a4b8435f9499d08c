"""All-reduces of the Reducer: their number and order, before and after the buckets are rebuilt."""

import math

import pytest
import torch
from torch import nn

from ddp_from_scratch import Reducer
from tests.support.terms import (
    BYTES,
    Terms,
    assert_grads,
    each_overlap,
    each_view,
    mean,
    own,
    recorded,
)


def collectives(world, sizes, cap, overlap, expected):
    model = Terms(*sizes)
    Reducer(model, bucket_cap_mb=cap, overlap=overlap)
    for _ in range(3):
        with recorded("all_reduce") as sent:
            model(own(world)).backward()
        assert sent == expected


@pytest.mark.parametrize(
    ("sizes", "cap", "expected"),
    [
        ((1, 2, 3, 4), 0, [4, 3, 2, 1]),
        ((1, 2, 3, 4), 12 * BYTES, [4, 3, 3]),
        ((1, 2, 3, 4), math.inf, [10]),
        ((1, 2**18, 2**18), None, [2**18, 2**18 + 1]),  # first 1 MiB, then 25 MiB
        ((1, 2**18, 2**18), 2, [2**19, 1]),
    ],
)
@each_overlap
def test_number_and_sizes_of_all_reduces(pair, sizes, cap, overlap, expected):
    pair(collectives, sizes, cap, overlap, expected)


def launched_during_backward(world, overlap):
    model = Terms(1, 2, 3, 4)
    with recorded("all_reduce") as sent:
        seen = []
        model.p0.register_post_accumulate_grad_hook(lambda _: seen.append(list(sent)))
        Reducer(model, bucket_cap_mb=0, overlap=overlap)
        for _ in range(2):
            sent.clear()
            model(own(world)).backward()
            assert sent == [4, 3, 2, 1]
    return seen


@each_overlap
def test_buckets_are_launched_before_backward_ends_only_with_overlap(pair, overlap):
    """Seen when the gradient of p0, the last one, becomes ready."""
    assert pair(launched_during_backward, overlap) == [[[4, 3, 2]] * 2 if overlap else [[], []]] * 2


RANK_0_USES, OTHERS_USE = (1, 3, 0, 2), (0, 1, 2, 3)


def launch_in_order(world, view):
    """Rank 0's gradients become ready as p2, p0, p3, p1, the others' as p3, p2, p1, p0."""
    model = Terms(1, 2, 3, 4)
    ready = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
    reducer = Reducer(model, bucket_cap_mb=0, gradient_as_bucket_view=view)
    use = RANK_0_USES if world.rank == 0 else OTHERS_USE
    for expected in ([4, 3, 2, 1], [3, 1, 4, 2], [3, 1, 4, 2]):
        ready.clear()
        model.zero_grad()
        with recorded("all_reduce") as sent:
            model(own(world), use).backward()
        assert ready == [f"p{k}" for k in reversed(use)]
        assert sent == expected
        assert_grads(model, mean(world))
        assert reducer.buckets == (("p2",), ("p0",), ("p3",), ("p1",))


@each_view
def test_launch_order_is_one_on_all_ranks_whatever_is_ready_first(crew, view):
    """First the reverse order of registration; rebuilt after the first step as rank 0's."""
    crew(launch_in_order, view)


def rebuild(world):
    model = Terms(1, 2, 3, 4)
    reducer = Reducer(model, bucket_cap_mb=12 * BYTES)
    before = reducer.buckets
    assert before == (("p3",), ("p2",), ("p1", "p0"))
    for expected in ([4], [], []):
        with recorded("broadcast") as sent:
            model(own(world), (3, 2, 1, 0)).backward()
        assert sent == expected
        assert reducer.buckets == (("p0", "p1"), ("p2",), ("p3",))


def test_buckets_are_rebuilt_once(pair):
    pair(rebuild)


def views_after_rebuild(world):
    model = Terms(1, 2, 3, 4)
    Reducer(model, bucket_cap_mb=math.inf, gradient_as_bucket_view=True)
    for step in (1, 2, 3):  # accumulated: never set to zero
        model(own(world), (3, 2, 1, 0)).backward()
        assert_grads(model, step * mean(world))
        ends = [p.grad.data_ptr() + p.grad.nbytes for p in model.parameters()]
        starts = [p.grad.data_ptr() for p in model.parameters()]
        in_bucket = starts[1:] == ends[:-1]  # one behind the other
        assert in_bucket  # also after the first step, which lays the buckets out anew


def test_gradient_views_survive_the_rebuild(pair):
    pair(views_after_rebuild)


class LastRegisteredFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.last, self.first = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.last(self.first(x).relu())


def laid_out_anew_where_needed(world):
    """Buckets that would be the same stay, and nobody has to move gradients and parameters."""
    usual = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    for model, stays in ((usual, True), (LastRegisteredFirst(), False)):
        reducer = Reducer(model, bucket_cap_mb=0)
        before = reducer.flat_buckets
        model(torch.ones(1, 2)).sum().backward()
        assert (reducer.flat_buckets == before) == stays


def test_buckets_that_would_be_the_same_stay(ranks):
    ranks("gloo", 2)(laid_out_anew_where_needed)
