"""A step that waits says what for: which bucket, which parameters, on which ranks. Once."""

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
from collections import deque

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_from_scratch import Reducer
from ddp_from_scratch.buckets.bucket_list import make_buckets
from ddp_from_scratch.buckets.gradient_bucket import LaunchArgs
from ddp_from_scratch.checks import stall_watch
from ddp_from_scratch.checks.stall_watch import Progress
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


def store() -> dist.Store:
    _ = dist.group.WORLD.bound_device_id  # puts mpi's in place
    name = dist.group.WORLD.group_name
    prefix = f"ddp stall/{name}/{stall_watch._made[name]}"
    return dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())


def until_reported(step):
    """The laggard waits for the others' report, and so does not come before it."""
    end = time.monotonic() + 20
    while not store().check([f"report {step}"]) and time.monotonic() < end:
        time.sleep(0.02)


def watchers():
    return [t for t in threading.enumerate() if t.name == "ddp stall watch"]


def stalled_step(world, where):
    """Rank 2 lags in step 1; returns what this rank has printed."""
    model = Layers()
    reducer = Reducer(model, bucket_cap_mb=0, stall_after=AFTER_S)
    model().backward()
    with contextlib.redirect_stderr(io.StringIO()) as told:
        if world.rank == 2:
            if where == "forward":
                until_reported(1)
            else:
                model.between = lambda: until_reported(1)
        model().backward()
        time.sleep(AFTER_S)  # what is being printed is printed
    assert model.a.grad.tolist() == [4, 4]
    del reducer, model
    gc.collect()
    assert not watchers()
    return told.getvalue()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_rank_that_lags_is_named_with_what_it_lacks(trio, where):
    first, second, last = trio(stalled_step, where)
    assert last == ""
    assert bool(first) != bool(second), "one rank reports"
    rank, bucket, missing = (0 if first else 1), 0, "0 of 3 gradients have arrived, bucket 0"
    missing += " waits for c"
    if where == "backward":  # c has come and is averaged
        bucket, missing = 1, "1 of 3 gradients have arrived, bucket 1 waits for b"
    lines = (first or second).splitlines()
    name = "cba"[bucket]
    told = rf"step 1, rank {rank}: has waited \d+ s for bucket {bucket} of 3 \({name}\)"
    assert re.fullmatch(told, lines[0])
    assert lines[1:] == [
        "  rank 0: 3 of 3 gradients have arrived",
        "  rank 1: 3 of 3 gradients have arrived",
        f"  rank 2: {missing}",
        "The step goes on waiting until the process group's timeout ends the run.",
    ]


def quiet_steps(world):
    """Whoever does not wait for others says nothing, however long it takes."""
    model = Layers()
    reducer = Reducer(model, bucket_cap_mb=0, stall_after=AFTER_S)
    with contextlib.redirect_stderr(io.StringIO()) as told:
        for _ in range(3):
            model().backward()
        time.sleep(2 * AFTER_S)
        dist.barrier()
        with reducer.no_sync():
            model.between = lambda: time.sleep(2 * AFTER_S)
            model().backward()
    return told.getvalue()


def test_a_rank_that_does_not_wait_says_nothing(trio):
    assert trio(quiet_steps) == [""] * 3


def unwatched_rank(world):
    gc.collect()  # a module and its Reducer are a cycle
    model = Layers()
    reducer = Reducer(model, stall_after=AFTER_S if world.rank == 0 else None)
    assert len(watchers()) == (world.rank == 0)
    name = dist.group.WORLD.group_name
    if world.rank != 0:
        stall_watch._made[name] += 1
    with contextlib.redirect_stderr(io.StringIO()) as told:
        if world.rank == 1:
            until_reported(0)
        model().backward()
        time.sleep(AFTER_S)
    reducer.remove()
    return told.getvalue()


def test_a_rank_that_does_not_watch_is_told(trio):
    told = trio(unwatched_rank)[0]
    assert "  rank 1: nothing is known of it: it has gone on, ended, or does not watch\n" in told


def stopped_rank(world):
    """Rank 1 is stopped until it has been reported."""
    model = Layers()
    reducer = Reducer(model, bucket_cap_mb=0, stall_after=AFTER_S)
    pids = [None] * world.world_size
    dist.all_gather_object(pids, os.getpid())
    model().backward()
    with contextlib.redirect_stderr(io.StringIO()) as told:
        if world.rank == 0:

            def wake():
                until_reported(1)
                os.kill(pids[1], signal.SIGCONT)

            waker = threading.Thread(target=wake)
            waker.start()
        elif world.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        model().backward()
        if world.rank == 0:
            waker.join()
        time.sleep(AFTER_S)  # what is being printed is printed
    reducer.remove()
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


def let_go(world):
    gc.collect()
    model = Layers()
    gone = weakref.ref(Reducer(model, stall_after=60.0))
    (thread,) = watchers()
    model().backward()
    del model
    gc.collect()
    assert gone() is None
    assert not thread.is_alive(), "it did not wait for its next turn"
    with pytest.raises(ValueError, match="stall_after must be a positive number of seconds, got 0"):
        Reducer(Layers(), stall_after=0)


def test_the_watch_ends_with_the_reducer(ranks):
    ranks("gloo", 2)(let_go)


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


class Event:
    """Stands for a GPU's event."""

    def __init__(self):
        self.over = False

    def query(self):
        return self.over


def test_a_gpu_that_waits_behind_the_host():
    """The host is in the next step; an event says that a bucket of this one has not landed."""
    host = Progress(2, None, "0 of 3 gradients have arrived, bucket 0 waits for c")
    event = Event()
    flying = deque([(1, 0, event)])
    watcher = stall_watch._Watcher(1.0, lambda: lambda: host, flying, "", 0, 1)
    told = f"all gradients of step 1 have arrived, and since then {host.text}"
    first = watcher._look(None)
    assert first == Progress(1, "bucket 0", told)
    assert watcher._look(first) == first, "nothing has happened"
    event.over = True
    assert watcher._look(first) == host, "the next backward pass forgets the event"
    assert watcher._look(host) == host
    flying.clear()
    assert watcher._look(first) == host
