"""Groups beside gloo's in a job that goes on without the ranks that it loses."""

import contextlib
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_from_scratch import waiting
from ddp_from_scratch.errors import CommunicationError
from ddp_from_scratch.node import shared_memory_beside
from ddp_from_scratch.node.backend import abandon_beside
from tests.support.machines import Total, group_over
from tests.support.tiers import slow


@contextlib.contextmanager
def a_job_that_goes_on(folder):
    """A rank is lost as soon as the file is there."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(waiting, "_is_broken", (Path(folder) / "lost").exists)
        yield


def error_of(work):
    with pytest.raises(CommunicationError) as error:
        work.wait()
    return str(error.value)


def seen(folder, name):
    while not (Path(folder) / name).exists():
        time.sleep(0.01)


def abandoned(world, folder):
    """Rank 0 leaves while its sum waits for rank 1, which comes later."""
    with a_job_that_goes_on(folder):
        own = dist.new_group()
        group = shared_memory_beside(own)
        group.allreduce([torch.ones(3)]).wait()
        rows, text = [torch.ones(10**6), torch.ones(10**6)], ""
        if world.rank == 0:
            work, after = (group.fold_rows(rows, [[1, 2]] * 2, Total()) for _ in range(2))
            time.sleep(0.1)
            abandon_beside(own)
            # At once: nothing may write to the rows any more.
            assert work.is_completed()
            assert after.is_completed()
            text = error_of(work)
            assert "has failed before" in error_of(after)
            assert rows[0].eq(1).all()
            (Path(folder) / "left").touch()
        else:
            seen(folder, "left")
            text = error_of(group.fold_rows(rows, [[1, 2]] * 2, Total()))
            abandon_beside(own)
        abandon_beside(own)  # there is none any more
        dist.destroy_process_group(own)
    return text


def test_what_is_under_way_ends_before_a_rank_goes_on(ranks, tmp_path):
    first, second = ranks("gloo", 2)(abandoned, str(tmp_path))
    assert "this rank has left the group" in first
    # Whichever of the two it has seen first.
    assert "rank 0 ended without" in second or "another rank has given up" in second


def lost(world, folder):
    """Rank 1 is lost for another reason than its end: rank 0 hears of it."""
    text = ""
    with a_job_that_goes_on(folder):
        own = dist.new_group()
        group = shared_memory_beside(own)
        if world.rank == 0:
            work = group.allreduce([torch.ones(3)])
            (Path(folder) / "lost").touch()
            text = error_of(work)
            (Path(folder) / "heard").touch()
        else:
            seen(folder, "heard")
        abandon_beside(own)
        dist.destroy_process_group(own)
        # Memory that is set up waits for nobody, either.
        if world.rank == 0:
            own = dist.new_group([0, 1])
            with pytest.raises(CommunicationError, match="a rank of the group was lost"):
                shared_memory_beside(own)
        else:
            own = dist.new_group([0, 1])
        dist.destroy_process_group(own)
    return text


def test_a_wait_hears_of_a_lost_rank(ranks, tmp_path):
    text, _ = ranks("gloo", 2)(lost, str(tmp_path))
    assert "a rank of the group was lost" in text


def over_two_machines(world, folder):
    with a_job_that_goes_on(folder):
        group = group_over(world, [2, 1])
        assert shared_memory_beside(group) is group
        dist.destroy_process_group(group)


@pytest.mark.parametrize("size", [slow(3)])
def test_between_machines_messages_are_sent(ranks, tmp_path, size):
    ranks("gloo", size)(over_two_machines, str(tmp_path))
