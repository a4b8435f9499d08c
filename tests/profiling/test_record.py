"""The arithmetic of a record, without processes."""

from dataclasses import replace

import pytest

from ddp_from_scratch.marks import HostMarks
from ddp_from_scratch.profiling.record import on_clock, rank_times, step_times
from tests.profiling.records import LAYOUT, marks, record


def ms(*values: float) -> object:
    return pytest.approx(values)


def test_marks_become_spans():
    times = rank_times(0, HostMarks(), marks())
    assert times.forward == (ms(0, 30),)
    assert times.backward == (ms(30, 70),)
    assert times.optimizer == ms(85, 100)
    assert (times.begin, times.end) == ms(0, 100)
    first, second = times.buckets
    assert (first.pack, first.sent) == (ms(40, 42), ms(42, 64))
    assert (first.wait, first.unpack) == (ms(70, 70), ms(70, 71))
    assert (second.sent, second.wait) == (ms(62, 80), ms(70, 80))
    assert times.communication == pytest.approx(80 - 42)  # the two buckets overlap
    assert times.exposed == pytest.approx(10)
    assert times.hidden == pytest.approx(1 - 10 / 38)


def test_a_callback_or_a_thread_that_is_late_hides_nothing():
    """A thread that wakes up late waits on after the last bucket has landed."""
    late = marks()
    late.buckets[1].waited = late.buckets[1].unpacked = 0.090
    times = rank_times(0, HostMarks(), late)
    assert times.exposed == pytest.approx(20)
    assert times.hidden == pytest.approx(1 - 10 / 38)
    late = marks()
    late.buckets[1].landed = 0.200
    assert rank_times(0, HostMarks(), late).buckets[1].sent == ms(62, 80)


def test_exposed_is_split_at_the_last_launch():
    bucket = record(late=0.015).steps[0].ranks[0].buckets[1]
    assert (bucket.exposed, bucket.exposed_for_a_rank) == ms(10, 7)
    bucket = record(late=0.0).steps[0].ranks[0].buckets[1]
    assert (bucket.exposed, bucket.exposed_for_a_rank) == ms(10, 0)


def test_a_bucket_moves_after_those_before_it():
    first, second = record(late=0.0).steps[0].ranks[0].buckets
    assert (first.moving, first.sent[1]) == ms(42, 64)
    assert (second.met, second.moving, second.sent[1]) == ms(62, 64, 80)


def test_the_last_rank_is_named_and_waited_for():
    first, second = record(late=0.010).steps[0].ranks
    assert [bucket.last for bucket in first.buckets] == [1, 1]
    assert [bucket.met - bucket.sent[0] for bucket in first.buckets] == ms(10, 10)
    assert [bucket.met - bucket.sent[0] for bucket in second.buckets] == ms(0, 0)


def test_a_bucket_never_lands_before_it_is_met():
    """Another machine's clock may be off by more than the way takes."""
    early = rank_times(0, HostMarks(), marks())
    late = on_clock(rank_times(1, HostMarks(), marks()), 50.0)
    bucket = step_times(7, LAYOUT, [early, late]).ranks[0].buckets[0]
    assert bucket.sent[0] <= bucket.met <= bucket.sent[1]


def test_a_step_begins_at_zero_on_the_rank_that_begins_first():
    ranks = [on_clock(rank_times(r, HostMarks(), marks()), 1000.0 + r) for r in range(2)]
    first, second = step_times(7, LAYOUT, ranks).ranks
    assert (first.begin, second.begin) == ms(0, 1)
    assert second.arrived == (("b", pytest.approx(41)), ("a", pytest.approx(61)))
    assert second.buckets[0].pack == ms(41, 43)


def test_several_passes_of_an_accumulated_step():
    accumulated = marks()
    accumulated.forward = [0.0, 0.010, 0.020, 0.030]
    accumulated.backward = [0.010, 0.030]
    times = rank_times(0, HostMarks(), accumulated)
    assert times.forward == (ms(0, 10), ms(20, 30))
    assert times.backward == (ms(10, 20), ms(30, 70))


def test_backward_and_step_is_called_before_its_backward_pass():
    at_once = marks()
    at_once.optimizer = [0.030, 0.100]
    assert rank_times(0, HostMarks(), at_once).optimizer == ms(82, 100)


def test_what_is_not_recorded_is_left_out():
    bare = replace(marks(), forward=[], backward=[], optimizer=[], buckets={})
    times = rank_times(0, HostMarks(), bare)
    assert (times.forward, times.buckets, times.optimizer) == ((), (), None)
    assert times.backward == (ms(40, 70),)  # from the first gradient
    assert (times.communication, times.hidden) == (0, 0)
