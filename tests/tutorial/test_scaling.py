"""The closed forms of chapter 13's scaling.py are what buckets do that travel one after another."""

from importlib import import_module

import pytest

scaling = import_module("tutorial.13_slow_wire.scaling")


def by_events(backward, bucket, count, overlap):
    """Bucket by bucket: each begins when it is full and the one before it has arrived."""
    arrived = 0.0
    for number in range(count):
        full = backward * (number + 1) / count if overlap else backward
        arrived = max(full, arrived) + bucket
    return arrived


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("bucket", [0.0, 1.0, 2.4, 7.0])  # of 12: hidden, or too slow
def test_the_closed_forms_are_those_of_the_events(bucket, count):
    for way, overlap in ((scaling.in_turn, False), (scaling.overlapped, True)):
        assert way(12.0, bucket, count) == pytest.approx(by_events(12.0, bucket, count, overlap))


def test_the_more_ranks_the_fewer_buckets_are_best():
    counts = 1, 2, 4, 8, 16, 32
    of = {c: dict(r[::3] for r in scaling.steps(100.0, 120.0, 20.0, 25.0, 512, c)) for c in counts}
    best = [min(counts, key=lambda count: of[count][n]) for n in of[1] if n > 1]
    assert best == sorted(best, reverse=True)
    assert (best[0], best[-1]) == (32, 2)


def test_rows_are_a_rings():
    rows = list(scaling.steps(mb=8.0, backward=10.0, latency=50.0, gbit=8.0, ranks=6, buckets=2))
    assert [row[0] for row in rows] == [1, 2, 4, 6]
    assert rows[0][1:] == (0.0, 10.0, 10.0)  # a rank alone sends nothing
    for n, wire, in_turn, overlap in rows[1:]:
        messages, sent = 2 * (n - 1) * 2 * 0.05, 2 * (n - 1) / n * 8.0  # ms; 1 MB takes 1 ms
        assert wire == pytest.approx(messages + sent)
        assert in_turn == pytest.approx(10.0 + wire)
        assert overlap == pytest.approx(max(10.0 + wire / 2, 5.0 + wire))
