"""Which image goes to which rank, in which batch."""

import os
import random
import time
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from ddp_from_scratch.common.errors import UsageError
from ddp_from_scratch.training import datasets
from ddp_from_scratch.training.settings import Settings
from ddp_from_scratch.world.world import World


class Numbers(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.tensor(index), index


class Draws(Dataset):
    """Item i is what its process draws from its three generators, and who that is."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        draws = [torch.rand(()).item(), np.random.rand(), random.random()]
        return torch.tensor([*draws, os.getpid(), index], dtype=torch.float64), index


def world(rank, world_size):
    place = rank, world_size, rank, world_size, 0, "torchrun"
    return World(*place, backend="gloo", device=torch.device("cpu"))


def train_loader(dataset, rank=0, world_size=1, batch_size=1, **more):
    settings = Settings(batch_size=batch_size, **more)
    return datasets.make_loader(dataset, settings, world(rank, world_size), train=True)


def exact_loader(dataset, rank, world_size):
    settings = Settings(batch_size=2)
    return datasets.make_loader(dataset, settings, world(rank, world_size), train=False)


def batches(loader):
    return [labels.tolist() for _, labels in loader]


def flat(lists):
    return list(chain.from_iterable(lists))


def epoch_of(loader, epoch):
    loader.sampler.set_epoch(epoch)
    return batches(loader)


@pytest.mark.parametrize(
    ("size", "world_size", "batch_size", "expected"),
    [(20, 3, 3, 2), (18, 3, 3, 2), (17, 3, 3, 1), (23, 1, 5, 4)],
)
def test_every_rank_gets_as_many_batches_of_the_same_size(size, world_size, batch_size, expected):
    seen = []
    for rank in range(world_size):
        loader = train_loader(Numbers(size), rank, world_size, batch_size)
        mine = epoch_of(loader, 0)
        assert [len(batch) for batch in mine] == [batch_size] * expected
        assert len(loader) == loader.sampler.steps_per_epoch == expected
        seen += flat(mine)
    assert len(set(seen)) == len(seen) == expected * world_size * batch_size
    assert set(seen) <= set(range(size))


def images_of_virtual_ranks(world_size, accumulate):
    found = {}
    for rank in range(world_size):
        options = {"batch_size": 3, "virtual_ranks": 4, "accumulate": accumulate}
        loader = train_loader(Numbers(100), rank, world_size, **options)
        virtual_ranks = range(rank * 4 // world_size, (rank + 1) * 4 // world_size)[::-1]
        assert len(loader) == 8 * len(virtual_ranks)
        mine = iter(batches(loader))
        for step in range(8 // accumulate):
            for virtual_rank in virtual_ranks:
                found[step, virtual_rank] = [next(mine) for _ in range(accumulate)]
    return found


@pytest.mark.parametrize("accumulate", [1, 2])
def test_each_virtual_rank_has_its_images_whatever_the_number_of_ranks(accumulate):
    alone = images_of_virtual_ranks(1, accumulate)
    for world_size in (2, 3, 4):
        assert images_of_virtual_ranks(world_size, accumulate) == alone
    seen = flat(flat(alone.values()))
    assert len(set(seen)) == len(seen) == 96
    # As on four ranks without virtual ranks.
    ordinary = batches(train_loader(Numbers(100), 2, 4, batch_size=3))
    assert [batch for step in range(8 // accumulate) for batch in alone[step, 2]] == ordinary


def test_epochs_and_seeds_differ_and_repeat():
    loader = train_loader(Numbers(40), batch_size=10)
    first = epoch_of(loader, 0)
    assert first != epoch_of(loader, 1)
    assert first == epoch_of(loader, 0)
    assert first != epoch_of(train_loader(Numbers(40), batch_size=10, seed=7), 0)


def test_too_few_images():
    with pytest.raises(UsageError, match="got 11 images; use a smaller batch size"):
        train_loader(Numbers(11), world_size=3, batch_size=4)


def test_every_test_image_is_in_one_virtual_rank_once():
    for size, ranks in ((7, 3), (6, 3), (2, 4), (0, 2), (5, 1)):
        found = [flat(batches(exact_loader(Numbers(size), rank, ranks))) for rank in range(ranks)]
        assert found == [list(range(rank, size, ranks)) for rank in range(ranks)]


@pytest.mark.program
@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker")  # on a single core
def test_workers():
    made = [train_loader(Draws(), rank, 2, 1, workers=2) for rank in range(2)]
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    rows = [torch.cat([rows for rows, _ in loader]) for loader in made]
    # The global generators are left alone.
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())

    # A seed for each rank and worker: nothing is drawn twice, from any of the three generators.
    draws = torch.cat(rows)[:, :3]
    assert draws.unique().numel() == draws.numel() == 8 * 3
    for loader, mine in zip(made, rows, strict=True):
        assert mine[:, 4].tolist() == list(loader.sampler)
        assert loader.multiprocessing_context.get_start_method() == "forkserver"

    # The next epoch has the same workers, and begins where it is told.
    loader = made[0]
    loader.sampler.set_epoch(1, 2)
    again = torch.cat([rows for rows, _ in loader])
    assert again[:, 4].tolist() == list(loader.sampler)
    assert set(again[:, 3].tolist()) == set(rows[0][:, 3].tolist())
    made.clear()
    del loader
    # They end with their loader.
    pids, end = set(torch.cat(rows)[:, 3].int().tolist()), time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < end, "a worker outlives its loader"
        os.sched_yield()
