"""The arithmetic of a record, without processes."""

from dataclasses import replace

import pytest

from ddp_from_scratch.watch.record import moved, rank_times, step_times
from ddp_from_scratch.watch.recorder import HostMarks
from tests.watch.records import LAYOUT, PASS, marks, record


def ms(*values):
    return pytest.approx(values)


def times_of(begin=PASS, end=(("step", 0.085), ("stepped", 0.100)), **changed):
    events = [*begin, *marks().events[3:5], *end]
    return rank_times(0, HostMarks(), replace(marks(), events=events, **changed))


def test_marks_become_spans():
    times = times_of()
    assert (times.forward, times.backward) == ((ms(0, 30),), (ms(30, 70),))
    assert (times.optimizer, (times.begin, times.end)) == (ms(85, 100), ms(0, 100))
    first, second = times.buckets
    assert (first.pack, first.sent) == (ms(40, 42), ms(42, 64))
    assert (first.wait, first.unpack) == (ms(70, 70), ms(70, 71))
    assert (second.sent, second.wait) == (ms(62, 80), ms(70, 80))
    # The two buckets overlap.
    assert (times.communication, times.exposed, times.hidden) == ms(80 - 42, 10, 1 - 10 / 38)


def test_passes_that_accumulate_and_what_is_not_recorded():
    raised = ("forward", 0.015)
    once = [("forward", 0.0), ("forwarded", 0.010), ("backward", 0.010), ("over", 0.015)]
    again = [("forward", 0.020), ("forwarded", 0.030), ("backward", 0.030)]
    times = times_of([*once, raised, *again])
    assert times.forward == (ms(0, 10), ms(20, 30))
    assert times.backward == (ms(10, 20), ms(30, 70))
    # backward_and_step is called before its backward pass.
    assert times_of([*PASS, ("step", 0.030)], [("stepped", 0.100)]).optimizer == ms(82, 100)
    bare = times_of([], [], buckets={})
    assert (bare.forward, bare.buckets, bare.optimizer) == ((), (), None)
    assert bare.backward == (ms(40, 70),)  # from the first gradient
    assert (bare.communication, bare.hidden) == (0, 0)


def test_a_callback_or_a_thread_that_is_late_hides_nothing():
    """A thread that wakes up late waits on after the last bucket has landed."""
    late = marks()
    late.buckets[1] |= {"waited": 0.090, "unpacked": 0.090}
    times = rank_times(0, HostMarks(), late)
    assert (times.exposed, times.hidden) == ms(20, 1 - 10 / 38)
    late = marks()
    late.buckets[1]["landed"] = 0.200
    assert rank_times(0, HostMarks(), late).buckets[1].sent == ms(62, 80)


def test_ranks_wait_for_the_last_launch():
    first, second = record(late=0.010).steps[0].ranks
    assert [bucket.last for bucket in first.buckets] == [1, 1]
    assert [bucket.met - bucket.sent[0] for bucket in first.buckets] == ms(10, 10)
    assert [bucket.met - bucket.sent[0] for bucket in second.buckets] == ms(0, 0)
    for late, for_a_rank in ((0.015, 7), (0.0, 0)):
        bucket = record(late).steps[0].ranks[0].buckets[1]
        assert (bucket.exposed, bucket.exposed_for_a_rank) == ms(10, for_a_rank)
    # A bucket moves after those before it.
    first, second = record(late=0.0).steps[0].ranks[0].buckets
    assert (first.moving, first.sent[1]) == ms(42, 64)
    assert (second.met, second.moving, second.sent[1]) == ms(62, 64, 80)


def test_clocks_of_several_machines():
    # Another machine's clock may be off by more than the way takes.
    bucket = step_times(7, LAYOUT, [times_of(), moved(times_of(), 50.0)]).ranks[0].buckets[0]
    assert bucket.sent[0] <= bucket.met <= bucket.sent[1]
    # A step begins at 0 on the rank that begins first.
    ranks = [moved(times_of(), 1000.0 + rank) for rank in range(2)]
    first, second = step_times(7, LAYOUT, ranks).ranks
    assert (first.begin, second.begin) == ms(0, 1)
    assert second.arrived == (("b", pytest.approx(41)), ("a", pytest.approx(61)))
    assert second.buckets[0].pack == ms(41, 43)
