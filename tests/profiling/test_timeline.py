"""Timelines of real ranks."""

import itertools
import json
import math
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_from_scratch as ddp
from ddp_from_scratch.errors import PeerError
from ddp_from_scratch.marks import CudaMarks, marks_for
from ddp_from_scratch.profiling import clocks
from ddp_from_scratch.profiling import timeline as module
from ddp_from_scratch.profiling.timeline import Timeline
from tests.support.terms import BYTES, Terms, own
from tests.support.tiers import slow

FILES = {"timeline.txt", "timeline.html", "trace.json"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()


def in_order(*moments):
    return all(a <= b for a, b in itertools.pairwise(moments))


def recorded_steps(world, folder, at_once):
    """Every event of every step is there, and in its order."""
    model = Net()
    ddp.broadcast_parameters(model)
    reducer = ddp.Reducer(model, bucket_cap_mb=0, gradient_as_bucket_view=True)
    optimizer = ddp.SGD(model.parameters(), 0.1, momentum=0.9, reducer=reducer)
    before = len(model._forward_hooks)
    with ddp.timeline(reducer, folder, steps=2, skip=1) as timeline:
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).sum()
            if at_once:
                optimizer.backward_and_step(loss)
            else:
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                model(torch.ones(1, 3))  # an evaluation is no step
        # Written as soon as it is complete.
        assert timeline.record is not None
    assert len(model._forward_hooks) == before
    record = timeline.record
    assert [step.iteration for step in record.steps] == [1, 2]
    for step in record.steps:
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
    assert record.nbytes["first.weight"] == 48
    assert record.clock_error == 0
    dist.barrier()
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("at_once", [False, slow(True)])
def test_every_event_of_every_step_is_recorded(crew, tmp_path, at_once):
    folder = tmp_path / "made" / "there"
    for found in crew(recorded_steps, folder, at_once):
        assert set(found) >= FILES
    data = json.loads((folder / "trace.json").read_text())
    assert {event["args"].get("step", 1) for event in data["traceEvents"]} == {1, 2}
    assert (folder / "timeline.txt").read_text().startswith("Net, ")


def late_rank(world, folder):
    """Rank 1 begins when all others have launched their bucket."""
    model = Terms(2)
    reducer = ddp.Reducer(model, bucket_cap_mb=math.inf)
    timeline = Timeline(reducer, None, steps=2, skip=0)
    for step in range(3):
        launched = [folder / f"{step} {r}" for r in range(world.world_size) if r != 1]
        if world.rank == 1:
            end = time.monotonic() + 20
            while not all(file.exists() for file in launched) and time.monotonic() < end:
                time.sleep(0.01)
        own_file = folder / f"{step} {world.rank}"
        # Behind the Reducer's own hook, which launches.
        handle = model.p0.register_post_accumulate_grad_hook(lambda _, file=own_file: file.touch())
        model(own(world)).backward()
        handle.remove()
    timeline.close()
    return timeline.record


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_a_late_rank_is_named_and_its_peers_wait(ranks, backend, tmp_path):
    for record in ranks(backend, 3)(late_rank, tmp_path):
        for step in record.steps:
            for rank in step.ranks:
                (bucket,) = rank.buckets
                assert bucket.last == 1
                if rank.rank != 1:
                    assert bucket.sent[0] < bucket.met


def accumulated(world):
    model = Net()
    reducer = ddp.Reducer(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    timeline = Timeline(reducer, None, steps=1, skip=0)
    for _ in range(2):
        with reducer.no_sync():
            model(torch.ones(2, 3)).sum().backward()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    timeline.close()
    (step,) = timeline.record.steps
    for rank in step.ranks:
        assert len(rank.forward) == len(rank.backward) == 2
        assert in_order(*rank.forward[0], *rank.backward[0], *rank.forward[1], *rank.backward[1])


def test_passes_that_accumulate_are_one_step(ranks):
    ranks("gloo", 2)(accumulated)


def refused(world, folder):
    model = Net()
    reducer = ddp.Reducer(model)
    expected = ddp.UsageError if world.rank == 0 else PeerError
    # The second is there, and takes no file: not even root's.
    for refusing in (folder, Path("/proc")):
        with pytest.raises(expected, match=f"cannot write the timeline to {refusing}"):
            Timeline(reducer, refusing)
    with pytest.raises(ddp.UsageError, match="got 0"):
        Timeline(reducer, folder, steps=0)
    # What comes up later: the disk is full, or the folder gone.
    timeline = Timeline(reducer, folder.parent / "gone", steps=1, skip=0)
    train(model, torch.optim.SGD(model.parameters(), 0.1), 1)
    if world.rank == 0:
        timeline.folder.rmdir()
    with pytest.raises(expected, match="cannot write the timeline"):
        timeline.close()


def test_a_folder_that_cannot_be_written_ends_all_ranks(ranks, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    ranks("gloo", 2)(refused, file)


def raised(world, folder):
    model = Net()
    reducer = ddp.Reducer(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def steps_and_fails():
        with ddp.timeline(reducer, folder, skip=0):
            train(model, optimizer, 2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        steps_and_fails()
    train(model, optimizer, 9)
    dist.barrier()
    assert list(folder.iterdir()) == []


def test_nothing_is_written_where_the_program_raises(ranks, tmp_path):
    ranks("gloo", 2)(raised, tmp_path)


def short(world):
    model = Net()
    timeline = Timeline(ddp.Reducer(model), None)
    train(model, torch.optim.SGD(model.parameters(), 0.1), 2)
    timeline.close()
    assert timeline.record is None


def test_too_few_steps_are_no_record(ranks):
    ranks("gloo", 2)(short)


def same_bits(world):
    """A timeline changes no bit, and the buckets' order of launch stays."""
    found = []
    for recorded in (False, True):
        torch.manual_seed(world.rank)
        model = Net()
        ddp.broadcast_parameters(model)
        reducer = ddp.Reducer(model, bucket_cap_mb=20 * BYTES, find_unused_parameters=True)
        timeline = Timeline(reducer, None, steps=3, skip=0) if recorded else None
        train(model, torch.optim.SGD(model.parameters(), 0.1), 3)
        if timeline is not None:
            timeline.close()
        found.append(([p.detach().clone() for p in model.parameters()], reducer.buckets))
    assert all(map(torch.equal, found[0][0], found[1][0]))
    assert found[0][1] == found[1][1]


def test_a_timeline_changes_no_bit(pair):
    pair(same_bits)


def offsets(world):
    # As if each rank were a machine of its own, all with one clock: the true offset is 0.
    hosts = [str(rank) for rank in range(world.world_size)]
    return clocks.measure(hosts, dist.group.WORLD)


def test_the_offset_of_a_clock_is_within_its_error(pair):
    first, *others = pair(offsets)
    assert all(found == first for found in others)
    assert first[0] == (0, 0)
    for offset, error in first[1:]:
        assert error > 0
        assert abs(offset) <= error


def beside(world):
    """As on nccl: what ranks exchange goes through a gloo group that torch does not list."""
    with patch.object(module, "takes_cpu_tensors", lambda group: False):
        model = Net()
        timeline = Timeline(ddp.Reducer(model), None, steps=1, skip=0)
        assert clocks.measure(["a", "b"], timeline._group)[0] == (0, 0)
        train(model, torch.optim.SGD(model.parameters(), 0.1), 2)
        timeline.close()
    assert len(timeline.record.steps) == 1


def test_a_group_without_cpu_tensors(ranks):
    ranks("gloo", 2)(beside)


def landed_early(world):
    """The second gradient is computed once the first bucket has landed, behind backward."""
    model = Terms(2, 2)
    reducer = ddp.Reducer(model, bucket_cap_mb=0)
    timeline = Timeline(reducer, None, steps=1, skip=0)

    def until_landed(gradient):
        end = time.monotonic() + 10
        while time.monotonic() < end:
            marks = timeline._recorder.steps[-1].buckets.get(0)
            if marks is not None and marks.landed is not None:
                return
            time.sleep(0.001)

    handle = model.p0.register_hook(until_landed)
    model(own(world)).backward()
    handle.remove()
    model(own(world)).backward()
    timeline.close()
    (step,) = timeline.record.steps
    for rank in step.ranks:
        first, second = rank.buckets
        assert first.sent[1] < second.pack[0] <= first.wait[0]


def test_a_bucket_lands_while_backward_goes_on(pair):
    pair(landed_early)


def one_at_a_time(world):
    """A hook without `one_collective`: the wait for each bucket is where it happens."""
    model = Terms(2, 2)
    reducer = ddp.Reducer(model, bucket_cap_mb=0)

    def hook(state, bucket):
        buffer = bucket.buffer().div_(world.world_size)
        future = dist.all_reduce(buffer, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    reducer.register_comm_hook(None, hook)
    timeline = Timeline(reducer, None, steps=1, skip=0)
    for _ in range(2):
        model(own(world)).backward()
    timeline.close()
    (step,) = timeline.record.steps
    for rank in step.ranks:
        first, second = rank.buckets
        assert in_order(first.sent[0], *first.wait, second.pack[0])
        assert in_order(second.sent[0], *second.wait, *first.unpack, *second.unpack)


def test_buckets_that_are_sent_one_at_a_time(pair):
    pair(one_at_a_time)


class Event:
    """A GPU's event, whose clock stands `early` seconds before the host's."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        assert stream == "stream of cuda:0"
        self.at = Event.now

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3


def test_marks_of_a_gpu_are_times_of_the_host(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    marks = marks_for(torch.device("cuda", 0))
    assert isinstance(marks, CudaMarks)
    first = marks.take()
    Event.now = 0.25
    assert marks.seconds(marks.take()) - marks.seconds(first) == pytest.approx(0.25)
