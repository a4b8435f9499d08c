"""no_sync, removal, copies and the end of a Reducer."""

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from ddp_from_scratch import Reducer
from tests.support.terms import BYTES, Terms, assert_grads, each_view, mean, own, recorded


def accumulate(world, view, set_to_none):
    model = Terms(1, 2, 3, 4)
    reducer = Reducer(model, bucket_cap_mb=12 * BYTES, gradient_as_bucket_view=view)
    for _ in range(3):
        model.zero_grad(set_to_none=set_to_none)
        with recorded("all_reduce") as sent, reducer.no_sync():
            for times in (1, 2):
                model(own(world)).backward()
                assert_grads(model, times * own(world))
        assert sent == []
        model(own(world)).backward()
        assert_grads(model, 3 * mean(world))


@each_view
@pytest.mark.parametrize("set_to_none", [True, False])
def test_no_sync_accumulates_and_the_next_backward_averages_the_sum(crew, view, set_to_none):
    crew(accumulate, view, set_to_none)


def no_sync_restores(world):
    model = Terms(1, 2)
    reducer = Reducer(model)
    with pytest.raises(KeyError), reducer.no_sync():
        raise KeyError
    model(own(world)).backward()
    assert_grads(model, mean(world))

    model.zero_grad()
    with reducer.no_sync():
        with reducer.no_sync():
            pass
        model(own(world)).backward()
        assert_grads(model, own(world))
    model(own(world)).backward()
    assert_grads(model, 2 * mean(world))


def test_no_sync_restores_itself_after_an_exception_and_nests(pair):
    pair(no_sync_restores)


def remove(world):
    model = Terms(1, 2)
    reducer = Reducer(model)
    model(own(world)).backward()
    reducer.remove()
    reducer.remove()
    with recorded("all_reduce") as sent:
        for use in ((0, 1), (0,), (0, 1)):
            model.zero_grad()
            model(own(world), use).backward()
    assert sent == []
    assert_grads(model, own(world))

    Reducer(model)
    model(own(world)).backward()
    assert_grads(model, 2 * mean(world))


def test_removed_is_local_until_there_is_a_new_one(pair):
    pair(remove)


def remove_in_the_middle(world):
    """With buckets under way and parameters missing."""
    model = Terms(1, 2)
    reducer = Reducer(model, bucket_cap_mb=0)
    model(own(world), use=(1,)).backward()
    reducer.remove()
    model.zero_grad()
    model(own(world)).backward()
    assert_grads(model, own(world))


def test_remove_after_half_a_backward(pair):
    pair(remove_in_the_middle)


def forward_on_rank_0_only(world):
    model = Terms(1, 2)
    Reducer(model)
    for _ in range(3):
        if world.rank == 0:
            model.eval()
            with torch.no_grad():
                model(1.0)
            model(1.0)  # with a graph, but no backward
            model.train()
        model.zero_grad()
        model(own(world)).backward()
        assert_grads(model, mean(world))


def test_a_forward_on_one_rank_alone_does_not_hang(pair):
    pair(forward_on_rank_0_only)


def copied(world, in_group):
    """As of a teacher or of averaged weights: frozen, and run with gradients enabled."""
    group = dist.new_group() if in_group else None
    model = Terms(1, 2)
    Reducer(model, group)
    model(own(world)).backward()
    other = copy.deepcopy(model).requires_grad_(False)
    other(1.0)
    other.requires_grad_(True).zero_grad()
    other(own(world), (0,)).backward()
    other(own(world), (1,)).backward()
    assert_grads(other, own(world))

    model.zero_grad()
    model(own(world)).backward()
    assert_grads(model, mean(world))
    if in_group:
        dist.destroy_process_group(group)


@pytest.mark.parametrize("in_group", [False, True])
def test_a_deep_copy_of_the_module_is_plain(pair, in_group):
    pair(copied, in_group)


def forget(world):
    model = Terms(1, 2)
    reducer = Reducer(model)
    model(own(world)).backward()
    alive = [weakref.ref(object_) for object_ in (model, reducer, model.p0)]
    del model, reducer
    gc.collect()
    assert [reference() for reference in alive] == [None] * 3


def test_a_forgotten_module_is_freed(pair):
    pair(forget)
