"""Timelines of programs that do more than forward, backward and step."""

import gc
import io
import weakref
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_from_scratch as ddp
from ddp_from_scratch.buckets.gradient_bucket import BucketState
from ddp_from_scratch.buckets.observer import Observer
from ddp_from_scratch.errors import PeerError
from ddp_from_scratch.profiling import timeline as module
from ddp_from_scratch.profiling.timeline import Timeline
from ddp_from_scratch.reducer import bucket_tuning
from tests.profiling.records import record


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.raises = False

    def forward(self, x):
        if self.raises:
            raise ZeroDivisionError
        return self.linear(x), self.linear.weight


def step_of(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 3))[0].sum().backward()
    optimizer.step()


def made(bucket_cap_mb=None):
    model = Net()
    reducer = ddp.Reducer(model, bucket_cap_mb=bucket_cap_mb)
    return model, reducer, torch.optim.SGD(model.parameters(), 0.1)


def after_a_forward_pass_that_raised(world):
    model, reducer, optimizer = made()
    timeline = Timeline(reducer, None, steps=1, skip=0)
    model.raises = True
    with suppress(ZeroDivisionError):
        model(torch.ones(2, 3))
    model.raises = False
    step_of(model, optimizer)
    timeline.close()
    for rank in timeline.record.steps[0].ranks:
        (forward,), (backward,) = rank.forward, rank.backward
        # From the output on, and not from the first gradient.
        assert forward[1] <= backward[0] < rank.arrived[0][1]


def test_a_forward_pass_that_raised_is_left_out(ranks):
    ranks("gloo", 2)(after_a_forward_pass_that_raised)


def parameter_among_outputs(world):
    model, reducer, optimizer = made()
    timeline = Timeline(reducer, None, steps=2, skip=0)
    for _ in range(2):
        step_of(model, optimizer)
    timeline.close()
    assert not model.linear.weight._backward_hooks


def test_no_hook_stays_on_a_parameter_among_the_outputs(ranks):
    ranks("gloo", 2)(parameter_among_outputs)


def frozen_between_steps(world, folder):
    model, reducer, optimizer = made()
    model.requires_grad_(False)
    with ddp.timeline(reducer, folder, steps=2, skip=0) as timeline:
        for _ in range(2):
            model.requires_grad_(True)
            step_of(model, optimizer)
            model.requires_grad_(False)
    assert timeline.record.nbytes == {"linear.weight": 12, "linear.bias": 4}
    for step in timeline.record.steps:
        assert all(rank.backward and rank.optimizer for rank in step.ranks)


def test_a_critic_that_is_frozen_between_its_steps(ranks, tmp_path):
    ranks("gloo", 2)(frozen_between_steps, tmp_path)


def out_of_data(world):
    model, reducer, optimizer = made(bucket_cap_mb=0)
    timeline = Timeline(reducer, None, steps=2, skip=1)
    with ddp.join(reducer):
        for _ in range(1 + 2 * world.rank):
            step_of(model, optimizer)
    timeline.close()
    assert [step.iteration for step in timeline.record.steps] == [1, 2]
    for step in timeline.record.steps:
        first, second = step.ranks
        assert (first.forward, first.backward, first.arrived) == ((), (), ())
        assert second.forward
        for rank in step.ranks:
            assert rank.begin == min([*rank.forward, *(b.pack for b in rank.buckets)])[0] >= 0


def test_a_rank_without_data_has_buckets_alone(ranks):
    ranks("gloo", 2)(out_of_data)


def ends_all(world, folder):
    model, reducer, optimizer = made()
    timeline = Timeline(reducer, folder, steps=1, skip=0)
    step_of(model, optimizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.page, "as_html", lambda record: record["not a record"])
        with pytest.raises(ddp.UsageError if world.rank == 0 else PeerError) as error:
            timeline.close()
    if world.rank == 0:
        assert isinstance(error.value.__cause__, TypeError)
    dist.barrier()


def test_any_error_of_the_writing_rank_ends_all(ranks, tmp_path):
    ranks("gloo", 2)(ends_all, tmp_path)


def unread(world, refusing):
    model, reducer, optimizer = made()
    timeline = Timeline(reducer, None, steps=1, skip=0)
    step_of(model, optimizer)
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == refusing:
            patch.setattr(module, "rank_times", lambda *_: {}["no such time"])
        expected = RuntimeError if world.rank == refusing else PeerError
        text = f"rank {refusing} cannot read its part of the timeline: 'no such time'"
        with pytest.raises(expected, match=text) as error:
            timeline.close()
    assert timeline.record is None
    assert (type(error.value.__cause__) is KeyError) == (world.rank == refusing)
    # The others are at the same place: they have not waited for this rank in vain.
    dist.barrier()


@pytest.mark.parametrize("refusing", [0, 1])
def test_a_rank_that_cannot_read_its_times_ends_all(ranks, refusing):
    ranks("gloo", 2)(unread, refusing)


def after_the_trials(world):
    model = Net()
    # Two layouts: each parameter alone, and both in one bucket.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket_tuning, "CAPS", (1e-6, 1.0))
        reducer = ddp.Reducer(model, bucket_cap_mb="auto")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        timeline = Timeline(reducer, None, steps=2, skip=1)
        trials = 0
        while reducer.bucket_cap_mb is None:
            step_of(model, optimizer)
            trials += 1
        assert trials > 3
        for _ in range(4):
            assert timeline.record is None
            step_of(model, optimizer)
    assert [step.iteration for step in timeline.record.steps] == [trials + 1, trials + 2]
    assert {step.layout for step in timeline.record.steps} == {reducer.buckets}


def test_trials_of_auto_are_not_recorded(ranks):
    ranks("gloo", 2)(after_the_trials)


def dropped(world):
    """The model goes with a timeline that still records."""
    model, reducer, optimizer = made()
    Timeline(reducer, None, steps=100, skip=0)
    for _ in range(2):
        step_of(model, optimizer)
    gone = weakref.ref(model)
    del model, reducer, optimizer
    gc.collect()
    assert gone() is None


def test_a_timeline_keeps_no_model_alive(ranks):
    ranks("gloo", 1)(dropped)


class States(Observer):
    def __init__(self):
        self.found = []

    def on_wait(self, bucket):
        self.found.append(bucket.state)

    def on_waited(self, bucket):
        self.found.append(bucket.state)


def whole_waits(world):
    model, reducer, optimizer = made()
    timelines = [Timeline(reducer, None, steps=1, skip=0) for _ in range(2)]
    with torch.autograd.profiler.profile():
        model(torch.ones(2, 3))  # which shows the profiler the buckets
        states = States()
        reducer.add_observer(states)
        step_of(model, optimizer)
    assert states.found == [BucketState.LAUNCHED, BucketState.LANDED]
    for timeline in timelines:
        timeline.close()
        assert len(timeline.record.steps) == 1


def test_every_timeline_and_the_profiler_see_the_whole_wait(ranks):
    ranks("gloo", 2)(whole_waits)


def test_files_are_utf_8_whatever_the_locale(tmp_path, monkeypatch):
    monkeypatch.setattr(io, "text_encoding", lambda encoding, _=2: encoding or "ascii")
    module.write(replace(record(), title="Сеть"), tmp_path)
    assert (tmp_path / "timeline.txt").read_text(encoding="utf-8").startswith("Сеть\n")
