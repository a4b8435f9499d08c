"""All-reduces of the Reducer: their number and order, before and after the buckets are rebuilt."""

import math

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from ddp_from_scratch import Reducer
from ddp_from_scratch.common.memory import same_memory
from tests.support.on_ranks import on
from tests.support.terms import BYTES, Terms, assert_grads, mean, own, recorded


@pytest.mark.parametrize(
    ("options", "use", "early"),
    [
        ({}, None, [4, 3, 2]),
        ({"overlap": False}, None, []),
        ({"find_unused_parameters": True}, (0,), [4, 3, 2]),  # those that are not reached
    ],
)
@on("gloo-2")
def test_buckets_are_launched_before_backward_ends_only_with_overlap(world, options, use, early):
    """Seen when the gradient of p0, the last one, becomes ready."""
    model = Terms(1, 2, 3, 4)
    with recorded("all_reduce") as sent:
        seen = []
        model.p0.register_post_accumulate_grad_hook(lambda _: seen.append(list(sent)))
        reducer = Reducer(model, bucket_cap_mb=0, **options)
        buckets = reducer.core.flat_buckets
        for _ in range(2):
            sent.clear()
            model(own(world), use).backward()
            assert sent[:4] == [4, 3, 2, 1]
    assert seen == [early] * 2
    assert reducer.core.flat_buckets == buckets  # in the order that was guessed: no gradient moves


RANK_0_USES, OTHERS_USE = (1, 3, 0, 2), (0, 1, 2, 3)


@on("gloo-3")
def test_launch_order_is_one_on_all_ranks_whatever_is_ready_first(world):
    """Rank 0's gradients become ready as p2, p0, p3, p1, the others' as p3, p2, p1, p0."""
    model = Terms(1, 2, 3, 4)
    ready = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
    reducer = Reducer(model, bucket_cap_mb=0)
    assert reducer.buckets == (("p3",), ("p2",), ("p1",), ("p0",))
    use = RANK_0_USES if world.rank == 0 else OTHERS_USE
    for expected in ([4, 3, 2, 1], [3, 1, 4, 2], [3, 1, 4, 2]):
        ready.clear()
        model.zero_grad()
        with recorded("all_reduce") as sent, recorded("broadcast") as orders:
            model(own(world), use).backward()
        assert ready == [f"p{k}" for k in reversed(use)]
        assert sent == expected
        assert orders == ([4] if expected == [4, 3, 2, 1] else [])
        assert_grads(model, mean(world))
        assert reducer.buckets == (("p2",), ("p0",), ("p3",), ("p1",))
    assert reducer.ready_order == ["p2", "p0", "p3", "p1"]


def grads_at(model):
    return [None if p.grad is None else p.grad.data_ptr() for p in model.parameters()]


@pytest.mark.parametrize("cap", [0, 12 * BYTES, math.inf])
@on("gloo-2")
def test_gradients_move_into_their_buckets(world, cap):
    for passes in range(3):
        model = Terms(1, 2, 3, 4)
        reducer = Reducer(model, bucket_cap_mb=cap)
        for _ in range(passes):
            model.zero_grad()
            model(own(world)).backward()
        names, before = reducer.buckets, grads_at(model)
        stats = reducer.stats()
        assert (stats.iteration, stats.rebuilt) == (passes, passes > 0)
        reducer.keep_bucket_views()
        assert (reducer.buckets, grads_at(model)) == (names, before)
        for _ in range(2):
            buckets = reducer.core.flat_buckets
            reducer.keep_bucket_views()
            assert reducer.core.flat_buckets == buckets
            model.zero_grad()
            model(own(world)).backward()
            assert_grads(model, mean(world))
        for bucket in reducer.core.flat_buckets:
            for p, view in zip(bucket.parameters(), bucket.views, strict=True):
                assert same_memory(p.grad, view)


PHASES = ("pack", "launch", "wait", "unpack")


def ranges(profiler):
    return [event for event in profiler.events() if event.name.startswith("ddp.bucket")]


@on("gloo-2")
def test_every_phase_of_every_bucket_is_a_range(world):
    model = Terms(2, 2, 2)
    reducer = Reducer(model, bucket_cap_mb=16 * BYTES)
    model(own(world)).backward()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(2):
            model(own(world)).backward()
    count = len(reducer.buckets)
    assert count == 2
    found = ranges(profiler)
    buckets = ("ddp.bucket 0 (p2, p1)", "ddp.bucket 1 (p0)")
    expected = [f"{bucket}: {phase}" for bucket in buckets for phase in PHASES]
    assert sorted(event.name for event in found) == sorted(2 * expected)
    assert not any(event.is_async for event in found)
    model(own(world)).backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(own(world)).backward()
    assert len(ranges(profiler)) == len(expected)


@pytest.mark.parametrize("where", ["launch", "wait"])
@on("gloo-1")
def test_a_range_ends_with_a_phase_that_raises(world, where):
    """The hook, or the average, raises at the end of backward: inside no range of autograd's."""
    model = Terms(2)
    reducer = Reducer(model, overlap=False)

    def hook(state, bucket):
        future = torch.futures.Future()
        if where == "launch":
            raise ZeroDivisionError
        future.set_exception(ZeroDivisionError())
        return future

    reducer.register_comm_hook(None, hook)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        loss = model(own(world))
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        torch.ones(1).cos_()
    assert [event.name.rpartition(": ")[2] for event in ranges(profiler)][-1] == where
    (later,) = [event for event in profiler.events() if event.name == "aten::cos_"]
    assert all(event.time_range.end <= later.time_range.start for event in ranges(profiler))
