"""`bucket_cap_mb="auto"` on made-up clocks: what is tried and chosen, and right averages."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import ddp_from_scratch as ddp
from ddp_from_scratch import Reducer
from ddp_from_scratch.options import tuning
from ddp_from_scratch.options.tuning import BucketTuning, Candidate
from ddp_from_scratch.training.engine import buckets_to_begin_with
from ddp_from_scratch.training.loop import Trainer
from ddp_from_scratch.training.report import Report
from ddp_from_scratch.training.settings import Settings
from tests.support.on_ranks import on
from tests.support.terms import BYTES, Terms, assert_grads, mean, own, recorded

SMALL, LARGE, ALL = 8 * BYTES, 16 * BYTES, math.inf
A, A_AFTER, B = Candidate(1.0, True), Candidate(1.0, False), Candidate(math.inf, True)


def test_layouts_take_turns_and_the_first_step_of_each_does_not_count():
    first = [(A, False), *[(A, True), (A_AFTER, True)] * 2]
    second = [(B, False), (B, True), (B, True)]
    rounds = [*first, *second, *second, *first] * 2 + [*first, *second]
    assert tuning.trials([[A, A_AFTER], [B]]) == rounds


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({A: [10.0] * 4, A_AFTER: [9.0] * 4, B: [9.5] * 4}, A_AFTER),
        ({A: [10.0] * 4, A_AFTER: [9.95] * 4, B: [9.98] * 4}, A),  # as good as the best
        ({A_AFTER: [10.0] * 4, B: [10.0] * 4}, B),  # with overlap before without
        ({A: [10, 10, 10, 500, 900], B: [11.0] * 5}, A),  # pauses do not decide
        # B is shorter in 4 of 7, which may be noise, and in 3 of 5.
        ({A: [10, 12, 10, 12, 10, 12, 12], B: [11, 9, 11, 9, 11, 9, 9.5]}, A),
        ({A: [10, 12, 10, 12, 12], B: [11, 9, 11, 9, 9.5]}, B),
        # A machine that is slow for a while: B is shorter each time, though its median is longer.
        ({A: [10, 10, 10, 90, 90], B: [9, 9, 85, 85, 85], A_AFTER: [10, 10, 90, 90, 90]}, B),
    ],
    ids=["shortest", "tie", "overlap", "pause", "noise", "no noise", "slow for a while"],
)
def test_choice(times, chosen):
    assert tuning.choose(times) == chosen


@contextmanager
def clock_of(cost: Callable[[Candidate], float]) -> Iterator[Callable[..., Any]]:
    """Makes Reducers, or wrappers, whose steps take what `cost` says of the candidate."""
    timed: list[Any] = []
    now = 0.0

    def clock(device: torch.device) -> float:
        nonlocal now
        now += cost(timed[0].extension(BucketTuning).present)
        return now

    def make(*arguments: Any, kind: Any = Reducer, **options: Any) -> Any:
        made = kind(*arguments, bucket_cap_mb="auto", **options)
        timed.append(getattr(made, "reducer", made))
        return made

    caps = (SMALL, LARGE, ALL)
    with patch.object(tuning, "CAPS", caps), patch.object(tuning, "clock", clock):
        yield make


def rank_0_is_misled(world):
    """What takes the longest rank the least is LARGE at the end; on rank 0 it is SMALL."""
    mine = {SMALL: 1.0, LARGE: 3.0, ALL: 6.0}
    if world.rank == 1:
        mine[SMALL] = 5.0
    mine[tuning.DEFAULT] = 0.0  # before the first trial

    def cost(candidate: Candidate) -> float:
        at_end = candidate.bucket_cap_mb == LARGE and not candidate.overlap
        return mine[candidate.bucket_cap_mb] - 0.5 * at_end

    return cost


def one_bucket_is_best(candidate: Candidate) -> float:
    return 1.0 if candidate.bucket_cap_mb == ALL else 2.0


def averaged(reducer, world):
    reducer.module.zero_grad()
    reducer.module(own(world)).backward()
    assert_grads(reducer.module, mean(world))


def searched(world, options):
    model = Terms(1, 2, 3, 4)
    ways = []
    with clock_of(rank_0_is_misled(world)) as make:
        reducer = make(model, **options)
        while reducer.bucket_cap_mb is None:
            ways.append((reducer.buckets, reducer.overlap))
            model.zero_grad(set_to_none=len(ways) % 2 == 0)
            use = (3, 2, 1, 0)  # the layout that is known at first is the other way round
            with reducer.no_sync():
                model(own(world), use).backward()
            with recorded("all_reduce") as sent:
                model(own(world), use).backward()
            assert_grads(model, 2 * mean(world))
            sizes = [[getattr(model, n).numel() for n in names] for names in ways[-1][0]]
            assert sent[: len(sizes)] == [sum(each) for each in sizes]
        # Settled: the clock, for which a GPU is waited, is looked at no more.
        with patch.object(tuning, "clock", None):
            averaged(reducer, world)
            averaged(reducer, world)
    return ways, (reducer.bucket_cap_mb, reducer.overlap), reducer.buckets


KINDS = {
    "copy": {},
    "unused": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "ready order": {"ready_order": ["p0", "p1", "p2", "p3"]},
}
ORDERED = {
    SMALL: (("p0", "p1"), ("p2",), ("p3",)),  # 4 + 8, 12 and 16 bytes
    LARGE: (("p0", "p1", "p2"), ("p3",)),
    ALL: (("p0", "p1", "p2", "p3"),),
}
# Where no order is agreed on, the reverse of registration stays.
REVERSED = {
    SMALL: (("p3",), ("p2",), ("p1",), ("p0",)),
    LARGE: (("p3",), ("p2", "p1"), ("p0",)),
    ALL: (("p3", "p2", "p1", "p0"),),
}


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_choose_the_same_whatever_their_clocks_say(ranks, kind):
    (ways, chosen, buckets), other = ranks("gloo", 2)(searched, KINDS[kind])
    assert other == (ways, chosen, buckets)
    assert chosen == (LARGE, False)
    expected = REVERSED if kind == "unused" else ORDERED
    assert buckets == expected[LARGE]
    known = 1 if kind in ("unused", "ready order") else 2
    first = [(expected[SMALL], True), *[(expected[SMALL], True), (expected[SMALL], False)] * 2]
    assert ways[known : known + 5] == first
    assert len(ways) == known + tuning.ROUNDS * (5 + 5 + 3)
    # Only the first layout's turn may show it in the first round: each has one in every round.
    assert {way for way, _ in ways[known : known + 13]} == set(expected.values())


@on("gloo-2")
def test_a_model_of_one_bucket_settles_at_once(world):
    model = Terms(1, 2, 3, 4)
    reducer = Reducer(model, bucket_cap_mb="auto")
    for chosen in (None, (1.0, 25.0), (1.0, 25.0)):
        with recorded("all_reduce") as sent:
            model(own(world)).backward()
        assert (sent, reducer.bucket_cap_mb, reducer.overlap) == ([10], chosen, True)


@on("gloo-2")
def test_training_has_the_bits_of_one_cap(world):
    """Two ranks: a sum of two is the same in any bucket."""
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 1))
    theirs = copy.deepcopy(ours)
    settings = {"lr": 0.1, "momentum": 0.9}
    Reducer(theirs, bucket_cap_mb=LARGE)
    slow = torch.optim.SGD(theirs.parameters(), **settings, foreach=False)
    with clock_of(one_bucket_is_best) as make:
        wrapped = make(ours, kind=ddp.DistributedDataParallel, gradient_as_bucket_view=True)
        reducer = wrapped.reducer
        fast = ddp.SGD(ours.parameters(), **settings, reducer=reducer)
        after = 0
        while after < 3:
            after += reducer.bucket_cap_mb is not None
            x = torch.randn(4, 6)
            slow.zero_grad()
            theirs(x).square().mean().backward()
            slow.step()
            fast.zero_grad()
            fast.backward_and_step(wrapped(x).square().mean())
            torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    ddp.check_sync(ours, optimizers=[fast])
    assert reducer.bucket_cap_mb == ALL


@on("gloo-2")
def test_a_hook_that_may_remember_buckets_is_refused_until_they_stay(world):
    with clock_of(one_bucket_is_best) as make:
        reducer = make(Terms(1, 2, 3, 4))
        state = PowerSGDState(dist.group.WORLD)
        told = '(?s)(?=.*powerSGD_hook).*bucket_cap_mb="auto" has not settled'
        with pytest.raises(RuntimeError, match=told):
            reducer.register_comm_hook(state, powerSGD_hook)
        while reducer.bucket_cap_mb is None:
            averaged(reducer, world)
        reducer.register_comm_hook(state, powerSGD_hook)


@on("gloo-2")
def test_a_rank_without_data_goes_along(world):
    with clock_of(rank_0_is_misled(world)) as make:
        reducer = make(Terms(1, 2, 3, 4))
        with ddp.join(reducer):
            for _ in range(80 if world.rank == 1 else 10):
                reducer.module(own(world)).backward()
    assert (reducer.bucket_cap_mb, reducer.overlap) == (LARGE, False)
    assert reducer.buckets == REVERSED[LARGE]


def run(world, folder, resume):
    changes = {"backend": world.backend, "checkpoint_dir": folder, "model": "mlp", "batch_size": 16}
    settings = Settings(bucket_cap_mb="auto", epochs=2 if resume else 1, resume=resume, **changes)
    with clock_of(one_bucket_is_best) as make, patch.object(Report, "line") as line:
        trainer = make(kind=lambda **auto: Trainer(settings, world))
        began = trainer.reducer.bucket_cap_mb
        trainer.run()
    return began, trainer._state({})["buckets"], [call.args[0] for call in line.mock_calls]


def test_run_py_keeps_and_tells_what_it_chose(ranks, tmp_path):
    first, second = ranks("gloo", 2)(run, tmp_path, None)
    assert first[:2] == second[:2] == (None, {"bucket_cap_mb": ALL, "overlap": True})
    assert "bucket_cap_mb auto: inf MiB, sent during backward" in first[2]
    again, _ = ranks("gloo", 2)(run, tmp_path, "auto")
    assert again[:2] == (ALL, first[1])


def test_a_checkpoint_of_other_settings_does_not_decide():
    found, fresh = [{"bucket_cap_mb": cap, "overlap": cap == "auto"} for cap in (4.0, "auto")]
    settings = Settings(bucket_cap_mb="auto")
    state = {"world_size": 2, "settings": settings.as_saved(), "buckets": found}
    begin = buckets_to_begin_with
    assert begin(settings, state, 2) == found
    assert begin(settings, state, 3) == fresh
    assert begin(settings, state | {"buckets": None}, 2) == begin(settings, None, 2) == fresh
    assert begin(Settings(bucket_cap_mb="auto", batch_size=8), state, 2) == fresh
