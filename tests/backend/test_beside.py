"""A group of the node backend beside a gloo group: when it is opened, closed, and shown."""

import gc
import weakref

import torch
import torch.distributed as dist

from ddp_from_scratch import SGD, Reducer
from ddp_from_scratch.backend.process_group import SharedMemoryGroup
from ddp_from_scratch.backend.traits import GroupTraits, traits
from ddp_from_scratch.node import shared_memory_group
from tests.support.machines import group_over
from tests.support.on_ranks import on


@on("gloo-3")
def test_it_is_opened_once_and_closed_with_its_gloo_group(world):
    group = dist.new_group(list(range(world.world_size)))
    ours = shared_memory_group(group)
    assert isinstance(ours, SharedMemoryGroup)
    assert shared_memory_group(group) is shared_memory_group(ours) is ours
    tensor = torch.tensor([world.rank + 1.0])
    dist.all_reduce(tensor, group=ours)
    assert tensor.item() == sum(range(1, world.world_size + 1))
    parts = [torch.empty(1) for _ in range(world.world_size)]
    dist.all_gather(parts, torch.tensor([float(world.rank)]), group=ours)
    assert torch.cat(parts).tolist() == list(range(world.world_size))
    gone = weakref.ref(ours)
    dist.destroy_process_group(group)
    del group, ours
    gc.collect()
    assert gone() is None


@on("gloo-3")
def test_every_group_answers_what_it_can_do(world):
    gloo, two = dist.group.WORLD, dist.new_group([0, 1])
    beside = shared_memory_group(gloo)
    assert traits(gloo) == traits(None) == GroupTraits(False, False, None, None)
    assert traits(beside) == GroupTraits(False, True, 1, beside)  # 1/3 is not exact
    if world.rank < 2:
        beside = shared_memory_group(two)
        assert traits(beside) == GroupTraits(True, True, 1, beside)


@on("gloo-2")
def test_where_nothing_is_shared(world):
    """One rank alone, or alone on its machine, stays with gloo."""
    groups = [dist.new_group([rank]) for rank in range(world.world_size)]
    model = torch.nn.Linear(2, 2)
    reducer = Reducer(model, groups[world.rank])
    optimizer = SGD(model.parameters(), lr=1.0, shard="node", reducer=reducer)
    before = model.bias.clone()
    optimizer.backward_and_step(model(torch.ones(1, 2)).sum())
    assert torch.equal(model.bias, before - 1)
    assert "via gloo" in repr(reducer)
    group = group_over(world, [1] * world.world_size)
    assert shared_memory_group(group) is group


@on("gloo-3")
def test_in_part_of_the_ranks(world):
    """torch names the groups that come later by a count that all ranks must agree on."""
    _, first, second = (dist.new_group(ranks) for ranks in ([0], [0, 1], [1, 2]))
    if world.rank < 2:
        shared_memory_group(first)
    later = dist.new_group()
    for group in (dist.group.WORLD, later, first, second):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=shared_memory_group(group))
            assert tensor.item() == group.size()
