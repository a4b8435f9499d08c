"""python tools/make_digits.py: write the shipped digits from scikit-learn's copy of them.

Needs scikit-learn and numpy. The output is the same bytes on every machine, so that a second run
leaves the working tree clean. What the images are and who made them: the README.md beside them.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
from sklearn.datasets import load_digits

DIGITS_DIR = Path(__file__).parents[1] / "ddp_from_scratch" / "training" / "data" / "digits"

# One image in five is a test image.
TEST_EVERY = 5
SPLIT_SEED = 0


def split(labels: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return the indices of the training and of the test images, each in ascending order.

    The images are permuted once, sorted by label in a stable way, and every fifth one is taken for
    testing: each label is then split 4 to 1, to within one image.
    """
    # RandomState and not default_rng: numpy freezes its stream, so the split never changes.
    permutation = np.random.RandomState(SPLIT_SEED).permutation(len(labels))
    by_label = permutation[np.argsort(labels[permutation], kind="stable")]
    test = np.sort(by_label[::TEST_EVERY])
    train = np.setdiff1d(by_label, test)
    return train, test


def idx_bytes(array: npt.NDArray[np.uint8]) -> bytes:
    """Return an unsigned byte array as an IDX file, the format of MNIST.

    Two zero bytes, 8 for unsigned byte, the number of dimensions, each dimension as a big-endian
    32-bit integer, then the values in row-major order.
    """
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return header + array.tobytes()


def main() -> None:
    """Write the four files of the training and the test part."""
    digits = load_digits()
    images = digits.images.astype(np.uint8)
    labels = digits.target.astype(np.uint8)
    assert np.array_equal(images, digits.images), "the values are no longer whole numbers"
    train, test = split(labels)
    for part, indices in (("train", train), ("t10k", test)):
        (DIGITS_DIR / f"{part}-images-idx3-ubyte").write_bytes(idx_bytes(images[indices]))
        (DIGITS_DIR / f"{part}-labels-idx1-ubyte").write_bytes(idx_bytes(labels[indices]))
        print(f"{part}: {len(indices)} images, {np.bincount(labels[indices])} of each digit")


if __name__ == "__main__":
    main()
