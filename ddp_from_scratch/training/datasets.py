"""Opens datasets: digits that ship with the package, torchvision's datasets, and noise.

No dataset uses random augmentation: image i is always the same tensor, so a resumed run matches an
uninterrupted one bit for bit.
"""

import os
import pickle
import socket
import zlib
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias, cast

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
        """Returns one line with a checksum of images and labels."""
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

    `data_dir` has torchvision's layout; digits and fake do not use it. `download` fetches missing
    files: one rank of a machine calls with True first, then the others with False.

    Raises:
        UsageError: an unknown name; files that are missing, unreadable, truncated or corrupt; a
            download that failed, which leaves nothing behind.
    """
    if name not in DATASETS:
        raise UsageError(f"unknown dataset {name!r}: expected one of {', '.join(DATASETS)}")
    if name == "digits":
        return ImageData(_Digits("train"), _Digits("t10k"), channels=1, image_size=8)
    if name == "fake":
        return ImageData(_Noise(2048), _Noise(512, offset=2048), channels=3, image_size=32)
    return _from_torchvision(name, data_dir.expanduser(), download)


# Our own ------------------------------------------------------------------------------------------

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
    try:
        content = path.read_bytes()
        sizes = np.frombuffer(content, ">u4", count=content[3], offset=4)
        return np.frombuffer(content, np.uint8, offset=4 + sizes.nbytes).reshape(sizes).copy()
    except FileNotFoundError:
        raise UsageError(
            f"digits not found in {path.parent}: there is no {path}; install ddp_from_scratch again"
        ) from None
    except (OSError, IndexError, ValueError) as error:
        raise UsageError(
            f"digits are truncated or corrupt ({error}) in {path}; install ddp_from_scratch again"
        ) from error


# torchvision's ------------------------------------------------------------------------------------

# The reader, channels, image size, and the mean and standard deviation of the training pixels.
_TORCHVISION: dict[str, tuple[str, int, int, tuple[float, ...], tuple[float, ...]]] = {
    "mnist": ("MNIST", 1, 28, (0.1307,), (0.3081,)),
    "fashion-mnist": ("FashionMNIST", 1, 28, (0.2860,), (0.3530,)),
    "cifar10": ("CIFAR10", 3, 32, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}
_NETWORK_TIMEOUT_S = 30.0

# What torchvision's readers raise on a damaged file. Not OSError: the file may be intact.
_CORRUPT = (
    AssertionError,  # an invalid number of dimensions in an IDX header
    EOFError,  # an empty pickle
    KeyError,  # an unknown type in an IDX header
    RuntimeError,  # IDX values that do not match the header's dimensions; a wrong md5
    TypeError,  # IDX values that are not bytes
    ValueError,  # an IDX file without header or values; what `_check` finds
    pickle.UnpicklingError,
)


def _from_torchvision(name: str, root: Path, download: bool) -> ImageData:
    # Imported here because it takes longer than torch.
    with needs_extra("train"):
        from torchvision import datasets
        from torchvision.datasets.utils import check_integrity
        from torchvision.transforms import Compose, Normalize, ToTensor

    reader_name, channels, image_size, mean, std = _TORCHVISION[name]
    reader = getattr(datasets, reader_name)
    files = _files(reader, root)
    if download and not all(map(os.path.isfile, files)):
        _download(name, reader, root)
    for path in files:
        if not os.path.isfile(path):
            raise UsageError(
                f"{name} not found in {root}: there is no {path}; pass --download to fetch it, or "
                f"--data-dir with the folder that holds it"
            )
    parts = []
    for part in ("training", "test"):
        transform = Compose([ToTensor(), Normalize(mean, std)])
        try:
            parts.append(reader(root, train=part == "training", transform=transform))
            _check(parts[-1], image_size)
        except OSError as error:
            raise UsageError(
                f"cannot read {name}: {error.filename}: {one_line(error)}; check its permissions"
            ) from error
        except _CORRUPT as error:
            damaged = [path for path, md5 in files.items() if not check_integrity(path, md5)]
            problem, where = one_line(error), next(iter(files)).parent
            if damaged:
                problem, where = "wrong md5", damaged[0]
            raise UsageError(
                f"{name}'s {part} images are truncated or corrupt ({problem}) in {where}; delete "
                f"it and pass --download to fetch it again"
            ) from error
    train, test = parts
    return ImageData(train, test, channels, image_size)


def _files(reader: Any, root: Path) -> dict[Path, str | None]:
    """Lists the files that torchvision's reader opens under `root`, each with its md5 if known."""
    if reader.__name__ == "CIFAR10":
        meta = reader.meta["filename"], reader.meta["md5"]
        listed = [*reader.train_list, *reader.test_list, meta]
        return {root / reader.base_folder / name: md5 for name, md5 in listed}
    # torchvision lists the md5 of the archive, not of the file.
    folder = root / reader.__name__ / "raw"
    return {folder / Path(name).stem: None for name, _ in reader.resources}


def _check(part: Any, image_size: int) -> None:
    """Raises a ValueError for the first fault in a part that torchvision could read."""
    labels, size = torch.as_tensor(part.targets), (image_size, image_size)
    if len(part.data) != len(labels):
        raise ValueError(f"{len(part.data)} images but {len(labels)} labels")
    if tuple(part.data.shape[1:3]) != size:
        raise ValueError(f"expected images of {size}, got {tuple(part.data.shape[1:3])}")
    if not 0 <= int(labels.min()) <= int(labels.max()) < NUM_CLASSES:
        least, most = labels.min(), labels.max()
        raise ValueError(f"expected labels 0 to {NUM_CLASSES - 1}, got {least} to {most}")


def _download(name: str, reader: Any, root: Path) -> None:
    """Downloads the dataset into a temporary folder and moves missing files from there."""
    # torchvision unpacks to the final name directly, and trusts any MNIST file of that name. Here a
    # file is renamed to its final name only after all files were read.
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_NETWORK_TIMEOUT_S)  # torchvision sets none
    try:
        root.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=root, prefix=".download-") as folder:
            staging = Path(folder)
            for train in (True, False):
                reader(staging, train=train, download=train)
            for path in _files(reader, staging):
                final = root / path.relative_to(staging)
                if not final.exists():
                    final.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(path, final)
    except (OSError, HTTPException, *_CORRUPT) as error:
        raise UsageError(
            f"cannot download {name} to {root}: {one_line(error)}; check the network and the "
            "folder, or copy the files there from another machine"
        ) from error
    finally:
        socket.setdefaulttimeout(before)
