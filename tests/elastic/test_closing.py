"""A group whose collectives are in flight is closed, or loses a rank."""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ddp_from_scratch.common import group
from ddp_from_scratch.common.errors import CommunicationError
from ddp_from_scratch.world.closing import close_default_group
from tests.support.refusal import text_of


def closed_on_rank_1(world, folder):
    """Rank 1 drops a receive before its message comes: its gloo then reads nothing more."""

    def wait_for(name):
        until = time.monotonic() + 30
        while not (folder / name).exists():
            assert time.monotonic() < until, name
            time.sleep(0.01)

    if world.rank == 0:
        wait_for("dropped")
        dist.isend(torch.ones(1000), 1, tag=7)
        dist.all_reduce(torch.zeros(1), async_op=True)
        (folder / "sent").touch()
        wait_for("closed")
        return text_of(RuntimeError, dist.recv, torch.zeros(1), 1, tag=8)
    received = dist.irecv(torch.zeros(1000), 0, tag=7)
    del received
    (folder / "dropped").touch()
    wait_for("sent")
    work = dist.all_reduce(torch.zeros(1), async_op=True)
    close_default_group()
    (folder / "closed").touch()
    told = text_of(RuntimeError, work.wait, timedelta(seconds=30))
    for thread in threading.enumerate():
        if "(close)" in thread.name:
            thread.join(30)
            assert not thread.is_alive()
    return told


def test_what_is_under_way_is_broken_off_on_both_sides(ranks, tmp_path):
    noticed, broken_off = ranks("gloo", 2, fresh=True)(closed_on_rank_1, tmp_path)
    assert "by peer" in noticed
    assert "Application timeout" in broken_off


class Work:
    """A collective that ends while it is waited for the `ends`-th time."""

    def __init__(self, ends):
        self._ends, self.waits = ends, []

    def wait(self, timeout=None):
        self.waits.append(timeout)
        if not self.is_completed():
            raise RuntimeError("Operation timed out!")

    def is_completed(self):
        return len(self.waits) >= self._ends


def test_a_late_rank_is_waited_for_only_where_ranks_may_be_lost(monkeypatch):
    monkeypatch.setattr(group, "_is_broken", None)
    work = Work(ends=1)
    group.wait(work)
    assert work.waits == [None]
    assert not group.may_be_in_flight()
    answers = iter([False] * 3 + [True])
    group.set_failure_detector(lambda: next(answers))
    work = Work(ends=3)
    group.wait(work)
    assert len(work.waits) == 3
    assert None not in work.waits
    assert group.may_be_in_flight()
    with pytest.raises(CommunicationError, match="a rank of the group was lost"):
        group.wait(Work(ends=3))
