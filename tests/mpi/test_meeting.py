"""Meetings of a machine's ranks, and the shares and order in which they reduce."""

import random
import time
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ddp_from_scratch.node.barrier import rounds_of
from ddp_from_scratch.node.reduction import Reduction
from ddp_from_scratch.node.staging import PIECE, share_of


@given(st.integers(0, 10_000), st.integers(1, 9))
def test_shares_cover_everything_once(numel, owners):
    shares = [share_of(numel, rank, owners) for rank in range(owners)]
    assert shares[0][0] == 0
    assert shares[-1][1] == numel
    assert all(end == begin for (_, end), (begin, _) in pairwise(shares))
    assert all(begin % 16 == 0 or begin == numel for begin, _ in shares)


def test_a_rank_past_the_owners_has_no_share():
    assert share_of(100, 3, 2) == (100, 100)


@given(st.integers(1, 70))
def test_after_the_last_round_each_rank_has_heard_of_all(size):
    heard = [{rank} for rank in range(size)]
    for distances in rounds_of(size):
        heard = [
            own.union(*(heard[(rank - distance) % size] for distance in distances))
            for rank, own in enumerate(heard)
        ]
    assert all(own == set(range(size)) for own in heard)


def test_a_reduction_keeps_the_order_of_ranks():
    tensors = [torch.tensor([1e8]), torch.tensor([-1e8]), torch.tensor([1.0])]
    sum_of = Reduction.of(dist.ReduceOp.SUM, torch.float32, 3)
    assert sum_of.fold(tensors, torch.empty(1)).item() == 1.0
    assert sum_of.fold(tensors[::-1], torch.empty(1)).item() == 0.0
    average = Reduction.of(dist.ReduceOp.AVG, torch.int64, 2)
    assert average.fold([torch.tensor([4]), torch.tensor([3])], torch.empty(1).long()).item() == 3


def fast_and_slow_ranks(world):
    group = dist.new_group()
    meeting = group._collectives.meeting
    together, naps = meeting.barrier, random.Random(world.rank)

    def barrier():
        together()
        time.sleep(naps.choice([0.0, 0.003]))

    meeting.barrier = barrier
    n = world.world_size
    for number in range(4):
        tensor = torch.arange(7 * PIECE // 8 * 2, dtype=torch.float32) + world.rank + number
        expected = n * (tensor - world.rank) + n * (n - 1) / 2
        dist.all_reduce(tensor, group=group)
        assert tensor.equal(expected)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("size", [3, 6])
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


def test_nobody_leaves_a_meeting_of_several_rounds_before_all_have_come(ranks):
    ranks("mpi", 6)(one_is_late)
