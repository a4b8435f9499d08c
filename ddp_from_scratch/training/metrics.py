"""Numbers along the way of training: a line of JSON and a TensorBoard event for each.

After a gradient has been applied; rank 0 alone writes.
"""

from __future__ import annotations

import json
import math
import os
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from ddp_from_scratch.errors import UsageError

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

METRICS_FILE = "metrics.jsonl"


class MetricsWriter:
    """Writes `metrics.jsonl` and TensorBoard events to `log_dir`; with None it does nothing.

    A line is one JSON object: `{"step": 40, "loss": 0.31, "test_accuracy": 0.97}`. It is handed to
    the system as soon as it is logged, so a killed run keeps what it wrote. A resumed run appends;
    where it repeats steps since its checkpoint, the later line holds.

    Raises:
        UsageError: `log_dir` cannot be made or written, or tensorboard is not installed.
    """

    def __init__(self, log_dir: Path | None) -> None:
        self._lines: TextIOWrapper | None = None
        self._events: SummaryWriter | None = None
        if log_dir is None:
            return
        # Here and not above: it takes two seconds, and only one rank of a run that logs needs it.
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise UsageError(
                f"cannot write metrics to {log_dir}: {error}; install tensorboard, or leave out "
                "--log-dir"
            ) from error
        log_dir = log_dir.expanduser()
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
            self._lines = _open_for_append(log_dir / METRICS_FILE)
            self._events = SummaryWriter(os.fspath(log_dir))
        except OSError as error:
            self.close()
            raise UsageError(
                f"cannot write metrics to {log_dir}: {error.strerror}; give --log-dir a folder "
                "that can be written"
            ) from error

    def log(self, step: int, **values: float) -> None:
        """Write the values at `step`, which counts optimizer steps from the run's first one.

        A value that is not finite is null in the file, as JSON has no such numbers.

        Raises:
            UsageError: the disk is full, or the folder is gone.
        """
        if self._lines is None or self._events is None:
            return
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        try:
            self._lines.write(json.dumps({"step": step, **finite}) + "\n")
            self._lines.flush()
            for name, value in values.items():
                self._events.add_scalar(name, value, step)
        except OSError as error:
            raise UsageError(
                f"cannot write metrics to {self._lines.name}: {error.strerror}"
            ) from error

    def close(self) -> None:
        """Write out the events and close both files. A no-op when closed already."""
        if self._lines is not None:
            self._lines.close()
            self._lines = None
        if self._events is not None:
            self._events.close()
            self._events = None

    def __enter__(self) -> MetricsWriter:
        """Return the writer itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close both files, after an error too."""
        self.close()


def _open_for_append(path: Path) -> TextIOWrapper:
    """Open a file of lines to add to it, first ending a line that a killed run left unfinished."""
    file = path.open("a+b")
    if file.tell() > 0:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return TextIOWrapper(file, encoding="utf-8")
