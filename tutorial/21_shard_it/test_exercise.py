from importlib import import_module
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

program = import_module("tutorial.21_shard_it.shard_it")


def held(exercise, widths):
    """What this rank holds at most, and what the exercise predicts."""
    sizes = list(pairwise(widths))
    model = program.ShardedModel(torch.nn.ModuleList(torch.nn.Linear(*size) for size in sizes))
    shards = [layer.shard for layer in model.layers]
    adam = torch.optim.Adam(shards)
    for _ in range(2):
        model.forward(torch.ones(4, widths[0])).sum().backward()
        model.finish()
        adam.step()
    found = {
        "shards": sum(shard.nbytes for shard in shards),
        "their gradients": sum(shard.grad.nbytes for shard in shards),
        "state": sum(s.nbytes for of_one in adam.state.values() for s in of_one.values()),
        "whole": model.most,
    }
    counts = [(before + 1) * after for before, after in sizes]
    return found, exercise.predict_memory(counts, dist.get_world_size())


@pytest.mark.parametrize(
    "widths",
    [(16, 16, 16, 16), (8, 64, 8, 8), (8, 8, 128, 64, 8), (32, 16, 24, 20), (64, 8)],
    ids=str,
)
def test_predict_memory(on_ranks, widths):
    for found, predicted in on_ranks(2, held, widths):
        for kind, size in found.items():
            assert predicted[kind] == size, f"{kind}: bytes predicted, and held"


def gathered(exercise):
    sent = []
    gather = dist.all_gather_into_tensor

    def gather_and_note(output_tensor, input_tensor, group=None, async_op=False):
        sent.append(input_tensor.nbytes)
        return gather(output_tensor, input_tensor, group=group, async_op=async_op)

    dist.all_gather_into_tensor = gather_and_note
    rank = dist.get_rank()
    part = torch.nn.Parameter(torch.linspace(rank, rank + 1, 100))
    return part.detach(), exercise.gather_in_16_bits(part).detach(), sent


def test_gather_in_16_bits(on_ranks):
    parts, wholes, sent = zip(*on_ranks(3, gathered), strict=True)
    expected = torch.cat(parts).bfloat16().float()
    for rank, whole in enumerate(wholes):
        assert whole.dtype == torch.float32, f"rank {rank}: the layer computes in float32"
        assert whole.equal(expected), f"rank {rank} has other numbers than are sent"
        assert sum(sent[rank]) == 200, f"rank {rank}: 100 numbers of 2 bytes are sent"
