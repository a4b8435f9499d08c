"""What benchmarks share without torch: a parser, and files of samples and pictures."""

import argparse
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from ddp_from_scratch.bench.results import content_of, save

RESULTS = Path(__file__).parents[1] / "results"
# Distinct for colour-blind readers, and in print.
COLOURS = {"torch": "#d55e00", "reference": "#9a9a9a", "ours": "#0072b2"}
_LEGEND = ("torch", "no communication", "this library")
INK = "#757575"  # as the text of pictures.mplstyle
_LIMIT = {"color": "black", "linestyle": "none", "marker": "|", "markersize": 13}


def make_parser(name: str, text: str | None) -> argparse.ArgumentParser:
    """Makes the parser of `python -m NAME`, whose help begins with `text`, with --results."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {name}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    text = "where JSON and PNG go (default: benchmarks/results)"
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help=text)
    return parser


@cache
def _pyplot() -> Any:
    """Imported only to draw, since it takes a second. None without matplotlib, and says so."""
    try:
        import matplotlib
    except ImportError:  # numbers are useful without pictures
        print("not drawn: there is no matplotlib", flush=True)
        return None
    matplotlib.use("Agg")  # before pyplot, which otherwise looks for a screen
    from matplotlib import pyplot

    pyplot.style.use(Path(__file__).with_name("pictures.mplstyle"))
    return pyplot


def draw_curves(
    name: str,
    title: str,
    what: str,
    panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]],
    folder: Path,
    scale: str = "linear",
) -> None:
    """Draws the file `name`: `what` over each panel's axis, with a curve per label."""
    if (pyplot := _pyplot()) is None:
        return
    figure, (plots,) = pyplot.subplots(1, len(panels), sharey=True, figsize=(10, 4), squeeze=False)
    for plot, (axis, curves) in zip(plots, panels.items(), strict=True):
        for label, (places, values) in curves.items():
            plot.plot(places, values, label=label)
        plot.set(xlabel=axis, xscale=scale, yscale=scale)
    plots[0].set(ylabel=what)
    plots[0].legend()
    figure.suptitle(title)
    _save(name, figure, folder)


def write(name: str, title: str, samples: Any, folder: Path, **settings: Any) -> None:
    """Writes samples, settings and a description of the machine to a JSON file."""
    save(name, content_of(title, samples, **settings), folder)


@dataclass(frozen=True)
class Bar:
    """One bar of a picture."""

    name: str
    quartiles: tuple[float, float, float]  # the bar ends at the middle one
    kind: str  # "reference", "torch" or "ours", which chooses its colour
    label: str = ""  # written at its end
    limit: float | None = None  # the least possible value, marked across the bar
    apart: bool = False  # True if a group begins here, which leaves space before the bar


def draw_bars(
    name: str,
    title: str,
    label: str,
    panels: Mapping[str, Sequence[Bar]],
    folder: Path,
    limit: str = "",
    unit: float | None = None,
) -> None:
    """Draws the file `name` with a panel of bars per entry of `panels`.

    `label` is that of the bars' axis; `limit` explains the bars' limits in the legend; at `unit` a
    line crosses all bars.
    """
    if (pyplot := _pyplot()) is None:
        return
    rows = [len(bars) + sum(bar.apart for bar in bars) / 2 for bars in panels.values()]
    figure, plots = pyplot.subplots(
        len(panels),
        figsize=(8, 1.4 + 0.25 * sum(rows) + 0.6 * len(rows)),
        height_ratios=rows,
        squeeze=False,
    )
    for plot, (panel, bars) in zip(plots.flat, panels.items(), strict=True):
        _draw_panel(plot, panel, bars)
        if unit is not None:
            plot.axvline(unit, color=COLOURS["torch"], linewidth=1)
    # It ends where the axis ends: a long one has room to the left.
    plots.flat[-1].set_xlabel(label, x=1, ha="right")
    figure.suptitle(title, x=0.01, ha="left")
    used = {bar.kind for bars in panels.values() for bar in bars}
    kinds = [(COLOURS[k], name) for k, name in zip(COLOURS, _LEGEND, strict=True) if k in used]
    patches = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour, _ in kinds]
    marks = [pyplot.Line2D([], [], **_LIMIT, path_effects=_outline())] if limit else []
    names = [*(name for _, name in kinds), *([limit] if limit else [])]
    figure.legend([*patches, *marks], names, loc="outside lower center", ncols=4)
    _save(name, figure, folder)


def _outline() -> list[Any]:
    """A white edge, with which black is seen on a dark page."""
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=2, foreground="white")]


def _draw_panel(plot: Any, title: str, bars: Sequence[Bar]) -> None:
    middles = [bar.quartiles[1] for bar in bars]
    errors = [
        [bar.quartiles[1] - bar.quartiles[0] for bar in bars],
        [bar.quartiles[2] - bar.quartiles[1] for bar in bars],
    ]
    places = [place + sum(bar.apart for bar in bars[: place + 1]) / 2 for place in range(len(bars))]
    colours = [COLOURS[bar.kind] for bar in bars]
    drawn = plot.barh(places, middles, xerr=errors, color=colours, error_kw={"linewidth": 0.8})
    drawn.errorbar.lines[2][0].set_path_effects(_outline())
    limits = [
        (b.limit, place) for place, b in zip(places, bars, strict=True) if b.limit is not None
    ]
    if limits:
        plot.plot(*zip(*limits, strict=True), **_LIMIT, path_effects=_outline())
    most = max(bar.quartiles[2] for bar in bars)
    for place, bar in zip(places, bars, strict=True):
        # To the right of the quartiles' line, which would cross the label.
        plot.text(bar.quartiles[2] + 0.01 * most, place, bar.label, va="center", fontsize=8)
    plot.set_xlim(0, 1.1 * most)
    plot.set_yticks(places, [bar.name for bar in bars], fontsize=8)
    plot.margins(y=0.02)
    plot.invert_yaxis()
    plot.set_title(title)
    plot.grid(axis="y", visible=False)


def _save(name: str, figure: Any, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    # Without matplotlib's version, so the same numbers give the same file.
    figure.savefig(path, metadata={"Software": None})
    _pyplot().close(figure)
    print(f"drawn to {os.path.relpath(path)}", flush=True)


def draw_progress(
    name: str,
    title: str,
    lines: Mapping[str, tuple[Sequence[tuple[float, int]], Sequence[tuple[float, str]]]],
    folder: Path,
    kinds: Sequence[str] = ("ours", "torch"),
) -> None:
    """Draws the progress of runs over time with their faults, and how long each epoch took.

    `lines` has, by label, the seconds and numbers of epochs, and the seconds and names of faults. A
    fault that occurs once is named beside its mark, others in the legend. `kinds` choose the
    colours.
    """
    if (pyplot := _pyplot()) is None:
        return
    figure, (far, slow) = pyplot.subplots(2, sharex=True, figsize=(8, 6), height_ratios=(2, 1))
    names = Counter(name for _, faults in lines.values() for _, name in faults)
    for (label, (epochs, faults)), kind in zip(lines.items(), kinds, strict=True):
        colour = COLOURS[kind]
        seconds, done = zip(*epochs, strict=True)
        far.plot(seconds, done, color=colour, label=label)
        # An epoch that is repeated from a checkpoint counts again.
        took = [after - before for before, after in pairwise(seconds)]
        slow.step(seconds[1:], took, color=colour, linewidth=0.8)
        for when, fault in faults:
            at = max((epoch for second, epoch in epochs if second <= when), default=0)
            far.plot(when, at, "x", color=INK, markersize=5)
            slow.axvline(when, color=colour, linewidth=0.5, linestyle=":")
            if names[fault] == 1:
                where = {"xytext": (6, -3), "textcoords": "offset points", "va": "top"}
                far.annotate(fault, (when, at), fontsize=8, **where)
    for fault in (fault for fault, count in names.items() if count > 1):
        far.plot([], [], "x", color=INK, markersize=5, label=fault)
    far.set(ylabel="epochs", title=title)
    slow.set(xlabel="seconds", ylabel="seconds for an epoch", yscale="log")
    slow.yaxis.set_major_locator(pyplot.matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
    slow.yaxis.set_major_formatter("{x:g}")
    slow.minorticks_off()
    far.legend()
    _save(name, figure, folder)
