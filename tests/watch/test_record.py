"""The arithmetic of a record, without processes."""

import pytest

from ddp_from_scratch.watch.recorder import moved, rank_times, step_times
from tests.watch.records import HOST, LAYOUT, marks, record


def ms(*values):
    return pytest.approx(values)


def times_of(changed):
    return rank_times(0, HOST, changed)


def test_a_callback_or_a_thread_that_is_late_hides_nothing():
    """A thread that wakes up late waits on after the last bucket has landed."""
    late = marks()
    late.buckets[1] |= {"waited": 0.090, "unpacked": 0.090}
    times = times_of(late)
    assert (times.exposed, times.hidden) == ms(20, 1 - 10 / 38)
    late = marks()
    late.buckets[1]["landed"] = 0.200
    assert times_of(late).buckets[1].sent == ms(62, 80)


def test_clocks_of_several_machines():
    # Another machine's clock may be off by more than the way takes.
    times = times_of(marks())
    bucket = step_times(7, LAYOUT, [times, moved(times, 50.0)]).ranks[0].buckets[0]
    assert bucket.sent[0] <= bucket.met <= bucket.sent[1]
    # A step begins at 0 on the rank that begins first.
    ranks = [moved(times, 1000.0 + rank) for rank in range(2)]
    first, second = step_times(7, LAYOUT, ranks).ranks
    assert (first.begin, second.begin) == ms(0, 1)
    assert second.arrived == (("b", pytest.approx(41)), ("a", pytest.approx(61)))
    assert second.buckets[0].pack == ms(41, 43)


def test_a_bucket_moves_after_those_before_it():
    _, second = record(late=0.0).steps[0].ranks[0].buckets
    assert (second.met, second.moving, second.sent[1]) == ms(62, 64, 80)
