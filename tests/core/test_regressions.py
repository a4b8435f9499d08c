"""Combinations of two features that are correct alone."""

import functools
import gc
import tempfile
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_from_scratch as ddp
from ddp_from_scratch import Reducer
from ddp_from_scratch.options import comm_hooks
from tests.support.on_ranks import on
from tests.support.terms import Terms, mean, own


@pytest.mark.parametrize("name", ["average", "bf16_compress_hook"])
@on("gloo-2")
def test_a_hook_divides_by_the_size_of_the_group_that_its_state_names(world, name):
    hook, groups = getattr(comm_hooks, name), [dist.new_group([rank]) for rank in range(2)]
    alone, everyone = groups[world.rank], dist.group.WORLD
    cases = (alone, everyone, mean(world)), (None, alone, own(world)), (alone, None, own(world))
    for of_reducer, of_hook, expected in cases:
        model = Terms(3)
        reducer = Reducer(model, of_reducer, shared_memory=False)
        reducer.register_comm_hook(of_hook, hook)
        model(own(world)).backward()
        assert model.p0.grad.tolist() == [expected] * 3


OPTIONS = [{}, {"gradient_as_bucket_view": True, "find_unused_parameters": True}]
OPTIONS += [{"straggler_every": 2}, {"fuse_wgrad": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@on("gloo-2")
def test_a_removed_reducer_and_its_group_are_freed_at_once(world, options):
    gc.collect()
    gc.disable()
    try:
        model, group = nn.Linear(300, 300), dist.new_group([0, 1])
        reducer = Reducer(model, group, **options)
        model(torch.ones(1, 300)).sum().backward()
        reducer.remove()
        found = weakref.ref(reducer), weakref.ref(group)
        del reducer
        model.zero_grad()
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        assert [each() for each in found] == [None, None]
    finally:
        gc.enable()


@on("gloo-2")
def test_a_reducer_lives_to_the_end_of_its_pass(world):
    def made():
        model = Terms(2, 2, 2)
        options = {"gradient_as_bucket_view": True, "bucket_cap_mb": 100}
        Reducer(model, shared_memory=False, **options)
        return list(model.parameters()), model(own(world))

    parameters, loss = made()
    parameters[1].register_post_accumulate_grad_hook(lambda _: print(gc.collect()))
    loss.backward()
    assert [p.grad.tolist() for p in parameters] == [[k * mean(world)] * 2 for k in (1, 2, 3)]


@on("gloo-1")
def test_a_closed_group_does_not_stop_what_needs_none(world):
    group = dist.new_group([0])
    model = nn.Linear(2, 2)
    reducer, optimizer = Reducer(model, group), torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2)).sum().backward()
    dist.destroy_process_group(group)
    assert "gloo" in repr(reducer) or "shared memory" in repr(reducer)
    optimizer.step()
    model(torch.ones(2))
    reducer.remove()


@on("gloo-1")
def test_a_timeline_may_outlast_its_reducers_hooks(world):
    model = nn.Linear(2, 2)
    reducer = Reducer(model)
    with tempfile.TemporaryDirectory() as folder:
        with ddp.timeline(reducer, folder, steps=50, skip=0):
            for _ in range(3):
                model(torch.ones(2)).sum().backward()
            reducer.remove()
        assert any(Path(folder).iterdir())


def test_a_wrapper_of_a_hook_may_start_several_collectives(alone):
    reducer = Reducer(Terms(1))
    assert reducer.core.comm.concurrent
    wrapper = functools.wraps(comm_hooks.average)(lambda state, bucket: None)
    reducer.register_comm_hook(None, wrapper)
    assert not reducer.core.comm.concurrent


@on("gloo-2")
def test_with_no_sync_and_compression(world):
    """Batches 0 and 1 under no_sync(), 2 averages them; rank 0 ends after 3, rank 1 after 6."""
    model = Terms(1)
    reducer = Reducer(model)
    reducer.register_comm_hook(None, comm_hooks.bf16_compress_hook)
    with ddp.join(reducer):
        for step in range(3 * (world.rank + 1)):
            if step % 3 < 2:
                with reducer.no_sync():
                    model(1.0).backward()
            else:
                model(1.0).backward()
                assert model.p0.grad.tolist() == [3.0 if step < 3 else 1.5]
                model.zero_grad()
