import pytest


def test_one_by_one(exercise):
    found = exercise.one_by_one([100, 300], latency=2, bandwidth=100)
    assert found == pytest.approx(8), "two all-reduces, of 2 + 1 and of 2 + 3 seconds"
    found = exercise.one_by_one([4e6] * 10, 1e-3, 1e9)
    assert found == pytest.approx(50e-3), "ten all-reduces of 1 + 4 ms"


def test_in_one_piece(exercise):
    found = exercise.in_one_piece([100, 300], 2, 100, copy_bandwidth=200)
    assert found == pytest.approx(10), "an all-reduce of 2 + 4 seconds, and two copies of 2"
    found = exercise.in_one_piece([4e6] * 10, 1e-3, 1e9, 8e9)
    assert found == pytest.approx(51e-3), "an all-reduce of 1 + 40 ms, and two copies of 5"


@pytest.mark.parametrize("count", [2, 48])
def test_break_even(exercise, count):
    total = exercise.break_even(count, latency=1e-3, copy_bandwidth=8e9)
    extra, copies = (count - 1) * 1e-3, 2 * total / 8e9
    said = f"{count - 1} latencies that are saved, and two copies of the bytes returned, in seconds"
    assert copies == pytest.approx(extra), said
