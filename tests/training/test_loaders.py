"""Which image goes to which rank, in which batch."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from ddp_from_scratch.errors import UsageError
from ddp_from_scratch.launch.environment import Placement
from ddp_from_scratch.training import loaders
from ddp_from_scratch.training.settings import Settings
from ddp_from_scratch.world.process_group import World


class Numbers(Dataset):
    """Item i is (tensor(i), i); remembers which items were read."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.read.append(index)
        return torch.tensor(index), index


class Draws(Dataset):
    """Item i is what the process that reads it draws from its three generators, and who it is."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        draws = [torch.rand(()).item(), np.random.rand(), random.random()]
        who = [get_worker_info().id, os.getpid(), os.getpgid(0), index]
        return torch.tensor([*draws, *who], dtype=torch.float64), index


def world(rank: int, world_size: int) -> World:
    place = Placement(rank, world_size, rank, world_size, 0, "torchrun")
    return World(**vars(place), backend="gloo", device=torch.device("cpu"))


def train_loader(
    dataset: Dataset, rank: int = 0, world_size: int = 1, batch_size: int = 1, **more: int
) -> DataLoader:
    settings = Settings(batch_size=batch_size, **more)
    return loaders.train_loader(dataset, settings, world(rank, world_size))


def exact_loader(dataset: Dataset, rank: int, world_size: int) -> DataLoader:
    return loaders.test_loader(dataset, Settings(batch_size=2), world(rank, world_size))


def batches(loader: DataLoader) -> list[list[int]]:
    return [labels.tolist() for _, labels in loader]


def flat(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def epoch_of(loader: DataLoader, epoch: int) -> list[list[int]]:
    loader.sampler.set_epoch(epoch)
    return batches(loader)


# --- training


@pytest.mark.parametrize(
    ("size", "world_size", "batch_size", "expected"),
    [(20, 2, 3, 3), (20, 3, 3, 2), (18, 3, 3, 2), (17, 3, 3, 1), (12, 4, 3, 1), (23, 1, 5, 4)],
)
def test_every_rank_gets_as_many_batches_of_the_same_size(
    size: int, world_size: int, batch_size: int, expected: int
) -> None:
    seen: list[int] = []
    for rank in range(world_size):
        loader = train_loader(Numbers(size), rank, world_size, batch_size)
        mine = epoch_of(loader, 0)
        assert [len(batch) for batch in mine] == [batch_size] * expected
        assert len(loader) == loader.sampler.batches_per_epoch == expected
        seen += flat(mine)
    assert len(set(seen)) == len(seen) == expected * world_size * batch_size
    assert set(seen) <= set(range(size))


def test_the_global_batch_does_not_depend_on_the_number_of_ranks() -> None:
    def steps(world_size: int) -> list[list[int]]:
        shards = [
            epoch_of(train_loader(Numbers(50), rank, world_size, 12 // world_size), 1)
            for rank in range(world_size)
        ]
        return [sorted(flat(parts)) for parts in zip(*shards, strict=True)]

    assert len(steps(1)) == 4
    assert steps(1) == steps(2) == steps(3) == steps(4)


def test_epochs_and_seeds_differ_and_repeat() -> None:
    loader = train_loader(Numbers(40), batch_size=10)
    first, second = epoch_of(loader, 0), epoch_of(loader, 1)
    assert first != second
    assert first == epoch_of(loader, 0)
    assert first == epoch_of(train_loader(Numbers(40), batch_size=10), 0)
    assert first != epoch_of(train_loader(Numbers(40), batch_size=10, seed=7), 0)


def test_what_is_left_over_differs_from_epoch_to_epoch() -> None:
    loader = train_loader(Numbers(11), batch_size=10)
    assert len({frozenset(epoch_of(loader, epoch)[0]) for epoch in range(10)}) > 1


@pytest.mark.parametrize("start", [0, 1, 3, 4])
def test_a_resumed_epoch_goes_on_where_it_was(start: int) -> None:
    whole = epoch_of(train_loader(Numbers(26), rank=1, world_size=2, batch_size=3), 5)
    assert len(whole) == 4
    dataset = Numbers(26)
    loader = train_loader(dataset, rank=1, world_size=2, batch_size=3)
    loader.sampler.set_epoch(5, start)
    assert len(loader) == 4 - start
    assert batches(loader) == whole[start:]
    # What was skipped was not read.
    assert dataset.read == flat(whole[start:])
    # The next epoch starts at its beginning.
    loader.sampler.set_epoch(6)
    assert len(batches(loader)) == len(loader) == 4


def test_too_few_images() -> None:
    with pytest.raises(UsageError, match="got 11 images; use a smaller batch size"):
        train_loader(Numbers(11), world_size=3, batch_size=4)


# --- testing


@pytest.mark.parametrize(("size", "world_size"), [(7, 3), (6, 3), (2, 4), (0, 2), (5, 1)])
def test_every_test_image_is_in_one_shard_once(size: int, world_size: int) -> None:
    shards = [
        flat(batches(exact_loader(Numbers(size), rank, world_size))) for rank in range(world_size)
    ]
    assert shards == [list(range(rank, size, world_size)) for rank in range(world_size)]
    assert sorted(flat(shards)) == list(range(size))


# --- random numbers and worker processes


def test_loading_leaves_the_global_generators_alone() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    epoch_of(train_loader(Numbers(9), batch_size=3), 0)
    batches(exact_loader(Numbers(9), 0, 1))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())


@pytest.fixture
def drawing() -> Iterator[list[DataLoader]]:
    """Loaders of ranks 0 and 1, each with two workers."""
    made = [train_loader(Draws(), rank, 2, 1, workers=2) for rank in range(2)]
    yield made
    pids = [
        worker.pid for loader in made if loader._iterator for worker in loader._iterator._workers
    ]
    made.clear()
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < deadline, "a worker outlives its loader"
        time.sleep(0.05)


def test_workers(drawing: list[DataLoader]) -> None:
    before = torch.get_rng_state()
    rows = [torch.cat([rows for rows, _ in loader]) for loader in drawing]
    assert torch.equal(before, torch.get_rng_state())

    # A seed for each rank and worker: nothing is drawn twice, from any of the three generators.
    draws = torch.cat(rows)[:, :3]
    assert draws.unique().numel() == draws.numel() == 8 * 3
    # The batches alternate between the workers, in the sampler's order.
    for loader, mine in zip(drawing, rows, strict=True):
        assert mine[:, 3].tolist() == [0, 1, 0, 1]
        assert mine[:, 6].tolist() == list(loader.sampler)

    # Not forked from this process, and out of its process group.
    assert all(
        loader.multiprocessing_context.get_start_method() == "forkserver" for loader in drawing
    )
    assert torch.equal(torch.cat(rows)[:, 4], torch.cat(rows)[:, 5])

    # The next epoch has the same workers, and begins where it is told.
    loader = drawing[0]
    loader.sampler.set_epoch(1, 2)
    again = torch.cat([rows for rows, _ in loader])
    assert again[:, 6].tolist() == list(loader.sampler)
    assert set(again[:, 4].tolist()) == set(rows[0][:, 4].tolist())


RANK = """
import signal
import sys
from pathlib import Path

import ddp_from_scratch as ddp
from ddp_from_scratch.training.datasets import load_dataset
from ddp_from_scratch.training.loaders import train_loader
from ddp_from_scratch.training.settings import Settings

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: None)
data = load_dataset("digits", Path(), download=False)
world = ddp.process_group("gloo")
loader = train_loader(data.train, Settings(batch_size=64, workers=2), world)
while True:
    print(sum(1 for _ in loader), *(w.pid for w in loader._iterator._workers), flush=True)
    sys.stdin.readline()
"""


def runs(pid: int) -> bool:
    """Whether the process is there, and no zombie that nobody waits for."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")
def test_workers_outlive_signals_to_the_job_but_not_their_rank() -> None:
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    with rank:
        try:
            batches_read, *workers = map(int, rank.stdout.readline().split())
            assert batches_read == 1437 // 64
            server = parent(workers[0])
            # As Ctrl-C and a launcher's kill: to the rank and all in its process group.
            os.killpg(rank.pid, signal.SIGINT)
            os.killpg(rank.pid, signal.SIGTERM)
            time.sleep(0.3)
            assert all(map(runs, [rank.pid, server, *workers]))
            print(file=rank.stdin, flush=True)
            assert rank.stdout.readline().split() == [str(batches_read), *map(str, workers)]
        finally:
            os.kill(rank.pid, signal.SIGKILL)
        deadline = time.monotonic() + 4
        while any(map(runs, [server, *workers])):
            assert time.monotonic() < deadline, "a worker outlives its rank"
            time.sleep(0.05)
