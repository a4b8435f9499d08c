import pytest


def test_one_by_one(exercise):
    assert exercise.one_by_one([100, 300], latency=2, bandwidth=100) == pytest.approx(8)
    assert exercise.one_by_one([4e6] * 10, 1e-3, 1e9) == pytest.approx(50e-3)


def test_in_one_piece(exercise):
    assert exercise.in_one_piece([100, 300], 2, 100, copy_bandwidth=200) == pytest.approx(10)
    assert exercise.in_one_piece([4e6] * 10, 1e-3, 1e9, 8e9) == pytest.approx(51e-3)


@pytest.mark.parametrize("count", [2, 48])
def test_break_even(exercise, count):
    total = exercise.break_even(count, latency=1e-3, copy_bandwidth=8e9)
    assert total == pytest.approx((count - 1) * 4e6)
