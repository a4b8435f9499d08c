from importlib import import_module

import torch
import torch.distributed as dist

program = import_module("tutorial.13_slow_wire.slow_wire")


def test_bytes_of_low_rank(exercise):
    assert exercise.bytes_of_low_rank(256, 256, 2) == 4096
    assert exercise.bytes_of_low_rank(1000, 10, 4) == 16160


def sums(exercise, way):
    """Returns what was sent, kept and given in three steps, and this rank's bytes of a step."""
    average, state = exercise.keep_error(getattr(program, way)), {}
    sent, given = torch.zeros(20, 30), torch.zeros(20, 30)
    for step in range(3):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        gradient = torch.randn(20, 30, generator=generator)
        given += gradient
        mean, size = average(gradient, state)
        sent += mean * dist.get_world_size()
    kept = [value for key, value in state.items() if key != "q"]
    assert len(kept) == 1, "one tensor is to be kept"
    return sent, kept[0], given, size


def check(results, size):
    sent, kept, given, sizes = zip(*results, strict=True)
    assert sizes == (size,) * len(results), "the bytes are not those of `average`"
    lost = sum(given) - sent[0] - sum(kept)
    assert lost.abs().max() < 1e-4, "something is neither sent nor kept, or kept twice"


def test_keep_error_of_top_k(on_ranks):
    check(on_ranks(2, sums, "top_k"), 8 * 6)


def test_keep_error_of_low_rank(on_ranks):
    check(on_ranks(3, sums, "low_rank"), 4 * 2 * 50)
