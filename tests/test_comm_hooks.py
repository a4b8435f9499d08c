"""What a bucket sends, on real ranks: rank r contributes n (r + 1), and the average is exact.

The factor n, the world size, is there because 1/3 is no float: a third of it is exact.
"""

import pytest
import torch

from ddp_from_scratch import comm_hooks

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@pytest.fixture(params=["gloo-2", "gloo-3", "mpi-2", "mpi-3"])
def crew(ranks, request):
    backend, world_size = request.param.split("-")
    return ranks(backend, int(world_size))


def average(world):
    n = world.world_size
    for dtype in DTYPES:
        for numel in (0, 1, 5, 10_000):
            buffer = torch.full((numel,), n * (world.rank + 1), dtype=dtype)
            comm_hooks.average(buffer).wait()
            assert buffer.dtype == dtype
            assert torch.equal(buffer, torch.full_like(buffer, n * (n + 1) / 2)), (dtype, numel)


def test_average_is_exact_in_every_dtype(crew):
    crew(average)


def average_near_the_largest(world):
    for value, dtype in ((6e4, torch.float16), (3e38, torch.bfloat16), (3e38, torch.float32)):
        buffer = torch.full((5,), value, dtype=dtype)
        expected = buffer.clone()
        comm_hooks.average(buffer).wait()
        torch.testing.assert_close(buffer, expected)


def test_average_overflows_only_where_its_value_would(crew):
    """Divided before it is summed: the sum would not be finite."""
    crew(average_near_the_largest)


def two_averages_at_once(world):
    n = world.world_size
    buffers = [torch.full((3,), n * (world.rank + 1.0)), torch.full((2,), n * world.rank * 10.0)]
    handles = [comm_hooks.average(buffer) for buffer in buffers]
    for handle in reversed(handles):
        handle.wait()
    assert buffers[0].tolist() == [n * (n + 1) / 2] * 3
    assert buffers[1].tolist() == [n * (n - 1) * 5] * 2


def test_several_averages_are_under_way_at_once(crew):
    crew(two_averages_at_once)
