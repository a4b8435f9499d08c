"""`keep_bucket_views`: gradients lie in their buckets from some moment on."""

import copy

import pytest
import torch

from ddp_from_scratch import Reducer, join
from ddp_from_scratch.buckets.memory import lies_at
from tests.support.terms import Terms, assert_grads, each_cap, mean, own


def assert_in_buckets(reducer: Reducer) -> None:
    for bucket in reducer.flat_buckets:
        assert bucket.gradient_as_bucket_view
        for parameter, view in zip(bucket.parameters(), bucket.views, strict=True):
            assert lies_at(parameter.grad, view)


def between_passes(world, cap, set_to_none):
    model = Terms(1, 2, 3, 4)
    reducer = Reducer(model, bucket_cap_mb=cap)
    for passes in range(3):  # before the first, and before and after the final layout
        reducer.remove()
        reducer = Reducer(model, bucket_cap_mb=cap)
        for _ in range(passes):
            model.zero_grad()
            model(own(world)).backward()
        before = [p.grad for p in model.parameters()]
        assert "gradient_as_bucket_view" not in repr(reducer)
        names = reducer.buckets
        reducer.keep_bucket_views()
        assert "gradient_as_bucket_view" in repr(reducer)
        assert reducer.buckets == names
        assert all(p.grad is b for p, b in zip(model.parameters(), before, strict=True))
        for step in (1, 2):
            kept = reducer.flat_buckets
            reducer.keep_bucket_views()
            assert all(a is b for a, b in zip(kept, reducer.flat_buckets, strict=True))
            model.zero_grad(set_to_none=set_to_none)
            model(step * own(world)).backward()
            assert_grads(model, step * mean(world))
        model.zero_grad()
        model(own(world)).backward()
        assert_in_buckets(reducer)


@each_cap
@pytest.mark.parametrize("set_to_none", [True, False])
def test_between_passes(crew, cap, set_to_none):
    crew(between_passes, cap, set_to_none)


def accumulated(world):
    for cap in (0, None):
        model = Terms(1, 2, 3)
        reducer = Reducer(model, bucket_cap_mb=cap)
        model(own(world)).backward()
        reducer.keep_bucket_views()
        model(own(world)).backward()  # adds to an average, and averages the sum
        assert_grads(model, 2 * mean(world))
        reducer.remove()
        model.zero_grad()
        reducer = Reducer(model, bucket_cap_mb=cap)
        with reducer.no_sync():
            model(own(world)).backward()
            reducer.keep_bucket_views()
            assert_grads(model, own(world))
            model(own(world)).backward()
        model(own(world)).backward()
        assert_grads(model, 3 * mean(world))
        reducer.remove()


def test_accumulated_gradients(pair):
    pair(accumulated)


def in_join(world):
    found = []
    for keep in (False, True):
        model = Terms(1, 2, 3)
        reducer = Reducer(model, bucket_cap_mb=0)
        with join(reducer):
            for step in range(1 + 2 * world.rank):
                if keep and step == 1:
                    reducer.keep_bucket_views()
                model.zero_grad()
                model((step + 1) * own(world)).backward()
        found.append(copy.deepcopy([p.grad for p in model.parameters()]))
        reducer.remove()
    assert all(map(torch.equal, *found))


def test_inside_join(pair):
    pair(in_join)


def unused(world):
    model = Terms(1, 2, 3)
    reducer = Reducer(model, find_unused_parameters=True)
    model(own(world), use=(0, 1)).backward()
    reducer.keep_bucket_views()
    model.zero_grad()
    model(own(world), use=(1, 2)).backward()
    assert model.p0.grad is None
    assert model.p2.grad.eq(3 * mean(world)).all()


def test_unused_parameters(pair):
    pair(unused)


@pytest.mark.usefixtures("alone")
def test_refused_while_gradients_are_under_way():
    model = Terms(1, 2)
    reducer = Reducer(model)
    told = []

    def in_backward(_gradient: torch.Tensor) -> None:
        with pytest.raises(RuntimeError, match="under way cannot move into their buckets") as found:
            reducer.keep_bucket_views()
        told.append(found)

    # p1's gradient is ready before p0's.
    hook = model.p0.register_hook(in_backward)
    model(1.0).backward()
    hook.remove()
    assert len(told) == 1
    reducer.keep_bucket_views()
    model(1.0).backward()
    assert_in_buckets(reducer)
