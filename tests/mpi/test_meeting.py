"""The barrier of a machine's ranks, fast and slow ones."""

import random
import time

import pytest
import torch
import torch.distributed as dist

from ddp_from_scratch.node.staging import PIECE
from tests.support.tiers import slow


def fast_and_slow_ranks(world):
    group = dist.new_group()
    barrier = group.checked_barrier
    together, naps = barrier.wait, random.Random(world.rank)

    def wait():
        together()
        time.sleep(naps.choice([0.0, 0.003]))

    barrier.wait = wait
    n = world.world_size
    for number in range(4):
        tensor = torch.arange(7 * PIECE // 8 * 2, dtype=torch.float32) + world.rank + number
        expected = n * (tensor - world.rank) + n * (n - 1) / 2
        dist.all_reduce(tensor, group=group)
        assert tensor.equal(expected)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("size", [3, slow(6)])
def test_a_fast_rank_overwrites_nothing_that_a_slow_one_still_needs(ranks, size):
    ranks("mpi", size)(fast_and_slow_ranks)


def one_is_late(world):
    for late in range(world.world_size):
        if world.rank == late:
            time.sleep(0.05)
        came = time.monotonic()
        dist.barrier()
        left = time.monotonic()
        times: list[float] = [0.0] * world.world_size
        dist.all_gather_object(times, came)
        assert left >= max(times), f"left before rank {late} came"


@pytest.mark.parametrize("backend", ["node", slow("mpi")])  # one barrier; six forks start sooner
def test_nobody_leaves_a_meeting_of_several_rounds_before_all_have_come(ranks, backend):
    ranks(backend, 6)(one_is_late)
