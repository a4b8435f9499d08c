"""Report of a benchmark: a JSON file with every sample, and a picture."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.harness.machine import describe

try:
    import matplotlib
except ImportError:  # numbers are worth having where nothing can be installed
    pyplot = None
else:
    matplotlib.use("Agg")  # before pyplot, which looks for a screen otherwise
    from matplotlib import pyplot

RESULTS = Path(__file__).parents[1] / "results"
_NO_PICTURE = "not drawn: there is no matplotlib"


def write(
    name: str,
    title: str,
    samples: Any,
    *,
    settings: Mapping[str, Any] | None = None,
    folder: Path | None = None,
) -> None:
    """Writes every sample, and the machine, to a JSON file: a list of numbers is one line of it.

    Args:
        name: of the file.
        title: for people.
        samples: for `compare.py` a list of dicts with `name` and
            `milliseconds`, the contenders' samples of the same rounds.
        settings: of the measurement. `compare.py` compares files with equal ones.
        folder: where to; None means `RESULTS`.
    """
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    # Every sample and not the medians alone: `compare.py` takes ratios round by round.
    content = {
        "title": title,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": dict(settings or {}),
        "machine": describe(),
        "samples": samples,
    }
    path = folder / f"{name}.json"
    path.write_text(compact_json(content) + "\n")
    print(f"written to {os.path.relpath(path)}", flush=True)


def compact_json(value: Any, indent: str = "") -> str:
    """JSON with a line for each key, and a list of numbers on one line; floats of 6 digits."""
    inner = indent + " "
    if isinstance(value, Mapping):
        entries = [f"{json.dumps(str(k))}: {compact_json(v, inner)}" for k, v in value.items()]
        opening, closing = "{}"
    elif isinstance(value, list | tuple) and any(isinstance(entry, Mapping) for entry in value):
        entries = [compact_json(entry, inner) for entry in value]
        opening, closing = "[]"
    else:
        return json.dumps(_rounded(value))
    separator = f",\n{inner}"
    return f"{opening}\n{inner}{separator.join(entries)}\n{indent}{closing}"


def _rounded(value: Any) -> Any:
    # 6 digits of a time are far below the noise of any measurement, and a third of the file.
    if isinstance(value, list | tuple):
        return [_rounded(entry) for entry in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def draw_lines(
    name: str,
    title: str,
    axes: tuple[str, str],
    lines: Mapping[str, Sequence[tuple[float, float]]],
    *,
    logarithmic: bool = True,
    ticks: Sequence[float] = (),
    stars: Sequence[tuple[float, float]] = (),
    folder: Path | None = None,
) -> None:
    """A picture with one line for each entry of `lines`.

    Args:
        name: of the file.
        title: above it.
        axes: labels of x and y.
        lines: points by label.
        logarithmic: both axes; otherwise only x.
        ticks: values written at the x axis.
        stars: points to mark as the best.
        folder: where to; None means `RESULTS`.
    """
    if pyplot is None:
        print(_NO_PICTURE, flush=True)
        return
    figure, plot = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for number, (label, points) in enumerate(lines.items()):
        style = "-" if number < 10 else "--"  # there are ten colours
        plot.plot(*zip(*points, strict=True), style, marker="o", markersize=3, label=label)
    plot.set(xscale="log", xlabel=axes[0], ylabel=axes[1], title=title)
    if logarithmic:
        plot.set(yscale="log")
    if ticks:
        plot.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        plot.set_xticks([], minor=True)
    if stars:
        plot.plot(*zip(*stars, strict=True), "k*", markersize=9, zorder=3, label="best")
    plot.grid(alpha=0.3)
    plot.legend()
    _save(name, figure, folder)


def draw_bars(
    name: str,
    title: str,
    label: str,
    panels: Mapping[str, Mapping[str, tuple[float, float, float]]],
    *,
    folder: Path | None = None,
) -> None:
    """A picture with a panel for each entry of `panels`, and in it a bar for each contender.

    Args:
        name: of the file.
        title: above all panels.
        label: of the bars' axis.
        panels: by title, and in it by contender: low, middle, high. The bar ends at the middle.
        folder: where to; None means `RESULTS`.
    """
    if pyplot is None:
        print(_NO_PICTURE, flush=True)
        return
    rows = [len(bars) for bars in panels.values()]
    figure, plots = pyplot.subplots(
        len(panels),
        figsize=(8, 1.0 + 0.25 * sum(rows) + 0.6 * len(rows)),
        height_ratios=rows,
        squeeze=False,
        layout="constrained",
    )
    for plot, (panel, bars) in zip(plots.flat, panels.items(), strict=True):
        places = range(len(bars))
        middles = [middle for _, middle, _ in bars.values()]
        errors = [
            [middle - low for low, middle, _ in bars.values()],
            [high - middle for _, middle, high in bars.values()],
        ]
        plot.barh(places, middles, xerr=errors, color="#4c72b0", error_kw={"linewidth": 0.8})
        plot.set_yticks(places, list(bars), fontsize=8)
        plot.invert_yaxis()
        plot.set_title(panel, fontsize=9)
        plot.grid(axis="x", alpha=0.3)
    plots.flat[-1].set_xlabel(label)
    figure.suptitle(title)
    _save(name, figure, folder)


def draw_parts(
    name: str,
    title: str,
    label: str,
    bars: Mapping[str, Mapping[str, float]],
    *,
    folder: Path | None = None,
) -> None:
    """A picture with a bar for each contender, made of its parts.

    Args:
        name: of the file.
        title: above it.
        label: of the parts' axis.
        bars: by contender, and in it by part, in one order.
        folder: where to; None means `RESULTS`.
    """
    if pyplot is None:
        print(_NO_PICTURE, flush=True)
        return
    figure, plot = pyplot.subplots(figsize=(8, 1.5 + 0.4 * len(bars)), layout="constrained")
    ends = [0.0] * len(bars)
    for part in next(iter(bars.values())):
        widths = [parts[part] for parts in bars.values()]
        plot.barh(range(len(bars)), widths, left=ends, label=part)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    plot.set_yticks(range(len(bars)), list(bars), fontsize=8)
    plot.invert_yaxis()
    plot.set(xlabel=label, title=title)
    plot.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=6, fontsize=8)
    _save(name, figure, folder)


def _save(name: str, figure: Any, folder: Path | None) -> None:
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    # Without the version of matplotlib: the same numbers give the same file.
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)
    print(f"drawn to {os.path.relpath(path)}", flush=True)


def on_terminal() -> bool:
    """True where standard error is a terminal; under mpirun only once the group is open."""
    return sys.stderr.isatty()
