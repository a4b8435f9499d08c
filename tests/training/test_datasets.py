"""The datasets, read from small files in their real formats."""

import functools
import gc
import gzip
import hashlib
import importlib.util
import pickle
import struct
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from ddp_from_scratch.errors import UsageError
from ddp_from_scratch.training import datasets
from ddp_from_scratch.training.datasets import DATASETS, load_dataset

_theirs = pytest.importorskip("torchvision.datasets")
CIFAR10, MNIST = _theirs.CIFAR10, _theirs.MNIST

ROOT = Path(__file__).parents[2]
NOWHERE = Path("/nonexistent")


def write_idx(path: Path, values: np.ndarray) -> None:
    header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(header + values.astype(np.uint8).tobytes())


def write_mnist(raw: Path, *, train: int = 3, test: int = 2, size: int = 28) -> None:
    """Write images that are filled with 10 times their label; image i has label i."""
    raw.mkdir(parents=True)
    for part, count in (("train", train), ("t10k", test)):
        labels = np.arange(count)
        images = np.broadcast_to(10 * labels[:, None, None], (count, size, size))
        write_idx(raw / f"{part}-images-idx3-ubyte", images)
        write_idx(raw / f"{part}-labels-idx1-ubyte", labels)


def write_cifar10(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write two images a file, red 50, green 100, blue 150, and let the reader expect them."""
    folder.mkdir(parents=True)
    pixels = np.repeat(np.array([50, 100, 150], np.uint8), 32 * 32)
    md5 = {}
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        content = pickle.dumps({"data": np.stack([pixels, pixels]), "labels": [3, 9]})
        (folder / name).write_bytes(content)
        md5[name] = hashlib.md5(content).hexdigest()
    content = pickle.dumps({"label_names": [f"class {i}" for i in range(10)]})
    (folder / "batches.meta").write_bytes(content)
    monkeypatch.setattr(
        CIFAR10, "train_list", [[f"data_batch_{i}", md5[f"data_batch_{i}"]] for i in range(1, 6)]
    )
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", md5["test_batch"]]])
    monkeypatch.setitem(CIFAR10.meta, "md5", hashlib.md5(content).hexdigest())


def assert_one_line(error: pytest.ExceptionInfo[UsageError], *parts: str) -> None:
    text = str(error.value)
    assert "\n" not in text
    for part in parts:
        assert part in text


def images(part: torch.utils.data.Dataset) -> torch.Tensor:
    return torch.stack([part[i][0] for i in range(len(part))])


# --- digits


def test_digits_come_with_the_package_and_normalised() -> None:
    data = load_dataset("digits", NOWHERE, download=False)
    assert (len(data.train), len(data.test)) == (1437, 360)
    assert (data.num_classes, data.channels, data.image_size) == (10, 1, 8)
    image, label = data.train[0]
    assert image.dtype == torch.float32
    assert image.shape == (1, 8, 8)
    assert type(label) is int
    train = images(data.train)
    assert abs(train.mean().item()) < 1e-3
    assert abs(train.std().item() - 1) < 1e-3
    for part, least, most in ((data.train, 139, 147), (data.test, 35, 37)):
        counts = torch.bincount(torch.tensor([part[i][1] for i in range(len(part))]))
        assert least <= counts.min() <= counts.max() <= most


def test_digits_ignore_download(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    load_dataset("digits", tmp_path, download=True)
    load_dataset("fake", tmp_path, download=True)
    assert list(tmp_path.iterdir()) == []


def test_digits_are_scikit_learns() -> None:
    sklearn_datasets = pytest.importorskip("sklearn.datasets")
    digits = sklearn_datasets.load_digits()
    data = load_dataset("digits", NOWHERE, download=False)
    ours = [
        (int(label), *image.flatten().tolist())
        for part in (data.train, data.test)
        for image, label in zip(part.data, part.targets, strict=True)
    ]
    theirs = [
        (int(label), *image.astype(int).flatten().tolist())
        for image, label in zip(digits.images, digits.target, strict=True)
    ]
    assert sorted(ours) == sorted(theirs)


def test_the_tool_writes_the_shipped_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("sklearn.datasets")
    tool = load_tool()
    shipped = tool.DIGITS_DIR
    monkeypatch.setattr(tool, "DIGITS_DIR", tmp_path)
    tool.main()
    written = sorted(tmp_path.iterdir())
    assert len(written) == 4
    for path in written:
        assert path.read_bytes() == (shipped / path.name).read_bytes()


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_digits", ROOT / "tools" / "make_digits.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def test_missing_digits_name_the_installation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(datasets, "DIGITS_DIR", tmp_path)
    with pytest.raises(UsageError) as error:
        load_dataset("digits", NOWHERE, download=True)
    assert_one_line(error, f"digits not found in {tmp_path}", "install ddp_from_scratch again")


# --- mnist, fashion-mnist, cifar10


@pytest.mark.parametrize(
    ("name", "folder", "mean", "std"),
    [("mnist", "MNIST", 0.1307, 0.3081), ("fashion-mnist", "FashionMNIST", 0.2860, 0.3530)],
)
def test_mnist_files(name: str, folder: str, mean: float, std: float, tmp_path: Path) -> None:
    write_mnist(tmp_path / folder / "raw")
    data = load_dataset(name, tmp_path, download=False)
    assert (len(data.train), len(data.test)) == (3, 2)
    assert (data.num_classes, data.channels, data.image_size) == (10, 1, 28)
    image, label = data.train[2]
    assert label == 2
    torch.testing.assert_close(image, torch.full((1, 28, 28), (20 / 255 - mean) / std))


def test_cifar10_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar10(tmp_path / "cifar-10-batches-py", monkeypatch)
    data = load_dataset("cifar10", tmp_path, download=False)
    assert (len(data.train), len(data.test)) == (10, 2)
    assert (data.num_classes, data.channels, data.image_size) == (10, 3, 32)
    image, label = data.test[1]
    assert label == 9
    assert image.shape == (3, 32, 32)
    for channel, (value, mean, std) in enumerate(
        [(50, 0.4914, 0.2470), (100, 0.4822, 0.2435), (150, 0.4465, 0.2616)]
    ):
        expected = torch.full((32, 32), (value / 255 - mean) / std)
        torch.testing.assert_close(image[channel], expected)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_missing_files_say_what_to_do(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        load_dataset(name, tmp_path, download=False)
    assert_one_line(error, f"{name} not found in {tmp_path}", "--download", "--data-dir")
    assert list(tmp_path.iterdir()) == []


def test_one_missing_file_is_named(tmp_path: Path) -> None:
    write_mnist(tmp_path / "MNIST" / "raw")
    path = tmp_path / "MNIST" / "raw" / "t10k-labels-idx1-ubyte"
    path.unlink()
    for _ in range(2):  # and where a folder has its name
        with pytest.raises(UsageError) as error:
            load_dataset("mnist", tmp_path, download=False)
        assert_one_line(error, f"there is no {path};")
        path.mkdir(exist_ok=True)


def cut(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])


# What is done to a folder of three training images, and what the error says of it.
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "images cut short": (lambda raw: cut(raw / "train-images-idx3-ubyte", 1000), "3, 28, 28"),
    "labels cut short": (lambda raw: cut(raw / "train-labels-idx1-ubyte", 10), "size 2"),
    "header only": (lambda raw: cut(raw / "train-images-idx3-ubyte", 16), "("),
    "half a header": (lambda raw: cut(raw / "train-images-idx3-ubyte", 6), "("),
    "empty": (lambda raw: cut(raw / "train-images-idx3-ubyte", 0), "("),
    "not IDX": (
        lambda raw: (raw / "train-images-idx3-ubyte").write_bytes(b"<html>not found</html>"),
        "AssertionError",
    ),
    "no such type": (
        lambda raw: (raw / "train-labels-idx1-ubyte").write_bytes(bytes([0, 0, 10, 1, 0, 0, 0, 0])),
        "(10)",
    ),
    "absurd dimensions": (
        lambda raw: (raw / "train-images-idx3-ubyte").write_bytes(
            bytes([0, 0, 8, 3]) + b"\xff" * 12 + b"\0"
        ),
        "(",
    ),
    "floats": (
        lambda raw: (raw / "train-labels-idx1-ubyte").write_bytes(
            bytes([0, 0, 13, 1, 0, 0, 0, 3]) + bytes(12)
        ),
        "float32",
    ),
    "labels in the place of images": (
        lambda raw: write_idx(raw / "train-images-idx3-ubyte", np.arange(3)),
        "3 dimension",
    ),
    "fewer labels": (
        lambda raw: write_idx(raw / "train-labels-idx1-ubyte", np.arange(2)),
        "3 images but 2 labels",
    ),
    "label 10": (
        lambda raw: write_idx(raw / "train-labels-idx1-ubyte", np.array([0, 10, 1])),
        "expected labels 0 to 9, got 0 to 10",
    ),
    "smaller images": (
        lambda raw: write_idx(raw / "train-images-idx3-ubyte", np.zeros((3, 8, 8))),
        "expected images of (28, 28), got (8, 8)",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_corrupt_mnist_file(damage: str, tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    write_mnist(raw)
    do, says = DAMAGE[damage]
    do(raw)
    with pytest.raises(UsageError) as error:
        load_dataset("mnist", tmp_path, download=False)
    assert_one_line(error, "mnist's training images are truncated or corrupt", says, str(raw))
    assert "delete it and pass --download" in str(error.value)


def test_no_images(tmp_path: Path) -> None:
    write_mnist(tmp_path / "MNIST" / "raw", test=0)
    with pytest.raises(UsageError, match="mnist's test images are truncated or corrupt"):
        load_dataset("mnist", tmp_path, download=False)


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path / "MNIST" / "raw")

    def refuse(self: MNIST) -> None:
        # Root, as whom the tests may run, can read any file.
        raise PermissionError(13, "Permission denied", "train-images-idx3-ubyte")

    monkeypatch.setattr(MNIST, "_load_data", refuse)
    with pytest.raises(UsageError) as error:
        load_dataset("mnist", tmp_path, download=False)
    assert_one_line(error, "cannot read mnist", "train-images-idx3-ubyte", "permissions")


def test_a_corrupt_cifar10_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    write_cifar10(folder, monkeypatch)
    cut(folder / "data_batch_4", 100)
    with pytest.raises(UsageError) as error:
        load_dataset("cifar10", tmp_path, download=False)
    assert_one_line(error, f"truncated or corrupt (wrong md5) in {folder / 'data_batch_4'};")


def test_an_unknown_name() -> None:
    with pytest.raises(UsageError) as error:
        load_dataset("imagenet", NOWHERE, download=False)
    assert_one_line(error, "unknown dataset 'imagenet'", *DATASETS)


# --- download


@pytest.fixture
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A folder, and the address at which this machine alone can fetch its files."""
    folder = tmp_path_factory.mktemp("site")

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))
    )
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def mnist_site(site: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a site that offers an MNIST of three and two images to torchvision's reader."""
    folder, address = site
    monkeypatch.setenv("no_proxy", "*")
    write_mnist(folder / "plain")
    resources = []
    for path in sorted((folder / "plain").iterdir()):
        packed = gzip.compress(path.read_bytes())
        (folder / f"{path.name}.gz").write_bytes(packed)
        resources.append((f"{path.name}.gz", hashlib.md5(packed).hexdigest()))
    monkeypatch.setattr(MNIST, "mirrors", [address])
    monkeypatch.setattr(MNIST, "resources", resources)
    return folder


def test_download(mnist_site: Path, tmp_path: Path) -> None:
    data_dir = tmp_path / "not" / "yet"
    assert len(load_dataset("mnist", data_dir, download=True).train) == 3
    raw = data_dir / "MNIST" / "raw"
    assert {path.name: path.read_bytes() for path in raw.iterdir()} == {
        path.name: path.read_bytes() for path in (mnist_site / "plain").iterdir()
    }
    # Nothing but the files stays. Of them only those that are missing are fetched again.
    assert list(data_dir.iterdir()) == [data_dir / "MNIST"]
    write_idx(raw / "train-labels-idx1-ubyte", np.array([7, 8, 9]))
    (raw / "t10k-labels-idx1-ubyte").unlink()
    data = load_dataset("mnist", data_dir, download=True)
    assert [label for _, label in (data.train[i] for i in range(3))] == [7, 8, 9]
    for path in mnist_site.glob("*.gz"):
        path.unlink()
    load_dataset("mnist", data_dir, download=True)


# urllib's answer to a missing file holds a socket, which torchvision leaves to the collector.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_a_failed_download_leaves_nothing(mnist_site: Path, tmp_path: Path) -> None:
    # The last of the four files: the other three have arrived by then.
    last = mnist_site / "train-labels-idx1-ubyte.gz"
    for damage in (lambda: cut(last, 20), last.unlink):
        damage()
        with pytest.raises(UsageError) as error:
            load_dataset("mnist", tmp_path, download=True)
        assert_one_line(error, f"cannot download mnist to {tmp_path}", "check the network")
        assert list(tmp_path.iterdir()) == []
        del error
        gc.collect()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError) as error:
        load_dataset("mnist", tmp_path / "file" / "data", download=True)
    assert_one_line(error, "cannot download mnist", "Not a directory")


# --- fake


def test_fake_is_the_same_noise_every_time() -> None:
    first = load_dataset("fake", NOWHERE, download=False)
    before = torch.get_rng_state()
    second = load_dataset("fake", NOWHERE, download=False)
    assert (first.num_classes, first.channels, first.image_size) == (10, 3, 32)
    for part, again in ((first.train, second.train), (first.test, second.test)):
        image, label = part[5]
        assert image.shape == (3, 32, 32)
        assert image.dtype == torch.float32
        assert type(label) is int
        assert torch.equal(image, again[5][0])
        assert label == again[5][1]
    assert torch.equal(before, torch.get_rng_state())
    assert {first.train[i][1] for i in range(200)} == set(range(10))
    train = images(first.train)
    assert abs(train.mean().item()) < 1e-2
    assert abs(train.std().item() - 1) < 1e-2
    together = torch.cat([train, images(first.test)]).flatten(1)
    assert len(together.unique(dim=0)) == len(together)
