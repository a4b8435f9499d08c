"""Writes the output of a run, from rank 0 only: a progress bar, lines and metrics."""

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from ddp_from_scratch import UsageError
from ddp_from_scratch.training.errors import needs_extra


def say(text: str, stream: TextIO) -> None:
    """Prints a line; if that fails, this stream and its buffer go to /dev/null from then on."""
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        # At the stream's own file descriptor: Python's next flush of the buffer then succeeds.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        if stream is sys.stdout:
            why = f"warning: standard output cannot be written to ({error.strerror})"
            say(f"{why}: continuing without", sys.stderr)


class Report:
    """Prints a progress bar on a terminal, plain lines elsewhere. Only rank 0 prints."""

    def __init__(self, *, is_rank_0: bool, quiet: bool) -> None:
        self.is_rank_0 = is_rank_0  # changes where another rank takes over
        self._quiet = quiet
        # Both, because under mpirun every rank's standard output is a terminal.
        terminal = sys.stdout.isatty() and sys.stderr.isatty()
        self.colours: bool = terminal and "NO_COLOR" not in os.environ

    def progress(self, steps: range, title: str) -> Iterable[int]:
        first, end = steps.start, steps.stop
        bar: tqdm[int] = self._bar(steps, total=end, initial=first, desc=title, unit="step")
        return bar

    @contextmanager
    def countdown(self, seconds: float, title: str) -> Iterator[Callable[[float], None]]:
        """Shows a bar in the block, whose function takes the seconds that have passed."""
        shape = f"{{desc}}: {{percentage:3.0f}}%|{{bar}}| {{elapsed}} of {seconds:g} s"
        with self._bar(total=seconds, desc=title, bar_format=shape) as bar:
            yield lambda passed: bar.update(min(passed, seconds) - bar.n)

    def _bar(self, steps: Iterable[int] | None = None, **options: Any) -> Any:
        # On standard error: the output can be piped, and under mpirun it is a terminal, too.
        hidden = not self.is_rank_0 or self._quiet or not sys.stderr.isatty()
        return tqdm(steps, leave=False, disable=hidden, dynamic_ncols=True, **options)

    def line(self, text: str) -> None:
        if self.is_rank_0 and not self._quiet:
            # Hides the bar meanwhile.
            with tqdm.external_write_mode(file=sys.stdout):
                say(text, sys.stdout)

    def warning(self, text: str) -> None:
        if self.is_rank_0:  # also when quiet
            say(f"warning: {text}", sys.stderr)

    def result(self, text: str) -> None:
        if self.is_rank_0:  # also when quiet
            say(text, sys.stdout)


METRICS_FILE = "metrics.jsonl"


class MetricsWriter:
    """Writes `metrics.jsonl` and TensorBoard events to `log_dir`; does nothing if it is None.

    Each line is a JSON object: `{"step": 40, "loss": 0.31, "test_accuracy": 0.97}`. A resumed run
    appends: a step's later line is valid. A UsageError if it cannot write or lacks tensorboard.
    """

    def __init__(self, log_dir: Path | None) -> None:
        self._files = ExitStack()
        self._is_open = log_dir is not None
        if log_dir is None:
            return
        # Imported here because it takes two seconds, and most ranks do not need it.
        with needs_extra("train"):
            from torch.utils.tensorboard import writer
        log_dir = log_dir.expanduser()
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
            lines = (log_dir / METRICS_FILE).open("a", encoding="utf-8")
            self._lines = self._files.enter_context(lines)
            self._events = self._files.enter_context(writer.SummaryWriter(os.fspath(log_dir)))
        except OSError as error:
            self._files.close()
            raise UsageError(
                f"cannot write metrics to {log_dir}: {error.strerror}; give --log-dir a folder "
                "that can be written"
            ) from error

    def log(self, step: int, **values: float) -> None:
        """Logs values at a step of the whole run. Values that are not finite become null."""
        if not self._is_open:
            return
        # JSON has only finite numbers.
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        try:
            # Flushed at once, so that a killed run keeps its lines.
            print(json.dumps({"step": step, **finite}), file=self._lines, flush=True)
            for name, value in values.items():
                self._events.add_scalar(name, value, step)
        except OSError as error:
            name = self._lines.name
            raise UsageError(f"cannot write metrics to {name}: {error.strerror}") from error

    def close(self) -> None:
        self._is_open = False  # an elastic run may continue after it was stopped
        self._files.close()


def ranks_text(count: int, virtual_ranks: int | None) -> str:
    """Returns "2 ranks", with virtual ranks "3 ranks, 4 virtual ranks"."""
    ranks = "1 rank" if count == 1 else f"{count} ranks"
    return ranks if virtual_ranks is None else f"{ranks}, {virtual_ranks} virtual ranks"
