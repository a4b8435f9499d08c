"""The rank that others wait for is named, with the phase of the step that it spends the time in."""

import contextlib
import gc
import io
import re
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_from_scratch as ddp
from ddp_from_scratch import Reducer
from ddp_from_scratch.checks import straggler_watch
from ddp_from_scratch.checks.straggler_report import PHASES, compare
from ddp_from_scratch.comm_hooks import power_sgd
from ddp_from_scratch.sync.gradient_weight import GradientWeight
from tests.support.terms import BYTES
from tests.support.tiers import slow

# Arithmetic -------------------------------------------------------------------------------------


def seconds(*ranks):
    """The same step of 46 ms three times, but for the times of some ranks' phases."""
    usual = {"data": 2, "forward": 12, "backward": 25, "optimizer": 3, "waiting": 4}
    return torch.tensor(
        [[[1e-3 * (usual | own)[p] for p in PHASES] for own in steps] for steps in ranks],
        dtype=torch.float64,
    )


LATE = {"data": 52}
WAITS = {"waiting": 54}


def test_a_late_rank_is_named():
    found = compare(seconds([WAITS] * 3, [LATE] * 3, [WAITS] * 3), 103)
    assert (found.first, found.last, found.steps) == (101, 103, 3)
    assert (found.rank, found.times, found.phase, found.is_late) == (1, 3, "data", True)
    assert found.late_ms == pytest.approx(50)
    assert found.exposed_ms == pytest.approx(4)
    assert str(found) == (
        "steps 101-103: rank 1 came last in 3 of 3, 50.0 ms after the others, in data (52.0 ms, "
        "the others 2.0); a step takes 96.0 ms"
    )


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer"])
def test_the_phase_is_named(phase):
    found = compare(seconds([{}] * 3, [{phase: 90}] * 3), 3)
    assert (found.is_late, found.rank, found.phase) == (True, 1, phase)


def test_no_rank_is_named_by_chance():
    # Descheduled once, and the last in two steps of three by little.
    found = compare(seconds([{}, {}, LATE], [{"data": 2.1}, {"data": 2.1}, {}]), 3)
    assert (found.rank, found.times, found.is_late) == (1, 2, False)
    assert str(found) == (
        "steps 1-3: no rank is late; a step takes 46.0 ms: data 2.0, forward 12.0, backward 25.0, "
        "optimizer 3.0, waiting 4.0"
    )


def test_late_in_half_of_the_steps_is_not_often():
    assert not compare(seconds([{}] * 4, [LATE, {}, LATE, {}]), 4).is_late


def test_a_small_part_of_a_step_is_not_late():
    assert not compare(seconds([{}] * 3, [{"forward": 15}] * 3), 3).is_late
    assert compare(seconds([{}] * 3, [{"forward": 18}] * 3), 3).is_late


def test_only_some_phases_are_compared():
    # Rank 0 is late in data, and so the other waits for it inside its forward pass.
    steps = seconds([LATE] * 3, [{"forward": 62}] * 3)
    assert not compare(steps, 3).is_late
    found = compare(steps, 3, ("data", "optimizer"))
    assert (found.is_late, found.rank, found.phase) == (True, 0, "data")


def test_one_rank_has_no_other():
    found = compare(seconds([LATE] * 3), 3)
    assert not found.is_late
    assert str(found).startswith("steps 1-3: a step takes 96.0 ms: data 52.0")


def test_a_rank_that_did_not_work_is_left_out():
    gone = dict.fromkeys(PHASES, 0) | {"waiting": 96}
    found = compare(seconds([gone] * 3, [WAITS] * 3, [LATE] * 3), 3)
    assert (found.is_late, found.rank, found.phase, found.world_size) == (True, 2, "data", 2)
    assert found.late_ms == pytest.approx(50)
    assert not compare(seconds([{}, {}, gone], [LATE] * 3), 3).is_late
    assert not compare(seconds([gone] * 3, [gone] * 3), 3).is_late


# On ranks, with a clock that stands still but for what a test adds --------------------------------


class Clock:
    def __init__(self):
        self.now = 0.0

    def take(self):
        return self.now

    def seconds(self, mark):
        return mark


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


class Several:
    """An optimizer for each layer. The last one takes the time."""

    def __init__(self, model):
        layers = model.first, model.last
        self.optimizers = [torch.optim.SGD(layer.parameters(), 0.1) for layer in layers]

    def register_step_pre_hook(self, hook):
        self.optimizers[-1].register_step_pre_hook(hook)

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()


def reports(world, late, phase, options):
    """Four steps, a report for two of them; `late` brings 50 ms more in `phase`."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(straggler_watch, "marks_for", lambda device: clock)
        return _train(world, clock, {phase: 0.05} if world.rank == late else {}, **options)


def _train(
    world,
    clock,
    more,
    *,
    accumulate=1,
    batch_norm=False,
    hook=False,
    evaluate=False,
    weigh=False,
    optimizer="torch",
    **options,
):
    model = Slow(clock, batch_norm)
    model.more = more
    if batch_norm:
        ddp.convert_sync_batchnorm(model)
    ddp.broadcast_parameters(model)
    reducer = Reducer(model, bucket_cap_mb=BYTES, **options)
    if hook:
        reducer.register_comm_hook(power_sgd.PowerSGDState(start=2), power_sgd.power_sgd_hook)
    found = []
    reducer.watch_stragglers(2, found.append)
    if optimizer == "torch":
        sgd = torch.optim.SGD(model.parameters(), 0.1)
    elif optimizer == "several":
        sgd = Several(model)
    else:
        sgd = ddp.SGD(model.parameters(), 0.1, reducer=reducer)
    sgd.register_step_pre_hook(lambda *_: model.spend("optimizer"))
    for _ in range(5):
        for remaining in reversed(range(accumulate)):
            model.spend("data")
            if weigh:
                reducer.weight(3)
            with reducer.no_sync() if remaining else contextlib.nullcontext():
                loss = model(torch.ones(3, 2)).sum()
                if optimizer == "at once":
                    sgd.backward_and_step(loss)
                else:
                    loss.backward()
        if optimizer != "at once":
            sgd.step()
        if evaluate:
            with torch.no_grad():
                model(torch.ones(3, 2))
    return [(r.first, r.last, r.rank, r.times, r.phase, r.is_late, r.others_ms) for r in found]


WORK = ["data", "forward", "backward", "optimizer"]


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("phase", WORK)
def test_a_slow_rank_is_named_with_its_phase(crew, late, phase):
    for found in crew(reports, late, phase, {}):
        first, second = found
        assert first[:2] == (2, 2)
        assert second[:6] == (3, 4, late, 2, phase, True)
        assert [second[6][p] for p in WORK] == pytest.approx([10.0] * 4)


@pytest.mark.parametrize("phase", WORK)
@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 3},
        {"overlap": False},
        {"hook": True},
        {"find_unused_parameters": True},
        {"broadcast_buffers": True},
        {"optimizer": "several"},
        {"gradient_as_bucket_view": True, "optimizer": "ours"},
    ],
    ids=str,
)
def test_a_slow_rank_is_named_with_every_option(crew, options, phase):
    for found in crew(reports, 1, phase, options):
        assert found[1][:6] == (3, 4, 1, 2, phase, True)


@pytest.mark.parametrize("phase", ["data", "forward", "backward"])
def test_a_slow_rank_is_named_where_backward_steps(crew, phase):
    options = {"gradient_as_bucket_view": True, "optimizer": "at once"}
    for found in crew(reports, 1, phase, options):
        assert found[1][:6] == (3, 4, 1, 2, phase, True)


def weighed(world, late, phase):
    """Ranks that come early wait in backward for the weights of all."""
    clock, total = Clock(), GradientWeight.total

    def wait(weight):
        clock.now += 0.05 if world.rank != late else 0
        return total(weight)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(straggler_watch, "marks_for", lambda device: clock)
        patch.setattr(GradientWeight, "total", wait)
        return _train(world, clock, {phase: 0.05} if world.rank == late else {}, weigh=True)


@pytest.mark.parametrize("phase", ["data", "forward"])
def test_a_slow_rank_is_named_where_ranks_have_weights(crew, phase):
    for found in crew(weighed, 1, phase):
        assert found[1][:6] == (3, 4, 1, 2, phase, True)


def test_an_evaluation_between_steps_is_data(crew):
    for found in crew(reports, 1, "data", {"evaluate": True}):
        assert found[1][:6] == (3, 4, 1, 2, "data", True)
        assert found[1][6]["data"] == pytest.approx(20)


@pytest.mark.parametrize(("phase", "named"), [("data", True), ("forward", False)])
def test_synchronised_batch_norm_leaves_two_phases_to_compare(crew, phase, named):
    for found in crew(reports, 1, phase, {"batch_norm": True}):
        assert found[1][5] is named


def uneven(world):
    """Rank 0 has no data after the second step; the last rank is late."""
    clock, late = Clock(), world.world_size - 1
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(straggler_watch, "marks_for", lambda device: clock)
        model = Slow(clock)
        ddp.broadcast_parameters(model)
        reducer = Reducer(model)
        reducer.watch_stragglers(2, found.append)
        wait = reducer.contribute_nothing

        def waited(weight):
            clock.now += 1.0
            wait(weight)

        patch.setattr(reducer, "contribute_nothing", waited)
        with ddp.join(reducer):
            for _ in range(4 if world.rank else 2):
                clock.now += 0.05 if world.rank == late else 0
                model(torch.ones(3, 2)).sum().backward()
    return [(r.rank, r.is_late, r.world_size) for r in found]


def test_a_rank_without_data_is_left_out(crew):
    for first, second in (*crew(uneven),):
        size = first[2]
        assert first == (size - 1, True, size)
        assert second == (size - 1, size > 2, size - 1)


def printed(world):
    """Rank 0 prints, and no other; nothing outlives the Reducer."""
    with contextlib.redirect_stderr(io.StringIO()) as out:
        model = nn.Linear(2, 1)
        ddp.broadcast_parameters(model)
        reducer = Reducer(model, straggler_every=2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(4):
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()
    gone = weakref.ref(reducer)
    del reducer, model, optimizer
    gc.collect()
    assert gone() is None
    return out.getvalue().splitlines()


def test_rank_0_prints_a_line_for_each_report(crew):
    of_rank_0, *others = crew(printed)
    assert [line.split(":")[0] for line in of_rank_0] == ["steps 2-2", "steps 3-4"]
    assert others == [[]] * len(others)


def raised(world):
    """What `tell` raises comes out of backward, and later steps have their times."""
    found = []

    def tell(report):
        found.append(report.step_ms)
        if len(found) == 1 and world.rank == 0:
            raise ValueError("on purpose")

    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(straggler_watch, "marks_for", lambda device: clock)
        model = nn.Linear(2, 1)
        reducer = Reducer(model)
        reducer.watch_stragglers(2, tell)
        for step in range(6):
            clock.now += 0.05
            expected = step == 1 and world.rank == 0
            with (
                pytest.raises(ValueError, match="on purpose")
                if expected
                else contextlib.nullcontext()
            ):
                model(torch.ones(3, 2)).sum().backward()
    assert found == pytest.approx([50] * 3)


def test_a_callback_may_raise(crew):
    crew(raised)


def outlived(world):
    """An optimizer that outlives its Reducers keeps nothing of them."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        reducer = Reducer(model, straggler_every=100)
        gone = weakref.ref(reducer.flat_buckets[0])
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
        reducer.remove()
        del reducer
        gc.collect()
        assert gone() is None
    assert not optimizer._optimizer_step_post_hooks


def test_an_optimizer_may_outlive_the_reducer(crew):
    crew(outlived)


def in_a_group(world):
    """The ranks of a part are compared among themselves."""
    group = dist.new_group([0, 2])
    if world.rank == 1:
        return None
    with contextlib.redirect_stderr(io.StringIO()) as out:
        model = nn.Linear(2, 1)
        Reducer(model, group, straggler_every=1)
        for _ in range(2):
            model(torch.ones(3, 2)).sum().backward()
    return out.getvalue().count("steps 2-2: ")


@pytest.mark.parametrize("backend", ["gloo", slow("mpi")])
def test_a_part_of_the_ranks(ranks, backend):
    assert ranks(backend, 3)(in_a_group) == [1, None, 0]


def test_every_must_be_a_number_of_steps(crew):
    crew(refused)


def refused(world):
    for every in (0, 2.5, float("nan"), "x"):
        text = f"straggler_every must be a number of averages, got {every!r}"
        with pytest.raises(ValueError, match=re.escape(text)):
            Reducer(nn.Linear(1, 1), straggler_every=every)
