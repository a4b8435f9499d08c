"""Ranks that are killed, fail, or do not arrive: the others notice long before the timeout."""

import contextlib
import os
import re
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_from_scratch.common.errors import CommunicationError
from ddp_from_scratch.node import shared_memory_group
from tests.support.on_ranks import on
from tests.support.refusal import text_of


def processes():
    """The ranks' processes, by the store: no rank has met another yet."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"process {dist.get_rank()}", str(os.getpid()))
    return [int(store.get(f"process {rank}")) for rank in range(dist.get_world_size())]


def asleep(world):
    """Rank 0 arrives, sleeps in the first round, and is killed before the second."""
    pids = processes()
    if world.rank == 4:
        while dist.group.WORLD.checked_barrier._memory.arrived[0][0] < 1:
            os.sched_yield()
        os.kill(pids[0], signal.SIGKILL)
    for _ in range(2):
        dist.all_reduce(torch.ones(3))


def late(world):
    """A late rank names the killed one, and not the one that left because of it."""
    pids, store = processes(), dist.distributed_c10d._get_default_store()
    dist.all_reduce(torch.ones(3))
    if world.rank == 2:
        os.kill(pids[2], signal.SIGKILL)
    if world.rank == 1:
        store.wait(["rank 0 has failed"])
        # As if its process had ended, too.
        dist.group.WORLD.checked_barrier._processes.ended = lambda: {0, 2}
    try:
        dist.all_reduce(torch.ones(3))
    finally:
        if world.rank == 0:
            store.set("rank 0 has failed", "")


def told(world, program):
    return text_of(RuntimeError, program, world)


@pytest.mark.parametrize(
    ("size", "program", "victim", "expected"),
    [
        (5, asleep, 0, "ended without reaching it"),
        (3, late, 2, "all_reduce number 2 on .* failed: rank 2 ended without reaching"),
    ],
)
def test_a_killed_rank_is_noticed_long_before_the_timeout(ranks, size, program, victim, expected):
    found = ranks("node", size, fresh=True)(told, program, dies=victim)
    assert found.pop(victim) is None
    assert all(re.search(expected, text) for text in found), found


@on("gloo-2")
def test_a_forked_child_that_closes_its_groups_is_not_taken_for_the_rank(world):
    group = dist.new_group([0, 1])
    ours = shared_memory_group(group)
    if world.rank == 1:
        child = os.fork()
        if child == 0:
            ours.shutdown()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert not ours.checked_barrier._memory.left[1][0]
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, group=ours, async_op=True)
    work.wait()
    assert tensor.tolist() == [2.0] * 3


@contextlib.contextmanager
def an_elastic_job(folder):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("ddp_from_scratch.common.group._is_broken", (Path(folder) / "lost").exists)
        yield


def seen(folder, name):
    while not (Path(folder) / name).exists():
        threading.Event().wait(0.01)


def abandoned(world, folder):
    with an_elastic_job(folder):
        own = dist.new_group()
        group = shared_memory_group(own)
        group.allreduce([torch.ones(3)]).wait()
        tensor, text = torch.ones(10**6), ""
        if world.rank == 0:
            work, after = (group.allreduce([tensor]) for _ in range(2))
            while group.checked_barrier._memory.arrived[0][0] < 2:  # it waits there
                os.sched_yield()
            group.abandon()
            # At once: nothing may write to the tensor any more.
            assert work.is_completed()
            assert after.is_completed()
            text = text_of(CommunicationError, work.wait)
            assert "has failed before" in text_of(CommunicationError, after.wait)
            assert tensor.eq(1).all()
            (Path(folder) / "left").touch()
        else:
            seen(folder, "left")
            text = text_of(CommunicationError, group.allreduce([tensor]).wait)
            group.abandon()
        dist.destroy_process_group(own)
    return text


def test_operations_in_flight_end_before_a_rank_continues(ranks, tmp_path):
    first, second = ranks("gloo", 2)(abandoned, str(tmp_path))
    assert "this rank has left the group" in first
    # Whichever of the two it has seen first.
    assert "rank 0 ended without" in second or "another rank has given up" in second


def lost(world, folder):
    """Rank 1 is lost for a reason other than its end: rank 0 notices."""
    text = ""
    with an_elastic_job(folder):
        own = dist.new_group()
        group = shared_memory_group(own)
        if world.rank == 0:
            work = group.allreduce([torch.ones(3)])
            (Path(folder) / "lost").touch()
            text = text_of(CommunicationError, work.wait)
            (Path(folder) / "heard").touch()
        else:
            seen(folder, "heard")
        group.abandon()
        dist.destroy_process_group(own)
        # Memory that is set up waits for nobody, either.
        own = dist.new_group([0, 1])
        if world.rank == 0:
            with pytest.raises(CommunicationError, match="a rank of the group was lost"):
                shared_memory_group(own)
        dist.destroy_process_group(own)
    return text


def test_a_wait_hears_of_a_lost_rank(ranks, tmp_path):
    text, _ = ranks("gloo", 2)(lost, str(tmp_path))
    assert "a rank of the group was lost" in text
