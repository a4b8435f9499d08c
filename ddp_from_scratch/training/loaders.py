"""Deals a dataset out to the ranks: shuffled parts to train on, exact parts to test on.

Neither loader touches the global random generators, so a resumed run needs only a checkpoint of
those to repeat the old one.
"""

import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sized
from multiprocessing import forkserver, parent_process
from typing import Any, cast

import numpy as np
import torch
from torch import multiprocessing
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from ddp_from_scratch import gpu
from ddp_from_scratch.errors import UsageError
from ddp_from_scratch.training.datasets import ImageData, Sample
from ddp_from_scratch.training.settings import Settings
from ddp_from_scratch.virtual_ranks.tree_reduction import virtual_rank_range
from ddp_from_scratch.world import World


class _Sampler(DistributedSampler[int]):
    """A shuffling DistributedSampler whose epochs can start at any batch.

    The permutation of a seed and epoch is dealt out like cards, here to 2 ranks in batches of 3:

        position            0           1           2       left over
        permutation   | a b c d e f | g h i j k l | m n o p q r | s t
        rank 0          a   c   e     g   i   k     m   o   q
        rank 1            b   d   f     h   j   l     n   p   r

    So step i of an epoch has the same images on any number of ranks with one global batch size.
    With `--virtual-ranks` the images are dealt to virtual ranks, and a rank gets the batches of its
    virtual ranks in turn: in each step `accumulate` of the first, then as many of the next.
    """

    def __init__(self, dataset: Dataset[Any], settings: Settings, world: World) -> None:
        parts = settings.parts(world.world_size)
        super().__init__(dataset, parts, world.rank, seed=settings.seed, drop_last=True)
        self.batch_size = settings.rank_batch_size(world.world_size)
        self.batches_per_epoch = self.num_samples // self.batch_size
        self.start_batch = 0  # of an epoch; earlier batches are not loaded
        self._mine, self._at_once = [world.rank], 1
        if settings.virtual_ranks is not None:
            self._mine = list(virtual_rank_range(parts, world.rank, world.world_size)[::-1])
            self._at_once = settings.accumulate
        # Images that do not fill a batch, or a step, are left out at the end.
        self._end = self.batches_per_epoch // self._at_once * self._at_once * self.batch_size

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        super().set_epoch(epoch)
        self.start_batch = start_batch

    def __iter__(self) -> Iterator[int]:
        of_each = []
        for part in self._mine:
            self.rank = part  # the rank that torch's sampler deals to
            of_each.append(list(super().__iter__()))
        size = self._at_once * self.batch_size
        begins = range(self.start_batch * self.batch_size, self._end, size)
        return (index for i in begins for images in of_each for index in images[i : i + size])

    def __len__(self) -> int:
        return (self._end - self.start_batch * self.batch_size) * len(self._mine)


def make_loader(
    dataset: Dataset[Sample], settings: Settings, world: World, *, train: bool
) -> DataLoader[Sample]:
    """Returns the loader of this rank's images; a batch is float32 (N, C, H, W) and int64 (N,).

    To train: shuffled, by `_Sampler`; `len(loader)` counts the batches left in the epoch. To test:
    every world_size-th image in order, so sums over ranks are exact. A rank may have one less, or
    none, so it must not communicate in each batch.
    """
    size, batch_size = len(cast(Sized, dataset)), settings.rank_batch_size(world.world_size)
    sampler: Iterable[int] = range(world.rank, size, world.world_size)
    if train:
        parts = settings.parts(world.world_size)
        of = "virtual ranks" if settings.virtual_ranks else "ranks"
        if size < parts * batch_size:
            raise UsageError(
                f"the training images must fill one batch of {batch_size} on each of "
                f"{parts} {of}, got {size} images; use a smaller batch size or fewer {of}"
            )
        sampler = _Sampler(dataset, settings, world)
    # DataLoader draws a base seed even without workers, so it gets a generator of its own. A worker
    # seeds torch, numpy and random with base seed + worker id, so the seed depends on the rank.
    seeds = np.random.SeedSequence((settings.seed, world.rank)).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(seeds[0]))
    workers, context = settings.workers, None
    if workers:
        # Not fork, where a child inherits the locks of MPI and CUDA, but not their threads.
        context = multiprocessing.get_context("forkserver")
        _start_fork_server(type(dataset).__module__)
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        num_workers=workers,
        pin_memory=gpu.is_gpu(world.device),
        # The average weighs all ranks equally, so all need the same number of batches of one size.
        # Padding would count images twice and end on a small batch, where batch norm may fail.
        drop_last=train,
        persistent_workers=workers > 0,
        worker_init_fn=_begin_worker,
        multiprocessing_context=context,
        generator=generator,
    )


def _start_fork_server(preload: str) -> None:
    """Starts the process that imports torch and forks this rank's workers. Idempotent."""
    forkserver.set_forkserver_preload([preload])
    # The server must ignore these signals, as it already ignores Ctrl-C. A launcher sends them to
    # all processes of a rank, which first finishes its step and saves, while workers end with their
    # server. The server keeps ignoring them; its workers get torch's handler.
    stops = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in stops}
    try:
        forkserver.ensure_running()
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _begin_worker(worker_id: int) -> None:
    """Makes a worker end with its rank, and not before."""
    # In its own process group: neither Ctrl-C nor a launcher's SIGTERM ends it early.
    os.setpgrp()
    # torch watches the parent, which is the fork server, and the server lives as long as its
    # workers: all of them would outlive a killed rank.
    rank = parent_process()
    assert rank is not None

    def end_with_rank() -> None:
        rank.join()
        os._exit(1)

    threading.Thread(target=end_with_rank, daemon=True).start()


class RankData:
    """The loaders of one rank; a UsageError if images and ranks do not fit. No communication."""

    def __init__(self, data: ImageData, settings: Settings, world: World) -> None:
        if settings.virtual_ranks is not None and settings.virtual_ranks < world.world_size:
            raise UsageError(
                f"--virtual-ranks must be at least the number of ranks, {world.world_size}, "
                f"got {settings.virtual_ranks}"
            )
        self.train = make_loader(data.train, settings, world, train=True)
        self.test = make_loader(data.test, settings, world, train=False)
        assert isinstance(self.train.sampler, _Sampler)
        self.sampler = self.train.sampler
        # Equal on all ranks, as is the size of the batches.
        batches = self.sampler.batches_per_epoch
        if batches < settings.accumulate:
            raise UsageError(
                f"--accumulate {settings.accumulate} is more than the {batches} batches of an epoch"
            )
        parts = settings.parts(world.world_size)
        self.global_batch_size = self.sampler.batch_size * parts * settings.accumulate
        # Batches that do not fill a step are left out, like images that do not fill a batch.
        self.steps_per_epoch = batches // settings.accumulate
        self.model_spec: dict[str, Any] = {
            "name": settings.model,
            "channels": data.channels,
            "image_size": data.image_size,
            "num_classes": data.num_classes,
        }
