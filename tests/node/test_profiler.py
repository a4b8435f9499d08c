"""Collectives of our backends are in torch.profiler, as those of torch's are."""

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import ddp_from_scratch as ddp
from ddp_from_scratch.node.shared_memory_group import SharedMemoryGroup
from tests.support.tiers import slow


def events(profiler, name):
    return [event for event in profiler.events() if event.name == name]


def profiled(world, backend):
    small, large = torch.ones(3), torch.ones(100_000)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        dist.all_reduce(small)
        work = dist.all_reduce(large, async_op=True)
        work.wait()
        dist.barrier()
    assert small[0] == large[0] == world.world_size
    found = events(profiler, f"{backend}:all_reduce")
    assert len(found) == 2
    assert all(event.is_async for event in found)
    assert len(events(profiler, f"{backend}:barrier")) == 1
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.ones(1).add_(1)
    assert not events(profiler, f"{backend}:all_reduce")


@pytest.mark.parametrize("backend", ["node", "mpi"])
def test_collectives_are_ranges(ranks, backend):
    ranks(backend, 2)(profiled, backend)


def beside_gloo(world):
    """A Reducer on gloo reduces in a group of its own, which the profiler names."""
    model = torch.nn.Linear(2, 2)
    reducer = ddp.Reducer(model)
    assert isinstance(reducer.comm.group(), SharedMemoryGroup)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(torch.ones(1, 2)).sum().backward()
    assert len(events(profiler, "node:all_reduce")) == 1


@pytest.mark.parametrize("backend", [slow("gloo")])
def test_the_group_beside_gloo(ranks, backend):
    ranks(backend, 2)(beside_gloo)
