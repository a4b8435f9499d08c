"""Output of a run, from rank 0 alone: a progress bar, lines and metrics."""

import json
import math
import os
import sys
from collections.abc import Iterable
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from ddp_from_scratch.errors import UsageError, needs_extra
from ddp_from_scratch.launch.rank_process import write_line

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


class Report:
    """A progress bar on a terminal, plain lines elsewhere; from the one rank that `speaks`."""

    def __init__(self, *, speaks: bool, quiet: bool) -> None:
        self.speaks, self._quiet = speaks, quiet  # another rank may take over
        # Both: mpirun gives every rank a terminal of its own as standard output.
        terminal = sys.stdout.isatty() and sys.stderr.isatty()
        self.colours = terminal and "NO_COLOR" not in os.environ

    @property
    def _verbose(self) -> bool:
        return self.speaks and not self._quiet

    def progress(self, steps: range, title: str) -> Iterable[int]:
        return tqdm(
            steps,
            total=steps.stop,
            initial=steps.start,
            desc=title,
            unit="step",
            leave=False,
            # On standard error: the output of a run can be piped. Under mpirun, too, where it has
            # become the terminal that a person watches (`write_to_terminal`).
            disable=not (self._verbose and sys.stderr.isatty()),
            dynamic_ncols=True,
        )

    def line(self, text: str) -> None:
        if self._verbose:
            # Takes the bar away meanwhile.
            with tqdm.external_write_mode(file=sys.stdout):
                write_line(text, sys.stdout)

    def warning(self, text: str) -> None:
        if self.speaks:  # also when quiet
            write_line(f"warning: {text}", sys.stderr)

    def result(self, text: str) -> None:
        if self.speaks:  # also when quiet
            write_line(text, sys.stdout)


METRICS_FILE = "metrics.jsonl"


class MetricsWriter:
    """Writes `metrics.jsonl` and TensorBoard events to `log_dir`; with None it does nothing.

    A line is one JSON object: `{"step": 40, "loss": 0.31, "test_accuracy": 0.97}`. A resumed run
    appends; where it repeats steps since its checkpoint, the later line holds.

    Raises a UsageError where it cannot write, or where tensorboard is not installed.
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
            file = (log_dir / METRICS_FILE).open("a+b")
            self._lines = TextIOWrapper(file, encoding="utf-8")
            # A killed run may have left its last line unfinished: the next one must not join it.
            if file.tell() > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            self._events = writer.SummaryWriter(os.fspath(log_dir))
        except OSError as error:
            self.close()
            raise UsageError(
                f"cannot write metrics to {log_dir}: {error.strerror}; give --log-dir a folder "
                "that can be written"
            ) from error

    def log(self, step: int, **values: float) -> None:
        """At a step counted from the run's first. Values that are not finite are null."""
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
        if self._lines is not None:
            self._lines.close()
            self._lines = None
        if self._events is not None:
            self._events.close()
            self._events = None
