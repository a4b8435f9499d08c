"""Output of a run, from rank 0 alone: a progress bar, lines, metrics and the timeline."""

import json
import math
import os
import sys
from collections.abc import Iterable
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from ddp_from_scratch import gpu
from ddp_from_scratch.errors import UsageError, needs_extra
from ddp_from_scratch.launch import output
from ddp_from_scratch.reducer import Reducer
from ddp_from_scratch.training.settings import TIMELINE_STEPS, Settings
from ddp_from_scratch.watch.render import as_text
from ddp_from_scratch.watch.stragglers import StragglerReport
from ddp_from_scratch.watch.timeline import TOO_FEW, Timeline

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


class Report:
    """A progress bar on a terminal, plain lines elsewhere; from the one rank that `speaks`.

    Attributes:
        speaks: as given; another rank may take over.
        colours: True where a person looks at standard output.
    """

    def __init__(self, *, speaks: bool, quiet: bool) -> None:
        self.speaks, self._quiet = speaks, quiet
        # Both: mpirun gives every rank a terminal of its own as standard output.
        terminal = sys.stdout.isatty() and sys.stderr.isatty()
        self.colours = terminal and "NO_COLOR" not in os.environ

    @property
    def _verbose(self) -> bool:
        return self.speaks and not self._quiet

    def progress(self, steps: range, title: str) -> Iterable[int]:
        """Passes `steps` through, and shows how far they are on a terminal."""
        return tqdm(
            steps,
            total=steps.stop,
            initial=steps.start,
            desc=title,
            unit="step",
            leave=False,
            # On standard error, so that the output of a run can be piped. Under mpirun, too:
            # standard error, a pipe there, has become the terminal that a person watches
            # (`write_to_terminal`).
            disable=not (self._verbose and sys.stderr.isatty()),
            dynamic_ncols=True,
        )

    def line(self, text: str) -> None:
        """Prints a line of a run's course."""
        if self._verbose:
            # Takes the bar away meanwhile.
            with tqdm.external_write_mode(file=sys.stdout):
                output.write(text, sys.stdout)

    def warning(self, text: str) -> None:
        """Prints a warning, also when quiet."""
        if self.speaks:
            output.write(f"warning: {text}", sys.stderr)

    def result(self, text: str) -> None:
        """Prints the run's result, also when quiet."""
        if self.speaks:
            output.write(text, sys.stdout)


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


# An event as one number, so that a MAX over ranks leaves the earliest step, and of that the lowest
# rank; 0 is none.
_STEPS, _RANKS = 2**42, 2**20


def as_number(step: int, rank: int) -> int:
    """The event "at this step on this rank"."""
    return (_STEPS - step) * _RANKS - rank


def from_number(number: int) -> tuple[int, int]:
    """The step and the rank that `as_number` was given."""
    steps, rank = divmod(-number, _RANKS)
    return _STEPS + steps, rank


def place_of(number: int, steps_per_epoch: int) -> str:
    """An event in words, with its epoch and step counted from 1."""
    step, rank = from_number(number)
    epoch, step = divmod(step, steps_per_epoch)
    return f"in epoch {epoch + 1}, step {step + 1}/{steps_per_epoch}, on rank {rank}"


class LossWatch:
    """Remembers the first step whose loss was not finite."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._first = torch.zeros((), dtype=torch.int64, device=device)
        # On a GPU, a copy in the host's memory that lags behind by as many steps as the host runs
        # ahead. Pinned, so that the copy is asynchronous; the event marks its end.
        self._arrived: torch.Tensor | None = None
        self._event: torch.Event | None = None
        if gpu.is_gpu(device):
            self._arrived = torch.zeros((), dtype=torch.int64, pin_memory=True)
            self._event = torch.Event(device)

    def see(self, loss: torch.Tensor, step: int) -> None:
        """Looks at a loss of this step, a tensor without dimensions."""
        here = as_number(step, self._rank) * loss.detach().isfinite().logical_not()
        self._first = torch.maximum(self._first, here)
        # One copy at a time: while the last is on its way, this step's find waits for a later one.
        if self._arrived is not None and self._event is not None and self._event.query():
            self._arrived.copy_(self._first, non_blocking=True)
            self._event.record()

    def known(self) -> int:
        """`as_number` of the first such step, as far as it has arrived, or 0. Does not wait."""
        return int(self._first if self._arrived is None else self._arrived)

    def settled(self) -> int:
        """`as_number` of the first such step of all, or 0. Waits for the GPU."""
        return int(self._first)


def straggler_values(
    report: StragglerReport, reducer: Reducer, batch_size: int
) -> dict[str, float]:
    """The numbers that `--log-dir` gets with each report.

    Args:
        report: of some steps.
        reducer: of these steps.
        batch_size: images of all ranks in a step.
    """
    late = {"straggler_rank": report.rank, "straggler_ms": report.late_ms}
    return {
        "images_per_second": 1e3 * batch_size / max(report.step_ms, 1e-3),
        "step_ms": report.step_ms,
        **{f"{phase}_ms": ms for phase, ms in report.others_ms.items()},
        "exposed_ms": report.exposed_ms,
        "averaged_bytes": sum(reducer.stats().bucket_bytes),
        **(late if report.is_late else {}),
    }


def begin_timeline(settings: Settings, reducer: Reducer) -> Timeline | None:
    """Begins the timeline that was asked for, if any. Collective."""
    if settings.timeline is None:
        return None
    return Timeline(reducer, settings.timeline, settings.timeline_steps or TIMELINE_STEPS)


def close_timeline(timeline: Timeline | None, report: Report) -> None:
    """Writes what there is and prints a step. Collective.

    Raises:
        UsageError: see `Timeline`.
    """
    if timeline is None:
        return
    timeline.close()
    if timeline.record is None:
        report.warning(TOO_FEW)
        return
    step = timeline.record.typical
    report.line("\n" + as_text(timeline.record, step, colour=report.colours) + "\n")
    report.line(f"timeline {timeline.folder}/timeline.html")
    if not timeline.has_picture:
        report.line("no picture: that takes matplotlib (pip install matplotlib)")
