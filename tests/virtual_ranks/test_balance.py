"""Virtual ranks that are assigned by speed: the same bits whatever the deal."""

import random
from itertools import pairwise, product
from unittest.mock import patch

import pytest
import torch
from torch import nn

import ddp_from_scratch as ddp
from ddp_from_scratch.virtual_ranks import balance
from ddp_from_scratch.virtual_ranks.balance import Balance
from ddp_from_scratch.virtual_ranks.deal import counts_by_speed, equal_counts, longest, parts_of
from tests.support.logged import logged
from tests.support.on_ranks import on
from tests.support.tiers import slow
from tests.virtual_ranks.programs import (
    FIRST_TIER,
    PROGRAMS,
    STEPS,
    VIRTUAL_RANKS,
    Training,
    bits_of,
    by_definition,
)


@pytest.mark.parametrize("count", [3, 4, 8])
def test_no_other_deal_ends_earlier(count):
    draw = random.Random(count)
    for ranks in (1, 2, 3):
        for _ in range(20):
            seconds = [draw.uniform(0.1, 1) for _ in range(ranks)]
            counts = counts_by_speed(count, seconds)
            others = [
                each for each in product(range(1, count + 1), repeat=ranks) if sum(each) == count
            ]
            assert tuple(counts) in others
            assert longest(counts, seconds) == min(longest(each, seconds) for each in others)


def test_equal_counts_differ_by_one_at_most():
    for count, ranks in product(range(1, 9), range(1, 5)):
        counts = equal_counts(count, ranks)
        assert sum(counts) == count
        assert max(counts) - min(counts) <= 1


def test_parts_are_neighbours_in_the_order_of_ranks():
    assert parts_of(range(6), [1, 3, 2]) == [(0,), (1, 2, 3), (4, 5)]
    assert parts_of([2, 5, 7], [2, 1]) == [(2, 5), (7,)]


def dealt_at_random(world, name):
    """Deals again before each step."""
    draw, training = random.Random(3), Training(PROGRAMS[name], balance=True)
    deals = set()
    for step in range(STEPS):
        cuts = sorted(draw.sample(range(1, VIRTUAL_RANKS), world.world_size - 1))
        counts = [end - begin for begin, end in pairwise([0, *cuts, VIRTUAL_RANKS])]
        training.reducer._virtual_ranks.balance.counts = counts
        assert len(training.reducer.virtual_rank_range) == counts[world.rank]
        deals.add(tuple(counts))
        training.train(step, step + 1)
    assert len(deals) > 1
    return bits_of(training.model, training.optimizer)


@pytest.mark.parametrize("crew", ["gloo-2", "gloo-3", slow("mpi-3"), slow("node-3")])
def test_a_deal_changes_no_bit(ranks, crew):
    backend, _, size = crew.partition("-")
    for name in FIRST_TIER:
        assert set(ranks(backend, int(size))(dealt_at_random, name)) == {by_definition(name)}, name


class Stop(Exception):
    """Ends a virtual rank."""


class Clock:
    """Ticks only while this rank computes a virtual rank, for `seconds` of it."""

    def __init__(self, seconds):
        self.now, self.seconds = 0.0, seconds

    def __call__(self):
        return self.now

    def run(self, reducer, model, steps=1):
        """Trains, and returns the bits of the gradients."""

        def compute(virtual_rank):
            self.now += self.seconds
            model(torch.full((1, 3), virtual_rank / 7)).sum().backward()

        for _ in range(steps):
            reducer.run_virtual_ranks(compute)


@on("gloo-2")
def test_a_slow_rank_runs_fewer_virtual_ranks(world):
    clock, model = Clock([0.02, 0.044][world.rank]), nn.Linear(3, 2)
    ddp.broadcast_parameters(model)
    reducer = ddp.Reducer(model, virtual_ranks=16, balance=True)
    assert repr(reducer).endswith("16 virtual ranks assigned by speed (equal parts so far))")
    with patch.object(balance, "perf_counter", clock), logged() as lines:
        clock.run(reducer, model, 10)
        assert len(reducer.virtual_rank_range) == [11, 5][world.rank]
        text = "rank 0 runs 11 (20 ms each), rank 1 runs 5 (44 ms each)"
        assert repr(reducer).endswith(f"16 virtual ranks assigned by speed ({text}))")
        told = f"assigned by speed: {text}; the last rank computes for 220 ms a step, 352 ms before"
        assert lines == [("INFO", f"virtual ranks are {told}")] * (world.rank == 0)
        # Another one is slow now. Its median needs a few steps.
        clock.seconds = [0.02, 0.02][world.rank]
        clock.run(reducer, model, 12)
        assert len(reducer.virtual_rank_range) == 8


@on("gloo-2")
def test_a_small_gain_changes_nothing(world):
    clock, model = Clock([0.1, 0.104][world.rank]), nn.Linear(3, 2)
    ddp.broadcast_parameters(model)
    reducer = ddp.Reducer(model, virtual_ranks=64, balance=True)
    with patch.object(balance, "perf_counter", clock):
        clock.run(reducer, model, 8)
    assert reducer._virtual_ranks.balance.seconds == pytest.approx([0.1, 0.104])
    assert len(reducer.virtual_rank_range) == 32


@on("gloo-3")
def test_what_is_left_of_a_step_is_dealt_by_speed(world):
    """As after a loss: the last rank has just joined, so it counts as the mean of the others."""
    clock, model = Clock([0.01, 0.03, 0.0][world.rank]), nn.Linear(3, 2)
    ddp.broadcast_parameters(model)
    reducer = ddp.Reducer(model, virtual_ranks=16, balance=True)
    with patch.object(balance, "perf_counter", clock):
        clock.run(reducer, model, 6)
        first = reducer.virtual_rank_range[0]

        def stop(virtual_rank):
            if world.rank or virtual_rank != first:
                raise Stop
            model(torch.ones(1, 3)).sum().backward()

        with pytest.raises(Stop):
            reducer.run_virtual_ranks(stop)
        assert reducer.set_step(6, keep=True) == 1
        # 15 are left: 9 x 10 ms, 2 x 30 ms and 4 x 20 ms.
        assert len(reducer.virtual_rank_range) == [9, 2, 4][world.rank]
        clock.run(reducer, model)
        assert len(reducer.virtual_rank_range) == [9, 3, 4][world.rank]


def test_ranks_that_have_not_measured_keep_equal_parts(alone):
    reducer = ddp.Reducer(nn.Linear(3, 2), virtual_ranks=4, balance=True)
    dealer = reducer.core.observer(Balance)
    dealer.learn([0.0, 0.0])
    assert (dealer.counts, dealer.seconds) == (None, ())


def test_balance_needs_virtual_ranks(alone):
    with pytest.raises(ValueError, match="balance=True needs virtual ranks: add virtual_ranks=V"):
        ddp.Reducer(nn.Linear(3, 2), balance=True)


@on("gloo-2")
def test_no_step_has_a_collective_more(world):
    counts = []
    for options in ({}, {"balance": True}):
        model = nn.Linear(3, 2)
        ddp.broadcast_parameters(model)
        reducer = ddp.Reducer(model, virtual_ranks=4, shared_memory=False, **options)
        Clock(0.0).run(reducer, model, 3)
        before = world_sequence()
        Clock(0.0).run(reducer, model, 3)
        counts.append(world_sequence() - before)
    assert counts[0] == counts[1] > 0


def world_sequence():
    """The number of collectives that the default group has begun."""
    return torch.distributed.group.WORLD._get_sequence_number_for_group()
