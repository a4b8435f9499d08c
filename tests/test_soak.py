"""A few hundred of `soak.py`'s random operations, and ten thousand of one kind for leaks."""

import pytest
import torch
import torch.distributed as dist

from tests.support.soak import Memory, soak
from tests.support.tiers import slow


def short_soak(world, seed):
    wrong, _, checked = soak(300, seed)
    assert not wrong, "\n".join(wrong)
    return checked


@pytest.mark.parametrize(("world_size", "seed"), [(2, 10), slow(4, 11)])
def test_random_operations_give_what_numpy_gives(ranks, world_size, seed):
    checked = ranks("mpi", world_size)(short_soak, seed)
    assert min(checked) > 100


def many_collectives(world):
    """A leak of one handle, tensor or request each, some hundred bytes, would show."""
    tensor = torch.ones(1000)

    def go(count):
        handles = []
        for i in range(count):
            handles.append(dist.all_reduce(tensor, dist.ReduceOp.MAX, async_op=True))
            if i % 4 == 0:
                other = 1 - world.rank
                received = torch.empty(10)
                handles.append(dist.irecv(received, src=other))
                handles.append(dist.isend(torch.ones(10), dst=other))
            if len(handles) > 20:
                for handle in handles:
                    handle.wait()
                handles.clear()
        for handle in handles:
            handle.wait()
        return Memory.now()

    before = go(2000)
    after = go(10_000)
    for _ in range(50):
        group = dist.new_group()
        dist.all_reduce(tensor, group=group)
        dist.destroy_process_group(group)
    return before, after, Memory.now()


@pytest.mark.slow
def test_ten_thousand_collectives_leak_nothing(ranks):
    for before, after, after_groups in ranks("mpi", 2)(many_collectives):
        assert after.resident - before.resident < 2, (before, after)
        assert after.allocated - before.allocated < 0.5, (before, after)
        assert after_groups.allocated - after.allocated < 5, (after, after_groups)  # of 50 groups
