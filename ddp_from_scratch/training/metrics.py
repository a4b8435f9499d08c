"""Numbers along the way of training, from rank 0: a line of JSON and a TensorBoard event each."""

import json
import math
import os
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_from_scratch.errors import UsageError, needs_extra

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

METRICS_FILE = "metrics.jsonl"


class MetricsWriter:
    """Writes `metrics.jsonl` and TensorBoard events to `log_dir`; with None it does nothing.

    A line is one JSON object: `{"step": 40, "loss": 0.31, "test_accuracy": 0.97}`. A resumed run
    appends; where it repeats steps since its checkpoint, the later line holds.

    Raises:
        UsageError: `log_dir` cannot be made or written, or tensorboard is not installed.
    """

    def __init__(self, log_dir: Path | None) -> None:
        self._lines: TextIOWrapper | None = None
        self._events: SummaryWriter | None = None
        if log_dir is None:
            return
        # Here and not above: it takes two seconds, and only one rank of a run that logs needs it.
        with needs_extra("train"):
            from torch.utils.tensorboard import writer
        log_dir = log_dir.expanduser()
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
            self._lines = _open_for_append(log_dir / METRICS_FILE)
            self._events = writer.SummaryWriter(os.fspath(log_dir))
        except OSError as error:
            self.close()
            raise UsageError(
                f"cannot write metrics to {log_dir}: {error.strerror}; give --log-dir a folder "
                "that can be written"
            ) from error

    def log(self, step: int, **values: float) -> None:
        """Writes the values at `step`, which counts optimizer steps from the run's first one.

        A value that is not finite is null in the file.

        Raises:
            UsageError: the disk is full, or the folder is gone.
        """
        if self._lines is None or self._events is None:
            return
        # JSON has no other numbers.
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        try:
            self._lines.write(json.dumps({"step": step, **finite}) + "\n")
            # To the system at once: a killed run keeps its lines.
            self._lines.flush()
            for name, value in values.items():
                self._events.add_scalar(name, value, step)
        except OSError as error:
            raise UsageError(
                f"cannot write metrics to {self._lines.name}: {error.strerror}"
            ) from error

    def close(self) -> None:
        """Writes out the events and closes both files. Idempotent."""
        if self._lines is not None:
            self._lines.close()
            self._lines = None
        if self._events is not None:
            self._events.close()
            self._events = None


def _open_for_append(path: Path) -> TextIOWrapper:
    """Opens a file of lines for appending."""
    file = path.open("a+b")
    # A killed run may have left its last line unfinished: the next one must not join it.
    if file.tell() > 0:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return TextIOWrapper(file, encoding="utf-8")
