import pytest
import torch
import torch.distributed as dist

WINDOWS = {0: [1.0, 2.0, 6.0], 1: [], 2: [3.0]}  # by rank


def test_bits_per_byte(exercise):
    assert exercise.bits_per_byte(0.0) == 0
    found = exercise.bits_per_byte(torch.tensor(1 / 8).log().neg().item())
    assert found == pytest.approx(3), "a chance of 1/8 is three bits"


def test_efficiency(exercise):
    assert exercise.efficiency(100.0, 50.0, 2) == pytest.approx(1)
    assert exercise.efficiency(100.0, 100.0, 2) == pytest.approx(0.5)
    assert exercise.efficiency(60.0, 30.0, 4) == pytest.approx(0.5)


def validate(exercise):
    calls, all_reduce = [], dist.all_reduce
    dist.all_reduce = lambda *given, **more: (calls.append(1), all_reduce(*given, **more))
    return exercise.validate(torch.tensor, WINDOWS[dist.get_rank()]), len(calls)


def test_validate(on_ranks):
    for rank, (mean, calls) in enumerate(on_ranks(3, validate)):
        said = f"rank {rank}: the mean of 1, 2, 6 on rank 0, none on rank 1, and 3 on rank 2"
        assert float(mean) == pytest.approx(3), said
        assert calls == 1, "calls of all-reduce"
