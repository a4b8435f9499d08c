"""The rank that others wait for is named, with the phase of the step that it spends the time in."""

import contextlib
import gc
import io
import weakref
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_from_scratch as ddp
from ddp_from_scratch import Reducer
from ddp_from_scratch.options import power_sgd
from ddp_from_scratch.options.weight import GradientWeight
from ddp_from_scratch.watch import recorder
from ddp_from_scratch.watch.record import Event, EventMark
from ddp_from_scratch.watch.stragglers import PHASES, compare, phases
from tests.support.logged import logged
from tests.support.on_ranks import on
from tests.support.terms import BYTES
from tests.support.tiers import slow


def seconds(*ranks):
    """The same step of 46 ms three times, but for the times of some ranks' phases."""
    usual = {"data": 2, "forward": 12, "backward": 25, "optimizer": 3, "waiting": 4}
    times = [[[1e-3 * (usual | own)[p] for p in PHASES] for own in steps] for steps in ranks]
    return torch.tensor(times, dtype=torch.float64)


LATE = {"data": 52}
WAITS = {"waiting": 54}
GONE = dict.fromkeys(PHASES, 0) | {"waiting": 96}
# Descheduled once, and the last in two steps of three by little.
BY_CHANCE = [[{}, {}, LATE], [{"data": 2.1}, {"data": 2.1}, {}]]


@pytest.mark.parametrize(
    ("ranks", "late"),
    [
        *(([[{}] * 3, [{phase: 90}] * 3], (1, phase)) for phase in PHASES[:-1]),
        (BY_CHANCE, None),
        ([[{}] * 4, [LATE, {}, LATE, {}]], None),  # half of the steps is not often
        ([[{}] * 3, [{"forward": 15}] * 3], None),  # a small part of a step
        ([[{}] * 3, [{"forward": 18}] * 3], (1, "forward")),
        ([[LATE] * 3], None),  # one rank has no other
        # A rank that did not work is left out.
        ([[GONE] * 3, [WAITS] * 3, [LATE] * 3], (2, "data")),
        ([[{}, {}, GONE], [LATE] * 3], None),
        ([[GONE] * 3] * 2, None),
    ],
)
def test_who_is_late(ranks, late):
    found = compare(seconds(*ranks), len(ranks[0]))
    assert found.is_late == (late is not None)
    assert late is None or (found.rank, found.phase) == late


STEP = "FORWARD FORWARDED BACKWARD LAUNCH ALL_LAUNCHED AVERAGED"


@pytest.mark.parametrize(
    ("events", "found"),
    [
        (f"BEGIN STEP STEPPED {STEP}", "optimizer 0, data 2, forward 3, backward 5, waiting 7"),
        (f"BEGIN {STEP}", "data 0, forward 1, backward 3, waiting 5"),  # no optimizer
        (  # of two optimizers the last one ends the phase
            f"BEGIN STEP STEPPED STEP STEPPED {STEP}",
            "optimizer 0, data 4, forward 5, backward 7, waiting 9",
        ),
        (  # a pass under no_sync(), then one that averages
            f"BEGIN FORWARD FORWARDED BACKWARD OVER {STEP}",
            "data 0, forward 1, backward 3, data 4, forward 5, backward 7, waiting 9",
        ),
        # The module is never called as a whole.
        ("BEGIN LAUNCH ALL_LAUNCHED AVERAGED", "backward 0, waiting 2"),
        (
            "BEGIN FORWARD BACKWARD STEP BACKWARD WAIT WAITED ALL_LAUNCHED AVERAGED",
            "data 0, forward 1, backward 2, waiting 5, backward 6, waiting 7",
        ),
        ("BEGIN WAIT AVERAGED", "optimizer 0, waiting 1"),  # a rank without data
    ],
)
def test_phases_of_the_events_of_a_step(events, found):
    marks = [EventMark(Event[name], float(at)) for at, name in enumerate(events.split())]
    assert ", ".join(f"{phase} {mark:.0f}" for phase, mark in phases(marks)) == found


@contextlib.contextmanager
def clock_that_stands_still():
    clock = SimpleNamespace(now=0.0, take=lambda: clock.now, seconds=lambda mark: mark)
    with patch.object(recorder, "Clock", lambda device: clock):
        yield clock


class Slow(nn.Module):
    """A model whose phases take 10 ms, and more on request."""

    def __init__(self, clock, batch_norm=False):
        super().__init__()
        self.clock, self.more = clock, {}
        self.first = nn.Linear(2, 2)
        self.between = nn.BatchNorm1d(2) if batch_norm else nn.Identity()
        self.last = nn.Linear(2, 1)

    def spend(self, phase):
        self.clock.now += 0.01 + self.more.get(phase, 0.0)

    def forward(self, x):
        self.spend("forward")
        y = self.between(self.first(x))
        if y.requires_grad:
            y.register_hook(lambda gradient: self.spend("backward"))
        return self.last(y)


def reports(world, late, phase, how=(), accumulate=1, **options):
    """Four steps, a report for two of them; `late` brings 50 ms more in `phase`."""
    found, total = [], GradientWeight.total

    def wait(weight):  # ranks that come early wait in backward for the weights of all
        clock.now += 0.05 if world.rank != late else 0
        return total(weight)

    waits = patch.object(GradientWeight, "total", wait if "weigh" in how else total)
    with clock_that_stands_still() as clock, waits:
        model = Slow(clock, "batch norm" in how)
        model.more = {phase: 0.05} if world.rank == late else {}
        if "batch norm" in how:
            ddp.convert_sync_batchnorm(model)
        reducer = Reducer(model, bucket_cap_mb=BYTES, **options)
        if "hook" in how:
            reducer.register_comm_hook(power_sgd.PowerSGDState(start=2), power_sgd.power_sgd_hook)
        reducer.watch_stragglers(2, found.append)
        ours = {"reducer": reducer} if "at once" in how else {}
        sgd = (ddp.SGD if ours else torch.optim.SGD)(model.parameters(), 0.1, **ours)
        sgd.register_step_pre_hook(lambda *_: model.spend("optimizer"))
        for _ in range(5):
            for remaining in reversed(range(accumulate)):
                model.spend("data")
                if "weigh" in how:
                    reducer.weight(3)
                with reducer.no_sync() if remaining else contextlib.nullcontext():
                    loss = model(torch.ones(3, 2)).sum()
                    if "at once" in how:
                        sgd.backward_and_step(loss)
                    else:
                        loss.backward()
            if "at once" not in how:
                sgd.step()
            if "evaluate" in how:
                with torch.no_grad():
                    model(torch.ones(3, 2))
    return found


WORK = ["data", "forward", "backward", "optimizer"]
HOW = {
    "plain": ({}, WORK),
    "accumulated": ({"accumulate": 2}, WORK),
    "at the end": ({"overlap": False}, WORK),
    "a hook": ({"how": ["hook"]}, WORK),
    "unused": ({"find_unused_parameters": True}, WORK),
    "buffers": ({"sync_buffers": True}, WORK),
    "backward steps": ({"gradient_as_bucket_view": True, "how": ["at once"]}, WORK[:3]),
    "weights": ({"how": ["weigh"]}, WORK[:2]),
    "batch norm": ({"how": ["batch norm"]}, WORK[:1]),  # which leaves two phases to compare
    "evaluation": ({"how": ["evaluate"]}, WORK[:1]),
}


@pytest.mark.parametrize("how", HOW)
@on("gloo-2")
def test_a_slow_rank_is_named_with_its_phase(world, how):
    options, phases = HOW[how]
    for phase in phases:
        for late in (0, 1) if how == "plain" else (1,):
            first, second = reports(world, late, phase, **options)
            assert (first.first, first.last) == (2, 2)
            assert (second.first, second.last, second.rank, second.times) == (3, 4, late, 2)
            assert (second.phase, second.is_late) == (phase, True)
            if how in ("plain", "evaluation"):
                expected = [20.0 if how == "evaluation" else 10.0, 10.0, 10.0, 10.0]
                assert [second.others_ms[p] for p in WORK] == pytest.approx(expected)
    if how == "batch norm":  # which makes ranks wait in forward
        assert not reports(world, 1, "forward", ["batch norm"])[1].is_late


def uneven(world):
    found, late = [], world.world_size - 1
    with clock_that_stands_still() as clock:
        model = Slow(clock)
        reducer = Reducer(model)
        reducer.watch_stragglers(2, found.append)
        finish = reducer.core.finish

        def finish_late(takes_part=True):
            clock.now += 0.0 if takes_part else 1.0
            return finish(takes_part)

        reducer.core.finish = finish_late
        with ddp.join(reducer):
            for _ in range(4 if world.rank else 2):
                clock.now += 0.05 if world.rank == late else 0
                model(torch.ones(3, 2)).sum().backward()
    return [(r.rank, r.is_late, r.world_size) for r in found]


def test_a_rank_without_data_is_left_out(ranks):
    for size in (2, 3):
        for first, second in ranks("gloo", size)(uneven):
            assert first == (size - 1, True, size)
            assert second == (size - 1, size > 2, size - 1)


def printed(world):
    """Rank 0 of a group prints, and no other; neither it nor the optimizer keeps the Reducer."""
    group = dist.new_group([0, 2])
    if world.rank == 1:
        return None
    with contextlib.redirect_stderr(io.StringIO()) as out:
        model = nn.Linear(2, 1)
        reducer = Reducer(model, group, straggler_every=2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(4):
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()
    gone = weakref.ref(reducer)
    reducer.remove()
    del reducer
    gc.collect()
    assert gone() is None
    return [line.split(":")[0] for line in out.getvalue().splitlines()]


@on("gloo-2")
def test_a_late_rank_is_a_warning_in_the_log_and_others_are_not(world):
    with logged() as found, clock_that_stands_still() as clock:
        model = Slow(clock)
        reducer = Reducer(model, straggler_every=3)
        for step in range(6):
            clock.now += 0.05 if world.rank and step > 2 else 0
            model(torch.ones(3, 2)).sum().backward()
        reducer.remove()
    levels = [(level, text.partition(",")[0]) for level, text in found]
    expected = [
        ("INFO", "steps 2-3: no rank is late; a step takes 20.0 ms: data 0.0"),
        ("WARNING", "steps 4-6: rank 1 came last in 3 of 3"),
    ]
    assert levels == (expected if world.rank == 0 else [])


@pytest.mark.parametrize("backend", ["gloo", slow("mpi")])
def test_the_first_rank_prints_a_line_for_each_report(ranks, backend):
    assert ranks(backend, 3)(printed) == [["steps 2-2", "steps 3-4"], None, []]
