"""torchvision's datasets on disk: found, downloaded, read and checked.

A module of its own, since torchvision takes longer to import than torch.
"""

import os
import pickle
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch.utils.data import Dataset
from torchvision.datasets import CIFAR10, MNIST, FashionMNIST
from torchvision.datasets.utils import check_integrity
from torchvision.transforms import Compose, Normalize, ToTensor

from ddp_from_scratch.errors import UsageError, one_line
from ddp_from_scratch.training.image_data import NUM_CLASSES, Sample

_NETWORK_TIMEOUT_S = 30.0

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
class Kind:
    """One dataset in a folder, and the mean and deviation of its training pixels."""

    name: str
    root: Path
    reader: type[Any]
    channels: int
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def files(self, root: Path) -> dict[Path, str | None]:
        """The files that the reader opens under `root`, each with its md5 if known."""
        if issubclass(self.reader, CIFAR10):
            folder = root / self.reader.base_folder
            listed = [*self.reader.train_list, *self.reader.test_list]
            listed.append((self.reader.meta["filename"], self.reader.meta["md5"]))
            return {folder / name: md5 for name, md5 in listed}
        folder = root / self.reader.__name__ / "raw"
        # The md5 that torchvision lists is the archive's, not the file's.
        return {folder / Path(name).stem: None for name, _ in self.reader.resources}

    def missing(self) -> list[Path]:
        """The files that are not there."""
        return [path for path in self.files(self.root) if not os.path.isfile(path)]

    def read(self, part: Literal["training", "test"]) -> Dataset[Sample]:
        """Opens one part through torchvision's reader and checks that it is whole.

        Raises:
            UsageError: it cannot be read, or is not.
        """
        transform = Compose([ToTensor(), Normalize(self.mean, self.std)])
        try:
            images: Any = self.reader(self.root, train=part == "training", transform=transform)
        except OSError as error:
            raise UsageError(
                f"cannot read {self.name}: {error.filename}: {one_line(error)}; check its "
                f"permissions"
            ) from error
        except _CORRUPT as error:
            raise self._corrupt(part, one_line(error)) from error
        problem = _problem(images, self.image_size)
        if problem is not None:
            raise self._corrupt(part, problem)
        checked: Dataset[Sample] = images
        return checked

    def _corrupt(self, part: str, problem: str) -> UsageError:
        """The error for files that are there and of no use; names one that is damaged."""
        files = self.files(self.root)
        path = next((path for path, md5 in files.items() if not check_integrity(path, md5)), None)
        if path is None:
            path = next(iter(files)).parent
        else:
            problem = "wrong md5"
        return UsageError(
            f"{self.name}'s {part} images are truncated or corrupt ({problem}) in {path}; delete "
            f"it and pass --download to fetch it again"
        )


def open_kind(name: str, root: Path, download: bool) -> Kind:
    """The dataset `name` in the folder `root`, with all its files there.

    Raises:
        UsageError: they are not, or could not be fetched.
    """
    kind = {
        "mnist": Kind("mnist", root, MNIST, 1, 28, (0.1307,), (0.3081,)),
        "fashion-mnist": Kind("fashion-mnist", root, FashionMNIST, 1, 28, (0.2860,), (0.3530,)),
        "cifar10": Kind(
            "cifar10", root, CIFAR10, 3, 32, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
        ),
    }[name]
    if kind.missing() and download:
        _download(kind)
    if missing := kind.missing():
        raise UsageError(
            f"{name} not found in {root}: there is no {missing[0]}; pass --download to fetch it, "
            f"or --data-dir with the folder that holds it"
        )
    return kind


def _problem(part: Any, image_size: int) -> str | None:
    """The first fault of a part that torchvision could read; None if all is well."""
    labels = torch.as_tensor(part.targets)
    size = (image_size, image_size)
    if len(part.data) != len(labels):
        return f"{len(part.data)} images but {len(labels)} labels"
    if tuple(part.data.shape[1:3]) != size:
        return f"expected images of {size}, got {tuple(part.data.shape[1:3])}"
    if not 0 <= int(labels.min()) <= int(labels.max()) < NUM_CLASSES:
        return f"expected labels 0 to {NUM_CLASSES - 1}, got {labels.min()} to {labels.max()}"
    return None


def _download(kind: Kind) -> None:
    """Fetches the dataset into a folder of its own and moves missing files from there."""
    # torchvision unpacks straight to the final name, and for MNIST then takes any file of that name
    # for a whole one. Here a file gets its final name, by a rename, only after all were read.
    root = kind.root
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
            f"cannot download {kind.name} to {root}: {one_line(error)}; check the network and the "
            "folder, or copy the files there from another machine"
        ) from error


@contextmanager
def _socket_timeout() -> Iterator[None]:
    """Sets a timeout for torchvision's connections, which have none."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_NETWORK_TIMEOUT_S)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
