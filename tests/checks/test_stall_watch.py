"""A step that waits says what for: which bucket, which parameters, on which ranks. Once."""

import contextlib
import gc
import io
import json
import os
import signal
import subprocess
import threading
import time
import weakref
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_from_scratch import Reducer
from ddp_from_scratch.buckets.bucket_list import make_buckets
from ddp_from_scratch.buckets.gradient_bucket import LaunchArgs
from ddp_from_scratch.checks import stall_watch
from ddp_from_scratch.checks.stall_watch import Progress
from tests.support.on_ranks import on
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
    prefix = f"ddp stall/{name}/{stall_watch._made[name]}"
    return dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())


def until(condition):
    """Asks from time to time: a store that waits may keep the watcher's thread out."""
    while not condition():
        time.sleep(0.01)


def until_reported(step):
    until(lambda: store().check([f"report {step}"]))


def until_written(step):
    """Until a watched rank has the report as text, for which it asks how other ranks are."""
    until(lambda: store().check([f"written {step}"]))


def watchers():
    return [t for t in threading.enumerate() if t.name == "ddp stall watch"]


class Clock:
    """In place of time: it stands still until some rank moves all ranks' on by `move`."""

    def __init__(self):
        self.looks, self.going = threading.Semaphore(0), threading.Event()
        self.going.set()

    def monotonic(self):
        self.looks.release()
        self.going.wait()
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
    clock = Clock()
    report = stall_watch._Watcher._report

    def write(watcher, now, *arguments):
        text = report(watcher, now, *arguments)
        store().set(f"written {now.step}", "")
        return text

    printed = contextlib.redirect_stderr(io.StringIO())
    writes = patch.object(stall_watch._Watcher, "_report", write)
    with printed as told, patch.object(stall_watch, "time", clock), writes:
        reducer = Reducer(model, bucket_cap_mb=0, stall_after=AFTER_S)
        try:
            yield weakref.proxy(reducer), clock, told
        finally:
            reducer.remove()
            del reducer
            gc.collect()  # ends the watch when it has printed
            assert not watchers()


STEP_1 = {
    "forward": (0, "0 of 3 gradients have arrived, bucket 0 waits for c"),
    "backward": (1, "1 of 3 gradients have arrived, bucket 1 waits for b"),  # c is averaged
}
ALL_ARRIVED = "3 of 3 gradients have arrived"


def stalled_step(world, where):
    """Rank 2 lags in step 1; returns what this rank has printed."""
    model = Layers()
    with watched(model) as (_, clock, told):
        model().backward()
        expected = [[1, text] for text in (ALL_ARRIVED, ALL_ARRIVED, STEP_1[where][1])]

        def published(rank):
            key = str(rank)
            return store().check([key]) and json.loads(store().get(key)) == expected[rank]

        def lag():
            until(lambda: all(map(published, range(3))))
            clock.move()
            until_written(1)

        if world.rank == 2:
            if where == "forward":
                lag()
            else:
                model.between = lag
        model().backward()
        assert model.a.grad.tolist() == [4, 4]
    return told.getvalue()


@pytest.mark.parametrize(
    ("backend", "where"), [("gloo", "forward"), ("gloo", "backward"), slow("mpi", "forward")]
)
def test_a_rank_that_lags_is_named_with_what_it_lacks(ranks, backend, where):
    first, second, last = ranks(backend, 3)(stalled_step, where)
    assert last == ""
    assert bool(first) != bool(second), "one rank reports"
    rank, (bucket, missing) = (0 if first else 1), STEP_1[where]
    assert (first or second).splitlines() == [
        f"step 1, rank {rank}: has waited 1000 s for bucket {bucket} of 3 ({'cba'[bucket]})",
        f"  rank 0: {ALL_ARRIVED}",
        f"  rank 1: {ALL_ARRIVED}",
        f"  rank 2: {missing}",
        "The step goes on waiting until the process group's timeout ends the run.",
    ]


@on("gloo-3")
def test_a_rank_that_does_not_wait_says_nothing(world):
    """Whoever does not wait for others says nothing, however long it takes."""
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


def unwatched_rank(world):
    model = Layers()
    name = dist.group.WORLD.group_name
    if world.rank != 0:
        stall_watch._made[name] += 1
        Reducer(model, bucket_cap_mb=0)
        assert not watchers()
        if world.rank == 1:
            until(lambda: store().check(["0"]))
            store().set("moved", "")
            until_written(0)
        model().backward()
        return ""
    with watched(model) as (_, _, told):
        model().backward()
    return told.getvalue()


def test_a_rank_that_does_not_watch_is_told(ranks):
    told = ranks("gloo", 3)(unwatched_rank)[0]
    assert "  rank 1: nothing is known of it: it has gone on, ended, or does not watch\n" in told


def stopped_rank(world):
    """Rank 1 is stopped until it has been reported."""
    model = Layers()
    with watched(model) as (_, clock, told):
        pids = [None] * world.world_size
        dist.all_gather_object(pids, os.getpid())
        model().backward()
        if world.rank == 0:

            def wake():
                until(lambda: stall_watch._state(pids[1])[0] == "T")
                clock.move()
                until_written(1)
                os.kill(pids[1], signal.SIGCONT)

            waker = threading.Thread(target=wake)
            waker.start()
        elif world.rank == 1:
            until(lambda: store().check(["process 1"]))
            clock.going.clear()
            clock.looked(1)  # now the watcher has no part of the store locked
            os.kill(os.getpid(), signal.SIGSTOP)
            clock.going.set()
        model().backward()
        if world.rank == 0:
            waker.join()
    return told.getvalue()


@pytest.mark.parametrize("backend", ["gloo", slow("mpi")])
def test_a_stopped_rank_is_named(ranks, backend):
    told = "".join(ranks(backend, 3)(stopped_rank))
    (line,) = [line for line in told.splitlines() if line.startswith("  rank 1: ")]
    assert line.endswith("its process is stopped (SIGSTOP)"), told
    assert told.count("stopped") == 1


def test_an_ended_process_is_told_from_one_that_runs():
    store = dist.HashStore()
    ended = subprocess.Popen(["true"])
    ended.wait()
    own = stall_watch._state(os.getpid())[1]
    assert own
    machine = stall_watch._machine()
    published = [
        (machine, os.getpid(), own),
        (machine, ended.pid, own),
        # Another process has the number now.
        (machine, os.getpid(), own - 1),
        ("other", 1, own),
    ]
    for rank, process in enumerate(published):
        store.set(f"process {rank}", json.dumps(process))
    found = [stall_watch._process_in_words(store, rank) for rank in range(5)]
    runs, over = "its process runs: it has gone on", "its process has ended"
    assert found == [runs, over, over, None, None]


@on("gloo-2")
def test_the_watch_ends_with_the_reducer(world):
    gc.collect()
    model = Layers()
    gone = weakref.ref(Reducer(model, stall_after=60.0))
    (thread,) = watchers()
    model().backward()
    del model
    gc.collect()
    assert gone() is None
    assert not thread.is_alive(), "it did not wait for its next turn"


# Arithmetic -------------------------------------------------------------------------------------


def test_progress_in_words():
    names = [f"p{k}" for k in range(14)]
    parameters = [nn.Parameter(torch.ones(1)) for _ in names]
    buckets = make_buckets(parameters, range(14), [4, 1000], False)  # p0 alone, the others together
    assert Progress.of(5, 0, buckets, names) == Progress(
        5, None, "0 of 14 gradients have arrived, bucket 0 waits for p0"
    )
    for p in parameters:
        p.grad = torch.ones(1)
    under_way = torch.futures.Future()
    buckets[0].mark_ready(0)
    buckets[0].launch(LaunchArgs(lambda state, bucket: under_way, None))
    buckets[1].mark_ready(13)
    told = "2 of 14 gradients have arrived, bucket 1 waits for p1, p2, p3, p4, p5, p6, p7, p8, p9, "
    told += "p10 and 2 more"
    assert Progress.of(5, 1, buckets, names) == Progress(5, "bucket 0 of 2 (p0)", told)
    under_way.set_result(torch.ones(1))
    assert Progress.of(5, 1, buckets, names).bucket is None, "waits for this rank alone"
    for k in range(1, 13):
        buckets[1].mark_ready(k)
    late = torch.futures.Future()
    buckets[1].launch(LaunchArgs(lambda state, bucket: late, None))
    now = Progress.of(5, 2, buckets, names)
    assert now == Progress(
        5, "bucket 1 of 2 (p1, p2, p3 and 10 more)", "14 of 14 gradients have arrived"
    )
    late.set_result(torch.ones(13))
    assert Progress.of(5, 2, buckets, names).bucket == "the end of the backward pass"


def test_a_gpu_that_waits_behind_the_host():
    """The host is in the next step; the GPU has not said that a bucket of this one has landed."""
    host = Progress(2, None, "0 of 3 gradients have arrived, bucket 0 waits for c")
    under_way = Mock(first=Mock(return_value=(1, 0)))
    watcher = stall_watch._Watcher(1.0, lambda: lambda: host, under_way, "", 0, 1)
    told = f"all gradients of step 1 have arrived, and since then {host.text}"
    assert watcher._look() == Progress(1, "bucket 0", told)
    under_way.first.return_value = None
    assert watcher._look() == host
