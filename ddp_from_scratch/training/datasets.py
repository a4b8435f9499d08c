"""Opens datasets, and deals them out to the ranks: shuffled to train on, in exact parts to test on.

No dataset uses random augmentation: image i is always the same tensor. No loader touches the global
random generators. So a resumed run matches an uninterrupted one bit for bit.
"""

import os
import signal
import socket
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from multiprocessing import forkserver, parent_process
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import multiprocessing
from torch.utils.data import DataLoader, Dataset, Sampler

from ddp_from_scratch import UsageError, World
from ddp_from_scratch.training.errors import needs_extra, one_line
from ddp_from_scratch.training.settings import DATASETS, Settings

Sample: TypeAlias = tuple[torch.Tensor, int]
"""One image, float32 of shape (channels, image_size, image_size), and its label."""

NUM_CLASSES = 10  # of every dataset here


@dataclass(frozen=True)
class ImageData:
    """A dataset in two sized parts, with images of `channels` x `image_size` x `image_size`."""

    train: Dataset[Sample]
    test: Dataset[Sample]
    channels: int
    image_size: int
    num_classes: int = NUM_CLASSES

    def model_spec(self, name: str) -> dict[str, Any]:
        """Returns the arguments with which `make_model` makes a model for these images."""
        shape = {"channels": self.channels, "image_size": self.image_size}
        return {"name": name, **shape, "num_classes": self.num_classes}

    def summary(self) -> str:
        checksum = 0
        for part in (self.train, self.test):
            # Noise has neither: it depends only on the code, which ranks compare, too.
            for name in ("data", "targets"):
                values = np.ascontiguousarray(getattr(part, name, ()))
                checksum = zlib.crc32(values.data, checksum)
        sizes = " + ".join(f"{len(cast(Sized, part)):,}" for part in (self.train, self.test))
        shape = f"{self.channels}x{self.image_size}x{self.image_size}"
        return f"{sizes} images of {shape}, checksum {checksum:08x}"


def load_dataset(name: str, data_dir: Path, download: bool) -> ImageData:
    """Opens a dataset; its images are normalised by a fixed mean and standard deviation.

    `data_dir` has torchvision's layout. One rank of a machine calls first, with `download`.
    """
    if name not in DATASETS:
        raise UsageError(f"unknown dataset {name!r}: expected one of {', '.join(DATASETS)}")
    if name == "digits":
        return ImageData(_Digits("train"), _Digits("t10k"), channels=1, image_size=8)
    if name == "fake":
        return ImageData(_Noise(2048), _Noise(512, offset=2048), channels=3, image_size=32)
    return _from_torchvision(name, data_dir.expanduser(), download)


DIGITS_DIR = Path(__file__).parent / "data" / "digits"
_DIGITS_MEAN, _DIGITS_STD = (4.886 / 255,), (6.015 / 255,)  # their pixels are 0 to 16


class _Digits(Dataset[Sample]):
    """The digits in this package, in MNIST's format; their README.md names the source."""

    def __init__(self, part: str) -> None:
        # uint8 pixels (N x 8 x 8) and int64 labels (N), named as in torchvision.
        self.data = torch.from_numpy(_read_idx(DIGITS_DIR / f"{part}-images-idx3-ubyte"))
        self.targets = torch.from_numpy(_read_idx(DIGITS_DIR / f"{part}-labels-idx1-ubyte")).long()
        # In ToTensor's order of operations, which decides the bits.
        pixels = self.data.unsqueeze(1).to(torch.float32).div(255)
        self._images = _normalize(pixels, _DIGITS_MEAN, _DIGITS_STD)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Sample:
        return self._images[index], int(self.targets[index])


class _Noise(Dataset[Sample]):
    """Uniform noise in CIFAR-10's shape; the seed of image i is `offset` + i."""

    def __init__(self, size: int, offset: int = 0) -> None:
        self._size, self._offset = size, offset

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Sample:
        # A new generator, so that an image does not depend on those read before it.
        generator = torch.Generator().manual_seed(self._offset + index)
        image = torch.rand((3, 32, 32), generator=generator)
        label = int(torch.randint(NUM_CLASSES, (), generator=generator))
        return _normalize(image, (0.5,) * 3, (12**-0.5,) * 3), label


def _normalize(images: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    # `sub` before `div`, for the bits of torchvision's Normalize.
    shift, scale = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
    return images.sub(shift).div(scale)


def _read_idx(path: Path) -> np.ndarray:
    """Reads the uint8 array of an IDX file: 0, 0, 8, number of dimensions, sizes, values."""
    content = path.read_bytes()
    sizes = np.frombuffer(content, ">u4", count=content[3], offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + sizes.nbytes).reshape(sizes).copy()


# The reader, channels, image size, and the mean and standard deviation of the training pixels.
_TORCHVISION: dict[str, tuple[str, int, int, tuple[float, ...], tuple[float, ...]]] = {
    "mnist": ("MNIST", 1, 28, (0.1307,), (0.3081,)),
    "fashion-mnist": ("FashionMNIST", 1, 28, (0.2860,), (0.3530,)),
    "cifar10": ("CIFAR10", 3, 32, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}


def _from_torchvision(name: str, root: Path, download: bool) -> ImageData:
    # Imported here because it takes longer than torch.
    with needs_extra("train"):
        from torchvision import datasets
        from torchvision.transforms import Compose, Normalize, ToTensor

    reader_name, channels, image_size, mean, std = _TORCHVISION[name]
    transform = Compose([ToTensor(), Normalize(mean, std)])
    reader = partial(getattr(datasets, reader_name), root, transform=transform)
    if download:
        before = socket.getdefaulttimeout()
        socket.setdefaulttimeout(30.0)  # torchvision sets none, and all other ranks wait
        try:
            reader(download=True)  # a single archive, or those of both parts
        except (OSError, HTTPException, RuntimeError) as error:  # RuntimeError: a wrong md5
            raise UsageError(
                f"cannot download {name} to {root}: {one_line(error)}; check the network and the "
                "folder, or copy the files there from another machine"
            ) from error
        finally:
            socket.setdefaulttimeout(before)
    try:
        train, test = reader(train=True), reader(train=False)
    except Exception as error:  # damaged data may raise anything
        if "not found" in str(error):  # torchvision's text, for CIFAR-10 also at a wrong md5
            raise UsageError(
                f"{name} not found, or corrupt, in {root}: pass --download to fetch it, or "
                f"--data-dir with the folder that holds it"
            ) from error
        raise UsageError(
            f"cannot read {name} in {root} ({one_line(error)}); delete what is truncated or "
            f"corrupt there, and pass --download to fetch it again"
        ) from error
    return ImageData(train, test, channels, image_size)


# Parts of ranks ---------------------------------------------------------------------------------


class StepSampler(Sampler[int]):
    """torch's DistributedSampler with shuffling, but an epoch can start at any step.

    The permutation of a seed and epoch is dealt out like cards, here to 2 ranks in batches of 3:

        position            0           1           2       left over
        permutation   | a b c d e f | g h i j k l | m n o p q r | s t
        rank 0          a   c   e     g   i   k     m   o   q
        rank 1            b   d   f     h   j   l     n   p   r

    So step i of an epoch has the same images on any number of ranks with one global batch size.
    With `--virtual-ranks` the images are dealt to virtual ranks, and a rank gets the batches of its
    virtual ranks in turn: in each step `accumulate` of the first, then as many of the next.
    """

    def __init__(self, size: int, settings: Settings, world: World) -> None:
        self._size, self._seed = size, settings.seed
        self._parts = parts = settings.parts(world.world_size)
        batch_size, accumulate = settings.rank_batch_size(world.world_size), settings.accumulate
        self._mine, of = [world.rank], "ranks"
        if settings.virtual_ranks is not None:
            if parts < world.world_size:
                raise UsageError(
                    f"--virtual-ranks must be at least the number of ranks, {world.world_size}, "
                    f"got {parts}"
                )
            # As `Reducer.virtual_rank_range` with equal parts, in the order in which they run.
            first, end = (r * parts // world.world_size for r in (world.rank, world.rank + 1))
            self._mine, of = [*range(first, end)][::-1], "virtual ranks"
        batches = size // (parts * batch_size)
        if batches == 0:
            raise UsageError(
                f"the training images must fill one batch of {batch_size} on each of "
                f"{parts} {of}, got {size} images; use a smaller batch size or fewer {of}"
            )
        if batches < accumulate:
            raise UsageError(
                f"--accumulate {accumulate} is more than the {batches} batches of an epoch"
            )
        # Images that do not fill a batch, or a step, are left out at the end.
        self.steps_per_epoch: int = batches // accumulate
        self.global_batch_size: int = batch_size * parts * accumulate
        self.set_epoch(0)

    def set_epoch(
        self,
        epoch: int,
        first_step: int = 0,
        first: Sequence[int] | None = None,
        later: Sequence[int] | None = None,
    ) -> None:
        """Starts the epoch at a step.

        This rank runs the virtual ranks `first` in that step, and `later` in the steps after it.
        None means its equal part of them.
        """
        self._epoch, self._first_step = epoch, first_step
        self._first = self._mine if first is None else list(first)
        self._later = self._mine if later is None else list(later)

    def is_for(self, step: int, virtual_ranks: Sequence[int]) -> bool:
        """True if the images of this step are those of these virtual ranks."""
        planned = self._first if step == self._first_step else self._later
        return planned == list(virtual_ranks)

    def images_of(self, step: int, virtual_rank: int) -> list[int]:
        """Returns the images of a virtual rank, also of another rank's, in a step of the epoch."""
        return self._dealt()[step, :, virtual_rank].tolist()

    def _dealt(self) -> torch.Tensor:
        """Returns the images of the epoch by step, then in order, then by (virtual) rank."""
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        images = torch.randperm(self._size, generator=generator)
        images = images[: self.steps_per_epoch * self.global_batch_size]
        return images.view(self.steps_per_epoch, -1, self._parts)

    def __iter__(self) -> Iterator[int]:
        dealt = self._dealt()
        first, later = dealt[self._first_step :][:1], dealt[self._first_step + 1 :]
        parts = first[:, :, self._first], later[:, :, self._later]
        return iter(torch.cat([part.mT.flatten() for part in parts]).tolist())

    def __len__(self) -> int:
        per_part = self.global_batch_size // self._parts
        later = self.steps_per_epoch - self._first_step - 1
        return max(0, len(self._first) + later * len(self._later)) * per_part


def make_loader(
    dataset: Dataset[Sample], settings: Settings, world: World, *, train: bool
) -> DataLoader[Sample]:
    """Returns the loader of this rank's images; a batch is float32 (N, C, H, W) and int64 (N,).

    To train: shuffled, by `StepSampler`; `len(loader)` counts the batches left in the epoch.
    To test: every world_size-th image in order, so sums over ranks are exact. A rank may have one
    image less than another, and so one batch less, or none (`most_test_batches`).
    """
    size, batch_size = len(cast(Sized, dataset)), settings.rank_batch_size(world.world_size)
    sampler: Iterable[int] = range(world.rank, size, world.world_size)
    if train:
        sampler = StepSampler(size, settings, world)
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
        pin_memory=world.device.type == "cuda",
        # The average weights all ranks equally, so all need the same number of batches of one size.
        # Padding would count images twice and end on a small batch, where batch norm may fail.
        drop_last=train,
        persistent_workers=workers > 0,
        worker_init_fn=_begin_worker,
        multiprocessing_context=context,
        generator=generator,
    )


def most_test_batches(loader: DataLoader[Sample], world: World) -> int:
    """Returns the largest number of test batches of any rank: that of rank 0."""
    images = len(range(0, len(cast(Sized, loader.dataset)), world.world_size))
    assert loader.batch_size is not None, "`make_loader` passes one"
    return -(-images // loader.batch_size)


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


def _begin_worker(_worker_id: int) -> None:
    """Makes a worker end with its rank, and not before; lets it use all cores of the job."""
    # Not only those of its rank, which computes there; what a bound rank starts inherits them.
    if cpus := os.environ.get("DDP_WORKER_CPUS"):
        with suppress(OSError):  # a cpuset may have changed since
            os.sched_setaffinity(0, [int(cpu) for cpu in cpus.split(",")])
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
