"""What a bucket sends, on real ranks: rank r contributes r + 1 and the average is exact."""

import pytest
import torch

from ddp_from_scratch import comm_hooks

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@pytest.fixture(params=[("gloo", 2), ("gloo", 3), ("mpi", 2), ("mpi", 3)], ids=lambda p: "%s-%d" % p)
def crew(ranks, request):
    return ranks(*request.param)


def average(world):
    for dtype in DTYPES:
        for numel in (1, 5, 10_000):
            buffer = torch.full((numel,), world.rank + 1, dtype=dtype)
            handle = comm_hooks.average(buffer)
            handle.wait()
            assert buffer.dtype == dtype
            assert buffer.unique().tolist() == [(world.world_size + 1) / 2], (dtype, numel)


def test_average_is_exact_in_every_dtype(crew):
    crew(average)


def average_of_large_halves(world):
    for largest in (torch.tensor(65504.0).half(), torch.tensor(3e38).bfloat16()):
        buffer = largest.repeat(world.world_size)
        comm_hooks.average(buffer).wait()
        assert buffer.isfinite().all()


def test_average_overflows_only_where_its_value_would(crew):
    """Divided before it is summed: the sum of the largest half floats is no half float."""
    crew(average_of_large_halves)


def average_twice(world):
    """Both are under way before either is waited for."""
    buffers = [torch.full((3,), float(world.rank + 1)), torch.full((2,), world.rank * 10.0)]
    handles = [comm_hooks.average(buffer) for buffer in buffers]
    for handle in reversed(handles):
        handle.wait()
    n = world.world_size
    assert buffers[0].tolist() == [(n + 1) / 2] * 3
    assert buffers[1].tolist() == [(n - 1) * 5] * 2


def test_average_is_asynchronous(crew):
    crew(average_twice)
