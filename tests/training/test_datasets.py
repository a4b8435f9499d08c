"""The datasets, read from small files in their real formats."""

import struct
from pathlib import Path
from unittest.mock import Mock
from urllib.error import URLError

import numpy as np
import pytest
import torch

from ddp_from_scratch.training.datasets import load_dataset
from tests.support.refusal import refusal

MNIST = pytest.importorskip("torchvision.datasets").MNIST

NOWHERE = Path("/nonexistent")


def write_idx(path, values):
    header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(header + values.astype(np.uint8).tobytes())


def write_mnist(raw):
    """Three images to train on; image i is filled with 10 times i, its label."""
    raw.mkdir(parents=True)
    for part, count in (("train", 3), ("t10k", 2)):
        labels = np.arange(count)
        images = np.broadcast_to(10 * labels[:, None, None], (count, 28, 28))
        write_idx(raw / f"{part}-images-idx3-ubyte", images)
        write_idx(raw / f"{part}-labels-idx1-ubyte", labels)
    return raw


def test_digits_come_with_the_package_and_normalised(tmp_path):
    data = load_dataset("digits", tmp_path, download=True)
    assert list(tmp_path.iterdir()) == []
    assert (len(data.train), len(data.test)) == (1437, 360)
    assert (data.num_classes, data.channels, data.image_size) == (10, 1, 8)
    image, label = data.train[0]
    assert (image.dtype, image.shape, type(label)) == (torch.float32, (1, 8, 8), int)
    train = torch.stack([image for image, _ in map(data.train.__getitem__, range(1437))])
    assert abs(train.mean().item()) < 1e-3
    assert abs(train.std().item() - 1) < 1e-3
    counts = torch.bincount(torch.tensor([data.test[i][1] for i in range(360)]))
    assert 35 <= counts.min() <= counts.max() <= 37


def test_fake_is_the_same_noise_every_time(tmp_path):
    first = load_dataset("fake", tmp_path, download=True)
    assert list(tmp_path.iterdir()) == []
    before = torch.get_rng_state()
    second = load_dataset("fake", NOWHERE, download=False)
    assert (first.num_classes, first.channels, first.image_size) == (10, 3, 32)
    for part, again in ((first.train, second.train), (first.test, second.test)):
        image, label = part[5]
        assert (image.dtype, image.shape, type(label)) == (torch.float32, (3, 32, 32), int)
        assert torch.equal(image, again[5][0])
        assert label == again[5][1]
    assert torch.equal(before, torch.get_rng_state())
    assert {first.train[i][1] for i in range(200)} == set(range(10))


def test_mnist_files(tmp_path):
    write_mnist(tmp_path / "FashionMNIST" / "raw")
    data = load_dataset("fashion-mnist", tmp_path, download=False)
    assert (len(data.train), len(data.test)) == (3, 2)
    assert (data.num_classes, data.channels, data.image_size) == (10, 1, 28)
    image, label = data.train[2]
    assert label == 2
    torch.testing.assert_close(image, torch.full((1, 28, 28), (20 / 255 - 0.2860) / 0.3530))


def test_missing_and_corrupt_files_say_what_to_do(tmp_path):
    for name in ("mnist", "cifar10"):
        told = refusal(load_dataset, name, tmp_path, download=False)
        assert f"{name} not found, or corrupt, in {tmp_path}: pass --download to fetch" in told
    told = refusal(load_dataset, "imagenet", tmp_path, download=False)
    assert "unknown dataset 'imagenet': expected one of " in told
    path = write_mnist(tmp_path / "MNIST" / "raw") / "train-images-idx3-ubyte"
    for damaged in (path.read_bytes()[:1000], b"<html>not there</html>"):
        path.write_bytes(damaged)
        told = refusal(load_dataset, "mnist", tmp_path, download=False)
        assert told.startswith(f"cannot read mnist in {tmp_path} (")


def test_download(tmp_path, monkeypatch):
    monkeypatch.setattr(MNIST, "download", lambda self: write_mnist(Path(self.raw_folder)))
    assert len(load_dataset("mnist", tmp_path / "not" / "yet", download=True).train) == 3
    for error in (URLError("not found"), RuntimeError("another checksum")):
        monkeypatch.setattr(MNIST, "download", Mock(side_effect=error))
        told = refusal(load_dataset, "mnist", tmp_path, download=True)
        assert told.startswith(f"cannot download mnist to {tmp_path}: ")
        assert "; check the network" in told
