"""Images to train on: digits that ship with the package, torchvision's datasets, and noise.

Before the first gradient: what `training/loaders.py` shards over the ranks. No dataset augments at
random, so image i is the same tensor whenever and wherever it is read, and a resumed run repeats,
bit for bit, the run that was not stopped.
"""

from __future__ import annotations

import os
import pickle
import socket
import zlib
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch.utils.data import Dataset
from torchvision.datasets import CIFAR10, MNIST, FakeData, FashionMNIST
from torchvision.datasets.utils import check_integrity
from torchvision.transforms import Compose, Normalize, ToTensor

from ddp_from_scratch.errors import UsageError

DATASETS: tuple[str, ...] = ("digits", "mnist", "fashion-mnist", "cifar10", "fake")

Sample: TypeAlias = tuple[torch.Tensor, int]
"""One image, float32 of shape (channels, image_size, image_size), and its label."""

_DIGITS_DIR = Path(__file__).parent / "data" / "digits"
_NUM_CLASSES = 10  # Of every dataset here.
_NETWORK_TIMEOUT_S = 30.0

_REINSTALL = "install ddp_from_scratch again"
_FETCH = "pass --download to fetch it, or --data-dir with the folder that holds it"
_FETCH_AGAIN = "delete it and pass --download to fetch it again"

# What torchvision's readers raise on a file that is not whole. Not OSError: the file may be fine.
_CORRUPT = (
    AssertionError,  # an IDX header with no such number of dimensions
    EOFError,  # an empty pickle
    KeyError,  # an IDX header with no such type
    RuntimeError,  # IDX values that do not fill the header's dimensions; a wrong md5
    TypeError,  # IDX values that are not bytes
    ValueError,  # an IDX file without a header or without values
    pickle.UnpicklingError,
)


@dataclass(frozen=True)
class ImageData:
    """A dataset in its two parts, which also have a length, and what a model must know of it.

    Images are square: `channels` x `image_size` x `image_size`.
    """

    train: Dataset[Sample]
    test: Dataset[Sample]
    num_classes: int
    channels: int
    image_size: int

    def summary(self) -> str:
        """Return one line that is another for other images or labels."""
        checksum = 0
        for part in (self.train, self.test):
            for name in ("data", "targets"):  # noise has neither: it is a matter of the code
                values = np.ascontiguousarray(getattr(part, name, ()))
                checksum = zlib.crc32(values.data, checksum)
        sizes = " + ".join(f"{len(cast(Sized, part)):,}" for part in (self.train, self.test))
        shape = f"{self.channels}x{self.image_size}x{self.image_size}"
        return f"{sizes} images of {shape}, checksum {checksum:08x}"


class Digits(MNIST):  # type: ignore[misc]  # torchvision has no types
    """The shipped digits (their README.md says whose), read as MNIST is."""

    @property
    def raw_folder(self) -> str:
        """The folder of the IDX files: the root itself."""
        return os.fspath(self.root)


class Noise(FakeData):  # type: ignore[misc]  # torchvision has no types
    """torchvision's FakeData, drawn from a generator of its own.

    FakeData seeds the global generators for each image and puts only the CPU's back, so that on a
    GPU every dropout mask would depend on the last image read.
    """

    def __getitem__(self, index: int) -> Sample:
        """Return image `index`, uniform in [0, 1) before normalising, and its random label."""
        if not 0 <= index < len(self):
            raise IndexError(f"index must be in [0, {len(self)}), got {index}")
        generator = torch.Generator().manual_seed(self.random_offset + index)
        image = torch.rand(self.image_size, generator=generator)
        label = int(torch.randint(self.num_classes, (), generator=generator))
        return self.transform(image), label


@dataclass(frozen=True)
class _Kind:
    """How one dataset on disk is read, and the mean and deviation of its training pixels."""

    reader: type[Any]
    channels: int
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def files(self, root: Path) -> dict[Path, str | None]:
        """Return the files that the reader opens under `root`, each with its md5 if known."""
        if issubclass(self.reader, CIFAR10):
            folder = root / self.reader.base_folder
            listed = [*self.reader.train_list, *self.reader.test_list]
            listed.append((self.reader.meta["filename"], self.reader.meta["md5"]))
            return {folder / name: md5 for name, md5 in listed}
        folder = root if self.reader is Digits else root / self.reader.__name__ / "raw"
        # The md5 that torchvision lists is the archive's, not the file's.
        return {folder / Path(name).stem: None for name, _ in self.reader.resources}


# ToTensor divides by 255, so the digits' 0 to 16 become 0 to 0.063.
_KINDS = {
    "digits": _Kind(Digits, 1, 8, (4.886 / 255,), (6.015 / 255,)),
    "mnist": _Kind(MNIST, 1, 28, (0.1307,), (0.3081,)),
    "fashion-mnist": _Kind(FashionMNIST, 1, 28, (0.2860,), (0.3530,)),
    "cifar10": _Kind(CIFAR10, 3, 32, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}


def load_dataset(name: str, data_dir: Path, download: bool) -> ImageData:
    """Open the dataset `name`, one of DATASETS; its images come normalised by a fixed mean and std.

    `data_dir` is the folder in torchvision's layout; digits and fake do not look at it. Only when
    `download` is true and files are missing are they fetched, by this process: on a machine with
    several ranks let one call with true, and the others with false after it.

    Raises:
        UsageError: an unknown name; files that are missing, unreadable, truncated or corrupt; a
            download that failed, which leaves nothing behind.
    """
    if name not in DATASETS:
        raise UsageError(f"unknown dataset {name!r}: expected one of {', '.join(DATASETS)}")
    if name == "fake":
        return _load_noise()
    kind = _KINDS[name]
    root = _DIGITS_DIR if name == "digits" else data_dir.expanduser()
    missing = _missing_files(kind, root)
    if missing and download and name != "digits":
        _download(name, kind, root)
        missing = _missing_files(kind, root)
    if missing:
        remedy = _REINSTALL if name == "digits" else _FETCH
        raise UsageError(f"{name} not found in {root}: there is no {missing[0]}; {remedy}")
    return ImageData(
        train=_read(name, kind, root, train=True),
        test=_read(name, kind, root, train=False),
        num_classes=_NUM_CLASSES,
        channels=kind.channels,
        image_size=kind.image_size,
    )


def _load_noise() -> ImageData:
    """Return 2,048 training and 512 test images of noise, in CIFAR-10's shape."""
    transform = Normalize((0.5,) * 3, (12**-0.5,) * 3)
    shape = (3, 32, 32)
    train = Noise(2048, shape, _NUM_CLASSES, transform)
    test = Noise(512, shape, _NUM_CLASSES, transform, random_offset=len(train))
    return ImageData(train, test, _NUM_CLASSES, channels=3, image_size=32)


def _missing_files(kind: _Kind, root: Path) -> list[Path]:
    return [path for path in kind.files(root) if not os.path.isfile(path)]


def _read(name: str, kind: _Kind, root: Path, *, train: bool) -> Dataset[Sample]:
    """Open one part through torchvision's reader and check that it is whole."""
    transform = Compose([ToTensor(), Normalize(kind.mean, kind.std)])
    try:
        dataset: Any = kind.reader(root, train=train, transform=transform)
    except OSError as error:
        raise UsageError(
            f"cannot read {name}: {_one_line(error)}; check its permissions"
        ) from error
    except _CORRUPT as error:
        raise _corrupt(name, kind, root, train, _one_line(error)) from error
    problem = _problem(kind, dataset)
    if problem:
        raise _corrupt(name, kind, root, train, problem)
    part: Dataset[Sample] = dataset
    return part


def _corrupt(name: str, kind: _Kind, root: Path, train: bool, problem: str) -> UsageError:
    """Return the error for files that are there and of no use."""
    path = _file_with_wrong_md5(kind, root)
    if path is None:
        path = next(iter(kind.files(root))).parent
    else:
        problem = "wrong md5"
    which = "training" if train else "test"
    remedy = _REINSTALL if name == "digits" else _FETCH_AGAIN
    return UsageError(
        f"{name}'s {which} images are truncated or corrupt ({problem}) in {path}; {remedy}"
    )


def _problem(kind: _Kind, part: Any) -> str | None:
    """Return what is wrong with a part that torchvision could read, if anything."""
    labels = torch.as_tensor(part.targets)
    size = (kind.image_size, kind.image_size)
    if len(part.data) != len(labels):
        return f"{len(part.data)} images but {len(labels)} labels"
    if tuple(part.data.shape[1:3]) != size:
        return f"expected images of {size}, got {tuple(part.data.shape[1:3])}"
    if not 0 <= int(labels.min()) <= int(labels.max()) < _NUM_CLASSES:
        return f"expected labels 0 to {_NUM_CLASSES - 1}, got {labels.min()} to {labels.max()}"
    return None


def _file_with_wrong_md5(kind: _Kind, root: Path) -> Path | None:
    """Return the first such file; None where all are right or have none to compare with."""
    for path, md5 in kind.files(root).items():
        if not check_integrity(path, md5):
            return path
    return None


def _download(name: str, kind: _Kind, root: Path) -> None:
    """Fetch the dataset into a folder of its own and move in what `root` lacks.

    torchvision unpacks straight to the final name, and for MNIST then takes any file of that name
    for a whole one. Here a file gets its final name, by a rename, only after all were read.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=root, prefix=".download-") as folder, _socket_timeout():
            staging = Path(folder)
            for train in (True, False):
                kind.reader(staging, train=train, download=train)
            for path in kind.files(staging):
                final = root / path.relative_to(staging)
                if not final.exists():
                    final.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(path, final)
    except (OSError, HTTPException, *_CORRUPT) as error:
        raise UsageError(
            f"cannot download {name} to {root}: {_one_line(error)}; check the network and the "
            "folder, or copy the files there from another machine"
        ) from error


@contextmanager
def _socket_timeout() -> Iterator[None]:
    """Let no connection of torchvision's, which sets no timeout, wait for ever."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_NETWORK_TIMEOUT_S)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _one_line(error: BaseException) -> str:
    """Return the error's text on one line, or its type where it has none."""
    return " ".join(str(error).split()) or type(error).__name__
