"""Passes through shared graphs, under checkpointing and broken off."""

import math
from unittest.mock import patch

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ddp_from_scratch import Reducer
from ddp_from_scratch.buckets import packing
from tests.support.terms import (
    BYTES,
    Chain,
    Terms,
    assert_grads,
    each_overlap,
    each_view,
    mean,
    own,
)


def two_backwards_through_one_graph(world, options):
    model = Terms(1, 2, 3)
    Reducer(model, bucket_cap_mb=0, **options)
    for _ in range(3):
        model.zero_grad()
        loss = model(own(world))
        loss.backward(retain_graph=True)
        assert_grads(model, mean(world))
        loss.backward()
        assert_grads(model, 2 * mean(world))


def forward_forward_backward_backward(world, options):
    model = Terms(1, 2, 3)
    Reducer(model, bucket_cap_mb=0, **options)
    for _ in range(3):
        model.zero_grad()
        one, two = model(own(world)), model(10 * own(world))
        one.backward()
        assert_grads(model, mean(world))
        two.backward()
        assert_grads(model, 11 * mean(world))


def loss_in_two_parts(world, options):
    for first, second in (((2, 3), (0, 1)), ((0, 1), (2, 3)), ((0, 2), (1, 3))):
        for cap in (0, math.inf):
            model = Terms(1, 2, 3, 4)
            Reducer(model, bucket_cap_mb=cap, **options)
            for _ in range(3):
                model.zero_grad()
                one, two = model(own(world), first), model(own(world), second)
                one.backward()
                two.backward()
                assert_grads(model, mean(world))


def parts_that_share_a_parameter(world, options):
    """p0's second gradient comes before its bucket is full."""
    model = Terms(1, 2, 3)
    Reducer(model, bucket_cap_mb=math.inf, **options)
    for _ in range(3):
        model.zero_grad()
        one, two = model(own(world), (0, 1)), model(own(world), (2, 0))
        one.backward()
        two.backward()
        assert model.p0.grad.tolist() == [2 * mean(world)]
        assert model.p1.grad.tolist() == [2 * mean(world)] * 2


@pytest.mark.parametrize(
    "unusual",
    [
        two_backwards_through_one_graph,
        forward_forward_backward_backward,
        loss_in_two_parts,
        parts_that_share_a_parameter,
    ],
)
@each_overlap
@each_view
def test_unusual_order_is_right(pair, unusual, overlap, view):
    pair(unusual, {"overlap": overlap, "gradient_as_bucket_view": view})


def with_small_gradients(world, unusual, options):
    with patch.object(packing, "_SMALL", 2**15):
        unusual(world, options)


@pytest.mark.parametrize("unusual", [loss_in_two_parts, two_backwards_through_one_graph])
@each_view
def test_unusual_order_is_right_where_gradients_are_packed_together(pair, unusual, view):
    pair(with_small_gradients, unusual, {"gradient_as_bucket_view": view})


def checkpointed(world, whole, reentrant, overlap):
    for cap in (0, 12 * BYTES, math.inf):
        model = Chain(1, 2, 3, 4)
        Reducer(model, bucket_cap_mb=cap, overlap=overlap)
        for _ in range(3):
            model.zero_grad()
            start = torch.zeros((), requires_grad=True)
            if whole:
                loss = checkpoint(model, start, own(world), None, use_reentrant=reentrant)
            else:
                loss = model(start, own(world), reentrant)
            loss.backward()
            assert_grads(model, mean(world))


@pytest.mark.parametrize("whole", [True, False], ids=["whole model", "each layer"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@each_overlap
def test_activation_checkpointing(pair, whole, reentrant, overlap):
    pair(checkpointed, whole, reentrant, overlap)


def checkpointed_in_two_calls(world, reentrant):
    """The module is run again for p0 and p1 when p2 and p3 have their gradients already."""
    model = Terms(1, 2, 3, 4)
    Reducer(model)
    x = torch.tensor(own(world), requires_grad=True)
    for _ in range(3):
        model.zero_grad()
        calls = [checkpoint(model, x, use, use_reentrant=reentrant) for use in ((0, 1), (2, 3))]
        sum(calls).backward()
        assert_grads(model, mean(world))


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_activation_checkpointing_in_two_calls(pair, reentrant):
    pair(checkpointed_in_two_calls, reentrant)


def broken_off(world, where, again, overlap, view):
    """An exception in user code, once, on all ranks alike: true where the next step is right."""
    model = Terms(1, 2, 3, 4)
    p = getattr(model, where)

    def fail(_):
        handle.remove()
        raise KeyError(where)

    handle = p.register_hook(fail)
    if again == "after accumulating":
        handle.remove()
    Reducer(model, bucket_cap_mb=8 * BYTES, overlap=overlap, gradient_as_bucket_view=view)
    if again == "after accumulating":
        handle = p.register_post_accumulate_grad_hook(fail)
    loss = model(own(world))
    with pytest.raises(KeyError):
        loss.backward(retain_graph=True)
    model.zero_grad()
    try:
        (loss if again == "same graph" else model(own(world))).backward()
    except RuntimeError:
        return False
    assert_grads(model, mean(world))
    return True


@pytest.mark.parametrize("where", ["p3", "p2", "p1", "p0"])
@pytest.mark.parametrize("again", ["new graph", "same graph", "after accumulating"])
@each_overlap
@each_view
def test_backward_broken_off_is_followed_by_a_right_one_or_an_error(
    pair, where, again, overlap, view
):
    one, other = pair(broken_off, where, again, overlap, view)
    assert one == other
    if where == "p3" and again != "after accumulating":
        assert one, "nothing had been counted in yet"


def accumulated_and_broken_off(world, view):
    """What was accumulated under no_sync() is for the next Reducer to average."""
    model = Terms(1, 2)
    reducer = Reducer(model, overlap=False, gradient_as_bucket_view=view)
    with reducer.no_sync():
        model(own(world)).backward()

    def fail(_):
        raise KeyError

    handle = model.p0.register_hook(fail)
    with pytest.raises(KeyError):
        model(own(world)).backward()
    assert [p.grad.tolist() for p in model.parameters()] == [[own(world)], [4 * own(world)] * 2]
    handle.remove()
    reducer.remove()
    Reducer(model, gradient_as_bucket_view=view)
    model(own(world)).backward()
    assert [p.grad.tolist() for p in model.parameters()] == [
        [2 * mean(world)],
        [6 * mean(world)] * 2,
    ]


@each_view
def test_a_pass_that_is_broken_off_takes_no_gradient_away(pair, view):
    pair(accumulated_and_broken_off, view)


def failing_hook(state, bucket):
    future = torch.futures.Future()
    future.set_exception(KeyError("the hook's"))
    return future


def averaging_fails(world):
    """An exception where the averages are waited for, when every bucket has been launched."""
    model = Terms(1, 2)
    Reducer(model, bucket_cap_mb=math.inf).register_comm_hook(None, failing_hook)
    loss = model(own(world))
    with pytest.raises(KeyError, match="the hook's"):
        loss.backward()
    told = rf"backward pass on rank {world.rank} was broken off: "
    for _ in range(2):
        with pytest.raises(RuntimeError, match=told):
            model(own(world))


def test_an_average_that_fails_is_named_by_the_next_forward(pair):
    pair(averaging_fails)
