"""The rows of chapter 13's scaling.py are what buckets do that travel a ring one after another."""

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
@pytest.mark.parametrize("backward", [2.0, 12.0, 60.0])  # with buckets that are hidden, or too slow
def test_rows_are_those_of_the_events(backward, count):
    wires = {"mb": 8.0, "latency": 50.0, "gbit": 8.0, "ranks": 6}
    rows = list(scaling.steps(backward=backward, buckets=count, **wires))
    assert [row[0] for row in rows] == [1, 2, 4, 6]
    for n, wire, *ways in rows:  # a rank alone sends nothing
        bucket = 2 * (n - 1) * (0.05 + 8.0 / count / n)  # ms; 1 MB takes 1 ms
        assert wire == pytest.approx(count * bucket)
        expected = [by_events(backward, bucket, count, overlap) for overlap in (False, True)]
        assert ways == pytest.approx(expected)
