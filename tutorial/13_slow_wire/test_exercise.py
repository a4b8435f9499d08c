from importlib import import_module
from math import inf

import pytest
import torch
import torch.distributed as dist

program = import_module("tutorial.13_slow_wire.slow_wire")
scaling = import_module("tutorial.13_slow_wire.scaling")


def test_bytes_of_low_rank(exercise):
    assert exercise.bytes_of_low_rank(256, 256, 2) == 4096
    assert exercise.bytes_of_low_rank(1000, 10, 4) == 16160


def sums(exercise, way, shape):
    """Returns what was sent, kept and given in three steps, and this rank's bytes of a step."""
    average, state = exercise.keep_error(getattr(program, way)), {}
    sent, given = torch.zeros(shape), torch.zeros(shape)
    for step in range(3):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        gradient = torch.randn(shape, generator=generator)
        given += gradient
        mean, size = average(gradient, state)
        sent += mean * dist.get_world_size()
    kept = [value for key, value in state.items() if key != "q"]
    assert len(kept) == 1, "one tensor is to be kept"
    return sent, kept[0], given, size


@pytest.mark.parametrize(
    ("way", "shape", "nproc", "size"),
    [
        ("top_k", (20, 30), 2, 8 * 6),
        ("low_rank", (20, 30), 3, 4 * 2 * 50),
        ("low_rank", (30,), 2, 4 * 30),  # a bias: `whole` sums it in place
        ("whole", (20, 30), 3, 4 * 600),
    ],
)
def test_keep_error(on_ranks, way, shape, nproc, size):
    sent, kept, given, sizes = zip(*on_ranks(nproc, sums, way, shape), strict=True)
    assert sizes == (size,) * nproc, "the bytes are not those of `average`"
    lost = sum(given) - sent[0] - sum(kept)
    said = "something is neither sent nor kept, or kept twice; `average` may change what it gets"
    assert lost.abs().max() < 1e-4, said


@pytest.mark.parametrize(("ranks", "count"), [(2, 2), (4, 4), (256, 16)])
def test_bandwidth_that_hides(exercise, ranks, count):
    size, backward, latency = 1e8, 0.12, 1e-6
    found = exercise.bandwidth_that_hides(size, backward, latency, ranks, count)
    assert 0 < found < inf, "the messages take less time than backward"
    bucket = scaling.all_reduce(size / count, ranks, latency, found)
    said = "seconds on the wire, and of backward: both are to be equal"
    assert count * bucket == pytest.approx(backward), said
    found = exercise.bandwidth_that_hides(size, backward, 0.12, ranks, count)
    assert found == inf, "no bandwidth helps against messages that take longer than backward"
