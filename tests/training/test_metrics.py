"""What a run writes where: metrics, read back."""

import json
from contextlib import closing

import pytest

from ddp_from_scratch.common.errors import UsageError
from ddp_from_scratch.training.report import METRICS_FILE, MetricsWriter
from tests.support.refusal import refusal


def lines(folder):
    return [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]


def test_a_line_each_at_once_and_the_events_of_tensorboard(tmp_path):
    """A resumed run appends."""
    folder = tmp_path / "not" / "yet"
    with closing(MetricsWriter(folder)) as metrics:
        metrics.log(1, loss=0.5, accuracy=0.25)
        # Before it is closed: a killed run keeps what it wrote.
        assert lines(folder) == [{"step": 1, "loss": 0.5, "accuracy": 0.25}]
        metrics.log(2, loss=0.125)
    metrics.log(3, loss=0.0)  # it is closed
    with closing(MetricsWriter(folder)) as resumed:
        resumed.log(4, norm=float("nan"), other=float("inf"))
    assert lines(folder)[1:] == [
        *({"step": 2, "loss": 0.125}, {"step": 4, "norm": None, "other": None})
    ]
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder)).Reload()
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    assert found == [(1, 0.5), (2, 0.125)]


def test_what_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder" / METRICS_FILE).mkdir(parents=True)
    for place in ("file", "file/below", "folder"):
        told = refusal(MetricsWriter, tmp_path / place)
        assert told.startswith(f"cannot write metrics to {tmp_path / place}: ")
        assert "--log-dir" in told
    (tmp_path / METRICS_FILE).symlink_to("/dev/full")
    writer = MetricsWriter(tmp_path)
    with pytest.raises(UsageError, match=r"cannot write metrics to .*: No space left on device"):
        writer.log(1, loss=0.5)
    with pytest.raises(OSError, match="No space left"):
        writer.close()
