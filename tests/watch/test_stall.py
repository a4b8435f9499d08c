"""A step that waits reports once which bucket, parameters and ranks it waits for."""

import contextlib
import gc
import io
import json
import os
import re
import signal
import subprocess
import threading
import time
import weakref
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_from_scratch import CommunicationError, Reducer
from ddp_from_scratch.common.process import Process
from ddp_from_scratch.watch import stall
from tests.support.logged import logged
from tests.support.on_ranks import on
from tests.support.ranks import ROOT
from tests.support.tiers import slow

AFTER_S = 0.3


class Layers(nn.Module):
    """Three parameters, a bucket each; the function `between` runs in the midst of backward."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(2)) for _ in range(3))
        self.between = lambda: None

    def forward(self):
        y = (self.a * 2) * self.b
        y.register_hook(lambda gradient: self.between())
        return (y * self.c).sum()


def store():
    _ = dist.group.WORLD.bound_device_id  # puts mpi's in place
    name = dist.group.WORLD.group_name
    prefix = f"ddp stall/{name}/{stall._made[name]}"
    return dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())


def until(condition):
    """Asks from time to time: a store that waits may keep the watcher's thread out."""
    while not condition():
        time.sleep(0.01)


def watchers():
    return [t for t in threading.enumerate() if t.name == "ddp stall watch"]


class Clock:
    """In place of time: it stands still until some rank moves all ranks' on by `move`."""

    def __init__(self):
        self.looks = threading.Semaphore(0)

    def monotonic(self):
        self.looks.release()
        return 1000.0 * store().check(["moved"])

    def move(self):
        store().set("moved", "")

    def looked(self, times):
        while self.looks.acquire(blocking=False):
            pass
        for _ in range(times):
            assert self.looks.acquire(timeout=20)


@contextlib.contextmanager
def watched(model):
    """A Reducer that watches by such a clock, and what it prints in the block, to the end."""
    gc.collect()  # a module and its Reducer are a cycle
    before = watchers()  # of Reducers that earlier tests have left
    clock = Clock()
    report = stall.StallWatch._report

    def write(watcher, now, *arguments):
        text = report(watcher, now, *arguments)
        store().set(f"written {now.step}", "")
        return text

    printed = contextlib.redirect_stderr(io.StringIO())
    writes = patch.object(stall.StallWatch, "_report", write)
    with printed as told, patch.object(stall, "time", clock), writes:
        reducer = Reducer(model, bucket_cap_mb=0, stall_after=AFTER_S)
        try:
            yield weakref.proxy(reducer), clock, told
        finally:
            reducer.remove()
            del reducer
            gc.collect()  # ends the watch when it has printed
            assert watchers() == before


STEP_1 = {
    "forward": (0, "0 of 3 gradients have arrived, bucket 0 waits for c"),
    "backward": (1, "1 of 3 gradients have arrived, bucket 1 waits for b"),  # c is averaged
}
ALL_ARRIVED = "3 of 3 gradients have arrived"


def process_of(rank):
    """The process of a rank, as its watch tells it to the others."""
    return Process.parse(json.loads(store().get(f"{rank} is"))[1])


def stalled_step(world, where, stops=False):
    """Rank 2 lags in step 1, perhaps as a stopped process; returns what this rank has printed."""
    model = Layers()
    with logged() as found, watched(model) as (_, clock, told):
        model().backward()
        expected = [(1, text) for text in (ALL_ARRIVED, ALL_ARRIVED, STEP_1[where][1])]

        def published(rank):
            if not store().check([str(rank)]):
                return False
            step, _, text, _ = json.loads(store().get(str(rank)))
            return (step, text) == expected[rank]

        def continue_it():
            until(lambda: store().check(["2 is"]) and process_of(2).is_stopped())
            clock.move()
            until(lambda: store().check(["written 1"]))
            os.kill(process_of(2).pid, signal.SIGCONT)

        def lag():
            until(lambda: all(map(published, range(3))))
            if stops:
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                clock.move()
            # Until a watched rank has the report as text, for which it asks how other ranks are.
            until(lambda: store().check(["written 1"]))

        helper = threading.Thread(target=continue_it)
        if stops and world.rank == 0:
            helper.start()

        if world.rank == 2:
            if where == "forward":
                lag()
            else:
                model.between = lag
        model().backward()
        assert model.a.grad.tolist() == [4, 4]
        if helper.is_alive():
            helper.join()
    assert found == ([("WARNING", told.getvalue().rstrip("\n"))] if told.getvalue() else [])
    return told.getvalue()


@pytest.mark.parametrize(
    ("backend", "where"), [("gloo", "forward"), ("gloo", "backward"), slow("mpi", "forward")]
)
def test_a_rank_that_lags_is_named_with_what_it_lacks(ranks, backend, where):
    first, second, last = ranks(backend, 3)(stalled_step, where)
    assert last == ""
    assert bool(first) != bool(second), "one rank reports"
    rank, (bucket, missing) = (0 if first else 1), STEP_1[where]
    *lines, place, end = (first or second).splitlines()
    assert lines == [
        f"step 1, rank {rank}: has waited 1000 s for bucket {bucket} of 3 ({'cba'[bucket]})",
        f"  rank 0: {ALL_ARRIVED}",
        f"  rank 1: {ALL_ARRIVED}",
        f"  rank 2: {missing}",
    ]
    # Alone of the rank that does not wait as the one does that reports.
    assert re.match(r"    in \S*test_stall\.py:\d+: .*", place)
    assert end == "The step keeps waiting until the process group's timeout ends the run."


def test_a_rank_whose_process_is_stopped_is_named(ranks):
    first, second, _ = ranks("gloo", 3)(stalled_step, "forward", True)
    (line,) = re.findall(r"^  rank 2: (.*)$", first or second, re.MULTILINE)
    stopped, _, progress = line.partition("; ")
    assert re.fullmatch(r"process (\d+) is stopped, until kill -CONT \1", stopped)
    assert progress == STEP_1["forward"][1]


@pytest.mark.program
def test_a_rank_whose_process_has_ended_is_named():
    store, at = dist.HashStore(), stall.StepProgress(7, "bucket 0", "")
    with subprocess.Popen(["sleep", "60"]) as process:
        known = stall.this_machine(), str(Process.of(process.pid))
        store.set("1 is", json.dumps(known))
        silent = at.of_rank(store, 1)
        process.kill()
    assert at.of_rank(store, 1) == f"process {process.pid} has ended"
    page = " ".join((ROOT / "docs/how-to/find-faults.md").read_text().split())
    assert f"`{silent}`" in page
    assert "`process 4711 has ended`" in page
    store.set("1 is", json.dumps(("another machine", known[1])))
    elsewhere = at.of_rank(store, 1)
    assert elsewhere == silent.replace("it has continued", "it has ended, has continued")


@on("gloo-3")
def test_a_rank_that_does_not_wait_says_nothing(world):
    """A rank that does not wait for others reports nothing, however long it takes."""
    model = Layers()
    with watched(model) as (reducer, clock, told):
        for _ in range(3):
            model().backward()
        clock.looked(3)
        dist.barrier()
        clock.move()
        clock.looked(3)
        with reducer.no_sync():
            model.between = lambda: clock.looked(3)
            model().backward()
    assert told.getvalue() == ""


@on("gloo-2")
def test_the_watch_ends_with_the_reducer(world):
    gc.collect()
    before = watchers()
    model = Layers()
    gone = weakref.ref(Reducer(model, stall_after=60.0))
    (thread,) = set(watchers()).difference(before)
    model().backward()
    del model
    gc.collect()
    assert gone() is None
    assert not thread.is_alive(), "it did not wait for its next turn"


def late_rank(world, seconds):
    """Rank 1 comes to an average after its timeout; returns the error of rank 0."""
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    model = torch.nn.Linear(2, 1)
    reducer = Reducer(model, process_group=group)
    model(torch.ones(1, 2)).backward()
    if world.rank == 1:
        time.sleep(2 * seconds)
    with pytest.raises(CommunicationError) as raised:
        model(torch.ones(1, 2)).backward()
    reducer.remove()
    return str(raised.value)


@pytest.mark.parametrize("backend", ["gloo", slow("mpi")])
def test_an_error_at_the_timeout_says_where_the_missing_rank_is(ranks, backend):
    told, _ = ranks(backend, 2, fresh=True)(late_rank, 3)
    line = r"\S*test_stall\.py:\d+: time\.sleep\(2 \* seconds\)"
    assert re.search(rf"the timeout of 3 s passed without rank 1; rank 1 is in {line}$", told)


@on("gloo-2")
def test_the_default_is_a_watch_on_cpus(world):
    gc.collect()
    before, model = watchers(), Layers()
    reducer = Reducer(model)
    assert len(watchers()) == len(before) + 1
    reducer.remove()
    del reducer
    gc.collect()
    assert watchers() == before
    Reducer(model, stall_after=None)
    assert watchers() == before


def test_one_rank_has_no_watch(alone):
    gc.collect()
    before = watchers()
    Reducer(Layers())
    assert watchers() == before
