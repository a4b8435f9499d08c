"""The metrics of a run, read back from what was written."""

import json
import sys
from contextlib import closing
from pathlib import Path

import pytest

from ddp_from_scratch.errors import UsageError
from ddp_from_scratch.training.metrics import METRICS_FILE, MetricsWriter


def lines(folder: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]


def test_a_line_each_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet"
    with closing(MetricsWriter(folder)) as metrics:
        metrics.log(1, loss=0.5, accuracy=0.25)
        # Before it is closed: a killed run keeps what it wrote.
        assert lines(folder) == [{"step": 1, "loss": 0.5, "accuracy": 0.25}]
        metrics.log(2, loss=0.125)
    metrics.close()
    metrics.log(3, loss=0.125)  # closed: nothing
    assert lines(folder)[1:] == [{"step": 2, "loss": 0.125}]


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        with closing(MetricsWriter(tmp_path)) as metrics:
            metrics.log(step, loss=0.5)
    assert lines(tmp_path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.5}]


def test_an_unfinished_line_spoils_no_other(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_text('{"step": 1}\n{"step": 2, "lo')
    with closing(MetricsWriter(tmp_path)) as metrics:
        metrics.log(3, loss=0.5)
    text = (tmp_path / METRICS_FILE).read_text()
    assert text == '{"step": 1}\n{"step": 2, "lo\n{"step": 3, "loss": 0.5}\n'


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    with closing(MetricsWriter(tmp_path)) as metrics:
        metrics.log(1, loss=float("nan"), norm=float("inf"), accuracy=0.0)
    assert lines(tmp_path) == [{"step": 1, "loss": None, "norm": None, "accuracy": 0.0}]


def test_tensorboard_reads_the_events(tmp_path: Path) -> None:
    with closing(MetricsWriter(tmp_path)) as metrics:
        metrics.log(1, loss=0.5)
        metrics.log(2, loss=0.25)
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.5), (2, 0.25)]


def test_without_a_folder_it_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(MetricsWriter(None)) as metrics:
        metrics.log(1, loss=0.5)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_folder_that_cannot_be_made(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError) as error:
        MetricsWriter(tmp_path / place)
    text = str(error.value)
    assert text.startswith(f"cannot write metrics to {tmp_path / place}: ")
    assert "--log-dir" in text
    assert "\n" not in text


def test_a_metrics_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).mkdir()
    with pytest.raises(UsageError, match="Is a directory"):
        MetricsWriter(tmp_path)


def test_without_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    with pytest.raises(UsageError, match=r'pip install "ddp_from_scratch\[train\]"'):
        MetricsWriter(tmp_path)


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).symlink_to("/dev/full")
    writer = MetricsWriter(tmp_path)
    with pytest.raises(UsageError, match=r"cannot write metrics to .*: No space left on device"):
        writer.log(1, loss=0.5)
    with pytest.raises(OSError, match="No space left"):
        writer.close()
