"""Timelines of real ranks, also of programs that do more than forward, backward and step."""

import itertools
import os
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_from_scratch as ddp
from ddp_from_scratch.common.errors import PeerError
from ddp_from_scratch.watch.timeline import Timeline, clock_offsets
from tests.support.on_ranks import on
from tests.support.terms import Terms, own
from tests.support.tiers import slow


class Net(nn.Module):
    raises = False

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x):
        if self.raises:
            raise ZeroDivisionError
        # A parameter among the outputs.
        return self.second(torch.relu(self.first(x))), self.first.weight


def made(kind=torch.optim.SGD, **options):
    model = Net()
    reducer = ddp.Reducer(model, **options)
    own = {"reducer": reducer} if kind is ddp.SGD else {}
    optimizer = kind(model.parameters(), 0.1, momentum=0.9, **own)

    def step(count=1, at_once=False):
        for _ in range(count):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3))[0].sum()
            if at_once:
                optimizer.backward_and_step(loss)
            else:
                loss.backward()
                optimizer.step()

    return model, reducer, step


def in_order(*moments):
    return all(a <= b for a, b in itertools.pairwise(moments))


def closed(timeline):
    timeline.close()
    return timeline.record.steps


@pytest.mark.parametrize("at_once", [False, slow(True)])
@on("gloo_pair")
def test_every_event_of_every_step_is_recorded_in_its_order(world, tmp_path, at_once):
    folder = tmp_path / "made" / "there"
    model, reducer, step = made(ddp.SGD, bucket_cap_mb=0)
    before = len(model._forward_hooks)
    with ddp.timeline(reducer, folder, steps=2, skip=1) as timeline:
        for _ in range(5):
            step(1, at_once)
            with torch.no_grad():
                model(torch.ones(1, 3))  # an evaluation is no step
        # Written as soon as it is complete.
        assert timeline.record is not None
    assert len(model._forward_hooks) == before
    assert not model.first.weight._backward_hooks
    assert [step.iteration for step in timeline.record.steps] == [1, 2]
    for step in timeline.record.steps:
        assert step.layout == reducer.buckets
        assert [rank.rank for rank in step.ranks] == list(range(world.world_size))
        for rank in step.ranks:
            assert {name for name, _ in rank.arrived} == {n for n, _ in model.named_parameters()}
            (forward,), (backward,) = rank.forward, rank.backward
            assert in_order(rank.begin, *forward, *backward, *rank.optimizer, rank.end)
            arrived = dict(rank.arrived)
            for index, bucket in enumerate(rank.buckets):
                assert bucket.index == index
                assert in_order(backward[0], arrived[step.layout[index][0]], *bucket.pack)
                assert in_order(bucket.sent[0], bucket.met, bucket.sent[1])
                assert in_order(bucket.sent[0], *bucket.wait, *bucket.unpack, rank.optimizer[1])
    assert timeline.record.nbytes["first.weight"] == 48
    assert timeline.record.clock_error == 0
    dist.barrier()
    assert (folder / "timeline.txt").read_text().startswith("Net, ")
    assert (folder / "timeline.html").exists()


@on("gloo_pair")
def test_a_bucket_that_lands_during_backward(world):
    """The second gradient is computed once the first bucket has landed, behind backward."""
    model = Terms(2, 2)
    timeline = Timeline(ddp.Reducer(model, bucket_cap_mb=0), None, steps=1, skip=0)

    def until_landed(gradient):
        while timeline._steps[-1].buckets[0].landed is None:
            os.sched_yield()

    handle = model.p0.register_hook(until_landed)
    model(own(world)).backward()
    handle.remove()
    model(own(world)).backward()
    for rank in closed(timeline)[0].ranks:
        first, second = rank.buckets
        assert first.sent[1] < second.pack[0] <= first.wait[0]


@on("gloo_pair")
def test_offsets_of_clocks_are_within_their_errors(world):
    # As if each rank were a machine of its own, all with one clock: the true offset is 0.
    hosts = [str(rank) for rank in range(world.world_size)]
    found = clock_offsets(hosts, dist.group.WORLD)
    everyone = [None] * world.world_size
    dist.all_gather_object(everyone, found)
    assert everyone == [found] * world.world_size
    assert found[0] == (0, 0)
    for offset, error in found[1:]:
        assert error > 0
        assert abs(offset) <= error


@on("gloo-2")
def test_passes_that_accumulate_and_one_that_raised(world):
    """They are one step, and what raised is left out."""
    model, reducer, step = made()
    timeline = Timeline(reducer, None, steps=1, skip=0)
    model.raises = True
    with suppress(ZeroDivisionError):
        model(torch.ones(2, 3))
    model.raises = False
    for _ in range(2):
        with reducer.no_sync():
            model(torch.ones(2, 3))[0].sum().backward()
        step()
    for rank in closed(timeline)[0].ranks:
        assert len(rank.forward) == len(rank.backward) == 2
        assert in_order(*rank.forward[0], *rank.backward[0], *rank.forward[1], *rank.backward[1])
        # From the output on, and not from the first gradient.
        assert rank.backward[0][0] < rank.arrived[0][1]


@on("gloo-2")
def test_a_rank_without_data(world):
    _, reducer, step = made(bucket_cap_mb=0)
    timeline = Timeline(reducer, None, steps=2, skip=1)
    with ddp.join(reducer):
        step(1 + 2 * world.rank)
    assert [recorded.iteration for recorded in closed(timeline)] == [1, 2]
    for recorded in timeline.record.steps:
        first, second = recorded.ranks
        assert (first.forward, first.backward, first.arrived) == ((), (), ())
        assert second.forward
        for rank in recorded.ranks:
            assert rank.begin == min([*rank.forward, *(b.pack for b in rank.buckets)])[0] >= 0


@on("gloo-2")
def test_a_program_may_close_it_before_the_context_ends(world, tmp_path):
    _, reducer, step = made()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the program sees for itself that there is no record
        with ddp.timeline(reducer, tmp_path / "early", skip=0) as timeline:
            with pytest.raises(RuntimeError, match=r"no record yet: close\(\) completes it"):
                timeline.as_text()
            timeline.close()
    assert timeline.record is None
    with ddp.timeline(reducer, tmp_path / "shown", steps=1, skip=0) as timeline:
        step(2)
        timeline.close()
        assert "\033[" in timeline.as_text(colour=True)
    if world.rank == 0:
        assert timeline.as_text() + "\n" == (tmp_path / "shown/timeline.txt").read_text()


@on("gloo-2")
def test_an_error_in_writing_ends_all(world, tmp_path):
    """Before the first step, and at the end; where the program itself fails nothing is written."""
    _, reducer, step = made()
    with suppress(ZeroDivisionError), ddp.timeline(reducer, tmp_path / "none", skip=0):
        step(2)
        raise ZeroDivisionError
    expected = ddp.UsageError if world.rank == 0 else PeerError
    with pytest.raises(expected, match="cannot write the timeline to /proc"):  # not even root's
        Timeline(reducer, Path("/proc"))
    timeline = Timeline(reducer, tmp_path / "gone", steps=1, skip=0)
    step()
    if world.rank == 0:
        assert list((tmp_path / "none").iterdir()) == []
        timeline.folder.rmdir()
    with pytest.raises(expected, match="cannot write the timeline"):
        timeline.close()
