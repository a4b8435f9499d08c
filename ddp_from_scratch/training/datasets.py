"""Opens datasets: digits that ship with the package, torchvision's datasets, and noise.

No dataset uses random augmentation: image i is always the same tensor, so a resumed run matches an
uninterrupted one bit for bit.
"""

import socket
import zlib
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np
import torch
from torch.utils.data import Dataset

from ddp_from_scratch.errors import UsageError, needs_extra, one_line
from ddp_from_scratch.training.settings import DATASETS

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
