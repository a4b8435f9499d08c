"""What a benchmark leaves behind: a JSON file with every sample, and a picture."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.machine import describe

matplotlib.use("Agg")
from matplotlib import pyplot  # after the choice of how to draw

RESULTS = Path(__file__).parent / "results"


def write(name: str, title: str, samples: Any) -> None:
    """Every sample, and what it was measured on."""
    RESULTS.mkdir(exist_ok=True)
    content = {
        "title": title,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe(),
        "samples": samples,
    }
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"written to {os.path.relpath(path)}", flush=True)


def draw_lines(
    name: str,
    title: str,
    axes: tuple[str, str],
    lines: Mapping[str, Sequence[tuple[float, float]]],
) -> None:
    """A picture with one line for each entry of `lines`; both axes logarithmic."""
    RESULTS.mkdir(exist_ok=True)
    figure, plot = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for label, points in lines.items():
        plot.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
    plot.set(xscale="log", yscale="log", xlabel=axes[0], ylabel=axes[1], title=title)
    plot.grid(alpha=0.3)
    plot.legend()
    path = RESULTS / f"{name}.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"drawn to {os.path.relpath(path)}", flush=True)


def on_terminal() -> bool:
    """Whether somebody watches: a terminal, also one that the ranks' parent writes to."""
    return sys.stderr.isatty() or "DDP_TERMINAL" in os.environ
