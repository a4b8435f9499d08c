"""no_sync, interrupted passes, removal, copies and the end of a Reducer."""

import copy
import gc
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_from_scratch import Reducer, process_group
from tests.support.on_ranks import on
from tests.support.terms import BYTES, Terms, assert_grads, grads_of, mean, own, recorded


@on("pair")
def test_no_sync_restores_itself_after_an_exception_and_nests(world):
    model = Terms(1, 2)
    reducer = Reducer(model)
    with pytest.raises(KeyError), reducer.no_sync():
        raise KeyError
    model(own(world)).backward()
    assert_grads(model, mean(world))

    with reducer.no_sync():
        with reducer.no_sync():
            pass
        model.zero_grad()
        model(own(world)).backward()
        assert_grads(model, own(world))


def broken_off(world, where, again, overlap, view):
    """An exception in user code, once, on every rank: True if the next step is correct."""
    model = Terms(1, 2, 3, 4)
    p = getattr(model, where)

    def fail(_):
        handle.remove()
        raise KeyError(where)

    if again != "after accumulating":
        handle = p.register_hook(fail)
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


@pytest.mark.parametrize("where", ["p3", "p1", "p0"])
@pytest.mark.parametrize("again", ["new graph", "same graph", "after accumulating"])
@pytest.mark.parametrize(("overlap", "view"), [(True, True), (False, False)])
def test_a_pass_broken_off_is_followed_by_a_right_one_or_error(ranks, where, again, overlap, view):
    one, other = ranks("gloo", 2)(broken_off, where, again, overlap, view)
    assert one == other
    # Nothing had been counted in yet.
    assert one or where != "p3" or again == "after accumulating"


@pytest.mark.parametrize("small", [0, 2**15], ids=["packed early", "packed late"])
@pytest.mark.parametrize("view", [False, True], ids=["copy", "view"])
@on("gloo-2")
def test_a_pass_that_is_broken_off_takes_no_gradient_away(world, view, small):
    """What was accumulated under no_sync() is for the next Reducer to average."""
    model = Terms(1, 2)
    with patch("ddp_from_scratch.core.bucket._SMALL", small):
        reducer = Reducer(model, overlap=False, gradient_as_bucket_view=view)
    with reducer.no_sync():
        model(own(world)).backward()
    handle = model.p0.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(own(world)).backward()
    assert grads_of(model) == [own(world), 4 * own(world)]
    handle.remove()
    reducer.remove()
    Reducer(model, gradient_as_bucket_view=view)
    model(own(world)).backward()
    assert grads_of(model) == [2 * mean(world), 6 * mean(world)]


@on("gloo-2")
def test_removed_is_local(world):
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

    # And with buckets under way and parameters missing.
    reducer = Reducer(model, bucket_cap_mb=0)
    model(own(world), use=(1,)).backward()
    reducer.remove()
    model.zero_grad()
    model(own(world)).backward()
    assert_grads(model, own(world))


@on("gloo-2")
def test_a_deep_copy_of_the_module_is_plain(world):
    model = Terms(1, 2)
    Reducer(model, dist.new_group())
    other = copy.deepcopy(model).requires_grad_(False)
    other(1.0)
    other.requires_grad_(True)
    other(own(world), (0,)).backward()
    other(own(world), (1,)).backward()
    assert_grads(other, own(world))


def test_the_division_is_by_the_ranks_of_the_group_that_is_open(monkeypatch):
    """A Reducer on the default group outlives it, and the next group may have another size."""
    model, x = nn.Linear(1, 1, bias=False), torch.ones(1, 1)
    with process_group("gloo"):
        reducer = Reducer(model, shared_memory=False)
        model(x).backward()
        assert model.weight.grad.item() == 1.0
    with process_group("gloo"):
        monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)  # what counts is that
        model.zero_grad()
        model(x).backward()
        assert model.weight.grad.item() == 0.5
        monkeypatch.undo()
        reducer.remove()


@pytest.mark.parametrize("then", ["nothing", "removed", "another before", "another after"])
@on("gloo-2")
def test_a_gradient_whose_reducer_is_gone_with_a_temporary_container_raises(world, then):
    """Unless it was removed, or another Reducer averages, made before it is gone or after."""
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    reducer = Reducer(nn.ModuleList(layers[1:]))
    model = nn.Sequential(*layers)
    if then == "removed":
        reducer.remove()
    if then == "another before":
        Reducer(model)
    del reducer
    gc.collect()
    if then == "another after":
        Reducer(model)
    loss = model(torch.full((1, 2), own(world))).sum()
    if then == "nothing":
        text = r"shape \(2,\) is gone, because .*: keep the Reducer"
        with pytest.raises(RuntimeError, match=text):
            loss.backward()
        return
    loss.backward()
    gathered = [torch.empty(2, 2) for _ in range(2)]
    dist.all_gather(gathered, layers[1].weight.grad)
    assert torch.equal(*gathered) == then.startswith("another")
