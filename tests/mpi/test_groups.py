"""Groups of the mpi backend: new, split, and their monitored barrier."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ddp_from_scratch import mpi


def monitored_barrier(world):
    dist.monitored_barrier()
    group = dist.new_group()
    last = world.world_size - 1
    if world.rank != last:
        with pytest.raises(RuntimeError, match=rf"Rank {last} failed to pass monitoredBarrier"):
            dist.monitored_barrier(group, timeout=timedelta(seconds=0.3), wait_all_ranks=True)
    dist.barrier()


def test_monitored_barrier_names_who_is_missing(crew):
    if mpi.BACKEND != "mpi":
        pytest.skip(f"torch {torch.__version__} has monitored_barrier for gloo alone")
    crew(monitored_barrier)


def subgroups_of_one(world):
    alone, _ = dist.new_subgroups(group_size=1)
    tensor = torch.tensor([world.rank + 1.0])
    dist.all_reduce(tensor, group=alone)
    assert tensor.item() == world.rank + 1


def test_new_subgroups(crew):
    crew(subgroups_of_one)


def a_group_that_is_split(world):
    n, r = world.world_size, world.rank
    odd = dist.split_group(split_ranks=[list(range(0, n, 2)), list(range(1, n, 2))])
    tensor = torch.tensor([r])
    dist.all_reduce(tensor, group=odd)
    assert tensor.item() == sum(range(r % 2, n, 2))
    assert dist.get_process_group_ranks(odd) == list(range(r % 2, n, 2))
    last = dist.split_group(split_ranks=[[n - 1]])
    assert (
        dist.get_world_size(last) == 1 if r == n - 1 else last == dist.GroupMember.NON_GROUP_MEMBER
    )


def test_split_group(crew):
    if mpi.BACKEND != "mpi":
        pytest.skip(f"torch {torch.__version__} splits groups only where there is a GPU")
    crew(a_group_that_is_split)


def subgroups(world):
    even = dist.new_group([r for r in range(world.world_size) if r % 2 == 0])
    last = dist.new_group([world.world_size - 1, 0])
    if world.rank % 2 == 0:
        tensor = torch.tensor([world.rank + 1])
        dist.all_reduce(tensor, group=even)
        assert tensor.item() == sum(r + 1 for r in range(world.world_size) if r % 2 == 0)
    if world.rank in (0, world.world_size - 1):
        tensor = torch.tensor([world.rank])
        dist.broadcast(tensor, src=world.world_size - 1, group=last)
        assert tensor.item() == world.world_size - 1
        dist.destroy_process_group(last)
    if world.rank % 2 == 0:
        dist.destroy_process_group(even)


def test_subgroups_where_only_members_call(crew):
    crew(subgroups)
