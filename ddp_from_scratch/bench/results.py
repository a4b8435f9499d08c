"""Results: samples and their ratios with intervals, tables, the verdict, and files of all that."""

import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddp_from_scratch.common.process import processor_name
from ddp_from_scratch.launch.environment import STARTED_HERE

# Contenders' names; those of torch's class begin with TORCH.
NO_COMMUNICATION = "no communication"
TORCH = "torch DDP"

Interval = tuple[float, float, float]  # an estimate, and the ends of its 95 % interval

_DRAWS = 2000


@dataclass(frozen=True)
class Samples:
    """One contender's steps: the slowest rank's time in each round."""

    name: str
    milliseconds: list[float]  # from the barrier before the step to its end
    # Of all threads, until the step's last call returns; with a GPU, the cost of driving it.
    cpu_milliseconds: list[float] = field(default_factory=list)

    @property
    def quartiles(self) -> tuple[float, float, float]:
        low, median, high = np.percentile(self.milliseconds, [25, 50, 75])
        return float(low), float(median), float(high)

    def ratio_to(self, other: "Samples") -> Interval:
        """The median ratio over rounds, with its 95 % bootstrap interval."""
        # A disturbance slows both steps of a round, and cancels out.
        return median_interval(np.array(self.milliseconds) / np.array(other.milliseconds))


def median_interval(values: NDArray[np.float64]) -> Interval:
    """Returns the median, and the 2.5th and 97.5th percentiles of 2000 bootstrap medians."""
    # The bootstrap assumes no distribution of the noise. The seed makes it reproducible.
    low, high = np.percentile(_medians(values, np.random.default_rng(0)), [2.5, 97.5])
    return float(np.median(values)), float(low), float(high)


def _medians(
    values: Sequence[float] | NDArray[np.float64], random: np.random.Generator
) -> NDArray[np.float64]:
    medians: NDArray[np.float64] = np.median(random.choice(values, (_DRAWS, len(values))), axis=1)
    return medians


MOST_WALL = 1.3  # wall time of a step as a multiple of its CPU time


def disturbance(alone: Samples | None, ranks: int, cores: int) -> str | None:
    """Describes a sign that something else ran during the steps `alone`; None if there is none."""
    # Such a step always computes. Ranks that share cores wait, too: that shows no other process.
    if alone is None or not alone.cpu_milliseconds or ranks > cores:
        return None
    pairs = zip(alone.milliseconds, alone.cpu_milliseconds, strict=True)
    ratio = statistics.median(wall / cpu for wall, cpu in pairs)
    if ratio <= MOST_WALL:
        return None
    return f"a step without communication takes {ratio:.2f} x its CPU time"


# Tables -----------------------------------------------------------------------------------------


def text_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligns the first column to the left and the others to the right, below headers."""
    columns = list(zip(headers, *rows, strict=True))
    widths = [max(len(text) for text in column) for column in columns]
    lines = [headers, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(
            text.rjust(width) if place else text.ljust(width)
            for place, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


@dataclass(frozen=True)
class Run:
    """The contenders of a table, timed in one way."""

    samples: Sequence[Samples]
    paired: bool = True  # True if they shared rounds; otherwise each had its own processes
    disturbed: str | None = None  # a sign that the machine was not quiet

    @property
    def torch_ddp(self) -> Samples | None:
        """Torch's DDP in its fastest setting, on gloo or, in an nccl job, on nccl."""
        torchs = (s for s in self.samples if kind(s.name) == "torch")
        return fastest(s for s in torchs if _backend(s.name) in ("", "gloo", "nccl"))

    @property
    def alone(self) -> Samples | None:
        return next((s for s in self.samples if s.name == NO_COMMUNICATION), None)

    @property
    def ours(self) -> list[Samples]:
        return [s for s in self.samples if kind(s.name) == "ours"]

    def ratio(self, one: Samples, other: Samples | None) -> Interval | None:
        """Returns the ratio of two contenders' times; None if `other` is None."""
        if other is None:
            return None
        if one is other:
            return 1.0, 1.0, 1.0
        if self.paired:
            return one.ratio_to(other)
        random = np.random.default_rng(0)
        drawn = _medians(one.milliseconds, random) / _medians(other.milliseconds, random)
        low, high = np.percentile(drawn, [2.5, 97.5])
        return one.quartiles[1] / other.quartiles[1], float(low), float(high)


def fastest(samples: Iterable[Samples]) -> Samples | None:
    """Returns the samples with the lowest median; None if there are none."""
    return min(samples, key=lambda s: s.quartiles[1], default=None)


def kind(name: str) -> str:
    """Tells whether a contender is "reference", "torch" or "ours"."""
    if name == NO_COMMUNICATION:
        return "reference"
    return "torch" if name.startswith(TORCH) else "ours"


def _backend(name: str) -> str:
    return name.partition(", ")[0].partition(" on ")[2]


def table(run: Run) -> str:
    """Tables medians, quartiles, and ratios to torch's fastest DDP and to no communication."""
    compared = {"/ torch DDP": run.torch_ddp, "/ no comm.": run.alone}
    ratios = {header: other for header, other in compared.items() if other is not None}
    rows = []
    for s in run.samples:
        low, median, high = s.quartiles
        row = [s.name, f"{median:.1f}", f"{low:.1f} to {high:.1f}"]
        row += [_with_interval(run.ratio(s, other)) for other in ratios.values()]
        if s.cpu_milliseconds:
            row.append(f"{sorted(s.cpu_milliseconds)[len(s.cpu_milliseconds) // 2]:.1f}")
        rows.append(row)
    headers = ["", "ms", "quartiles", *ratios]
    headers += ["CPU ms"] * (len(rows[0]) - len(headers))
    return text_table(headers, rows)


def _with_interval(ratio: Interval | None) -> str:
    if ratio is None:
        return "-"
    middle, low, high = ratio
    return "1" if low == high == 1 else f"{middle:.2f} ({low:.2f} to {high:.2f})"


def verdict(run: Run) -> str:
    """Compares this library's fastest contender per backend, unless the machine was busy."""
    if run.disturbed is not None:
        return f"no verdict: the machine was not quiet ({run.disturbed})"
    torch_ddp, lines = run.torch_ddp, []
    for backend in dict.fromkeys(_backend(s.name) for s in run.ours):
        best = fastest(s for s in run.ours if _backend(s.name) == backend)
        if best is not None and torch_ddp is not None:
            lines.append(f"for this model: {_compared(run, best, torch_ddp)}")
    return "\n".join(lines)


def _compared(run: Run, best: Samples, torch_ddp: Samples) -> str:
    ratio = run.ratio(best, torch_ddp)
    assert ratio is not None
    middle, low, high = ratio
    if low <= 1 <= high:
        return f"no difference is shown between {best.name} and torch's DDP ({middle:.2f})"
    one, other = (best.name, "torch's DDP") if high < 1 else ("torch's DDP", best.name)
    times, least, most = (1 / middle, 1 / high, 1 / low) if high < 1 else ratio
    text = f"{one} is {times:.2f} times as fast as {other} ({least:.2f} to {most:.2f})"
    to_alone = run.ratio(best, run.alone)
    if to_alone is None or high >= 1:
        return text
    return f"{text}; that is {to_alone[0]:.2f} x a step without communication"


# Files, with a description of the machine, without which times mean nothing ----------------------


def describe() -> dict[str, Any]:
    """Returns the processor, cores, memory, GPU, versions, and the measured commit."""
    # Imported only here: `--help` of programs that import this file needs no torch.
    import torch

    from ddp_from_scratch.common import gpu

    # Not an import of mpi4py, which would start MPI.
    mpi = sys.modules.get("mpi4py.MPI")
    # An installed package may lie inside another repository.
    tracked = _git("ls-files", "--error-unmatch", __file__) is not None
    but_results = (":/", ":(top,exclude)benchmarks/results")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", *but_results)
    return {
        "processor": processor_name(),
        "cores": usable_cpus(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "gpu": gpu.product_name(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "mpi": mpi and mpi.Get_library_version().partition("\0")[0].splitlines()[0],
        "commit": _git("rev-parse", "--short", "HEAD") if tracked else None,
        "uncommitted_changes": None if changed is None else bool(changed),
    }


def usable_cpus() -> int:
    """Returns how many CPUs this job may use: a rank may be bound to some of its launcher's."""
    pids = (0, os.getppid()) if STARTED_HERE in os.environ else (0,)
    return max(len(os.sched_getaffinity(pid)) for pid in pids)


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parents[1], capture_output=True, text=True
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def content_of(title: str, samples: Any, **settings: Any) -> dict[str, Any]:
    """Returns the content of a file: all samples, the settings, and the machine."""
    return {
        "title": title,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": settings,
        "machine": describe(),
        "samples": samples,
    }


def save(name: str, content: Mapping[str, Any], folder: Path) -> None:
    """Writes `content` to a file in a folder, which is made if necessary."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(compact_json(content) + "\n")
    print(f"written to {os.path.relpath(path)}", flush=True)


def compact_json(content: Mapping[str, Any]) -> str:
    """Returns JSON with a line per key, a list of numbers on one line, and floats of 6 digits."""
    # The other digits of a time are noise, and would triple the file.
    rounded = json.loads(json.dumps(content), parse_float=lambda text: float(f"{float(text):.6g}"))
    text = json.dumps(rounded, indent=1)
    return re.sub(r"\[([^][{}]*)\]", lambda found: f"[{' '.join(found[1].split())}]", text)
