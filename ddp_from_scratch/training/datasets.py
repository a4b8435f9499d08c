"""Images to train on: digits that ship with the package, torchvision's datasets, and noise.

No dataset augments at random, so image i is the same tensor whenever and wherever it is read, and a
resumed run repeats, bit for bit, the run that was not stopped.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from ddp_from_scratch.errors import UsageError, needs_extra
from ddp_from_scratch.training.image_data import NUM_CLASSES, ImageData, Sample
from ddp_from_scratch.training.settings import DATASETS

DIGITS_DIR = Path(__file__).parent / "data" / "digits"
_DIGITS_MEAN, _DIGITS_STD = (4.886 / 255,), (6.015 / 255,)  # their pixels are 0 to 16


def load_dataset(name: str, data_dir: Path, download: bool) -> ImageData:
    """Opens a dataset; its images come normalised by a fixed mean and standard deviation.

    Args:
        name: one of DATASETS.
        data_dir: a folder in torchvision's layout; not used for digits and fake.
        download: fetch missing files. Of several ranks on a machine let one call with True, and
            the others with False after it.

    Raises:
        UsageError: an unknown name; files that are missing, unreadable, truncated or corrupt; a
            download that failed, which leaves nothing behind.
    """
    if name not in DATASETS:
        raise UsageError(f"unknown dataset {name!r}: expected one of {', '.join(DATASETS)}")
    if name == "digits":
        return ImageData(Digits("train"), Digits("t10k"), channels=1, image_size=8)
    if name == "fake":
        return ImageData(Noise(2048), Noise(512, offset=2048), channels=3, image_size=32)
    # Here and not above: torchvision takes longer to import than torch.
    with needs_extra("train"):
        from ddp_from_scratch.training import torchvision_images

    kind = torchvision_images.open_kind(name, data_dir.expanduser(), download)
    return ImageData(kind.read("training"), kind.read("test"), kind.channels, kind.image_size)


class Digits(Dataset[Sample]):
    """The shipped digits (their README.md says whose), in MNIST's format.

    Raises:
        UsageError: a file is missing or damaged.
    """

    def __init__(self, part: str) -> None:
        # uint8 pixels, N x 8 x 8, and int64 labels, N: torchvision's names.
        self.data = torch.from_numpy(_read_idx(DIGITS_DIR / f"{part}-images-idx3-ubyte"))
        self.targets = torch.from_numpy(_read_idx(DIGITS_DIR / f"{part}-labels-idx1-ubyte")).long()
        # ToTensor's order of operations, which decides the bits.
        pixels = self.data.unsqueeze(1).to(torch.float32).div(255)
        self._images = _normalize(pixels, _DIGITS_MEAN, _DIGITS_STD)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Sample:
        """Image `index` and its label."""
        return self._images[index], int(self.targets[index])


class Noise(Dataset[Sample]):
    """Images of uniform noise in CIFAR-10's shape, image i drawn with the seed `offset` + i."""

    def __init__(self, size: int, offset: int = 0) -> None:
        self._size, self._offset = size, offset

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Sample:
        """Image `index`, normalised from uniform in [0, 1), and its random label."""
        # A new one for each image, which so does not depend on those read before it.
        generator = torch.Generator().manual_seed(self._offset + index)
        image = torch.rand((3, 32, 32), generator=generator)
        label = int(torch.randint(NUM_CLASSES, (), generator=generator))
        return _normalize(image, (0.5,) * 3, (12**-0.5,) * 3), label


def _normalize(images: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """Normalises each channel."""
    # First `sub`, then `div`: the bits of torchvision's Normalize.
    shift, scale = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
    return images.sub(shift).div(scale)


def _read_idx(path: Path) -> np.ndarray:
    """Reads the uint8 array of a file in MNIST's format: 0, 0, 8, dimensions, sizes, values."""
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
