import time
from importlib import import_module
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

drift = import_module("tutorial.08_drift.drift")


def run(exercise, name):
    distances = drift.Distances()
    getattr(exercise, name)(distances)
    model = distances.model
    parameters = torch.nn.utils.parameters_to_vector(model.parameters()).data
    return distances.after, parameters, dict(model.named_buffers())


def unrepaired(exercise, name):
    """The unrepaired program, which is right on a single rank."""
    return run(drift, name)


def both_branches(exercise):
    """own_branch in one process: each of the two shards, through its own branch."""
    torch.manual_seed(0)
    model = torch.nn.ModuleList([drift.make_model(), drift.make_model()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(drift.STEPS):
        optimizer.zero_grad()
        for x, y in zip(*(tensor.tensor_split(2) for tensor in drift.shard(step)), strict=True):
            (drift.loss_of(model[int(x.sum() > 0)], (x, y)) / 2).backward()
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).data


@pytest.mark.parametrize("name", [program.__name__ for program in drift.PROGRAMS])
def test_repaired(on_ranks, name):
    (distances, parameters, buffers), *_ = on_ranks(2, run, name)
    assert len(distances) == drift.STEPS, "watch(model) once in each step"
    assert distances == [0.0] * drift.STEPS, "distance between the ranks, after each step"
    if name == "own_branch":
        (expected,) = on_ranks(1, both_branches)
    elif name == "running_mean":  # its parameters were right, and chapter 2: not one process's
        (_, expected, _), _ = on_ranks(2, unrepaired, name)
        assert (buffers["0.running_var"] - 1).abs().max() < 0.5, "the inputs' variance is 1"
    else:
        ((_, expected, _),) = on_ranks(1, unrepaired, name)
    assert torch.allclose(parameters, expected, atol=1e-5), (
        "the ranks agree, but on something else than one process computes"
    )


def epochs(exercise):
    return [exercise.shard_of_epoch(epoch, 20) for epoch in range(3)]


def test_shard_of_epoch(on_ranks):
    orders = []
    for shards in zip(*on_ranks(3, epochs), strict=True):
        assert [len(shard) for shard in shards] == [6, 6, 6], "equally many for each rank"
        used = {number for shard in shards for number in shard}
        assert len(used) == 18, "no example twice"
        assert used <= set(range(20))
        steps = {(b - a) % 20 for shard in shards for a, b in pairwise(shard)}
        assert len(steps) > 1, "shuffled, not shifted"
        orders.append(shards)
    assert orders[0] != orders[1] != orders[2], "another order in each epoch"


def save(exercise, folder):
    file = folder / "model.pt"
    rank, saved = dist.get_rank(), torch.save
    writers = []

    def slowly(*arguments, **options):
        writers.append(rank)
        time.sleep(0.2)  # so that a rank that does not wait reads too early
        saved(*arguments, **options)

    model = torch.nn.Linear(3, 2)
    if rank == 0:
        saved({name: torch.zeros_like(t) for name, t in model.state_dict().items()}, file)
    dist.barrier()
    torch.nn.init.constant_(model.weight, rank + 1)
    with patch.object(torch, "save", slowly):
        exercise.save_and_load(model, file)
    return writers, model.weight.detach()


def test_save_and_load(on_ranks, tmp_path):
    for rank, (writers, weight) in enumerate(on_ranks(2, save, tmp_path)):
        said = f"ranks that write the file, as rank {rank} sees it: rank 0 alone is to"
        assert writers == ([0] if rank == 0 else []), said
        assert weight.eq(1).all(), f"rank {rank} has read something else than rank 0 has saved"
