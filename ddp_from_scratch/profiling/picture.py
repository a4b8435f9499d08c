"""Steps as a picture, for documents."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_from_scratch.profiling.record import BucketTimes, RankTimes, Record, Span, StepTimes
from ddp_from_scratch.profiling.text import shown, size_of

# Safe for colour-blind readers (Okabe and Ito 2008). The page has the same.
COLOURS = {
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "optimizer": "#cc79a7",
    "pack, unpack": "#e69f00",
    "exposed wait": "#d55e00",
    "waits for a rank": "#f4c7a5",
    "moves": "#009e73",
}

# A label, and spans of a kind in ms.
Row = tuple[str, Sequence[tuple[str, Span]]]


def draw(record: Record, step: StepTimes, *paths: Path) -> bool:
    """Draws one step of all ranks: a row for what a rank computes, one for each of its buckets.

    Returns:
        False if there is no matplotlib; nothing is drawn then.
    """
    rows: list[Row] = []
    for rank in step.ranks:
        rows.append((f"rank {rank.rank}", _compute(rank)))
        for bucket in shown(rank):
            size = size_of(record.bucket_nbytes(step, bucket.index))
            rows.append((f"bucket {bucket.index}, {size}", _sent(bucket)))
    title = f"{record.title}: step {step.iteration}, {step.length:.1f} ms"
    return draw_panels({title: rows}, *paths)


def draw_ladder(title: str, steps: Mapping[str, StepTimes], *paths: Path) -> bool:
    """Draws rank 0's part of several steps, by their captions, on one scale.

    Returns: see `draw`.
    """
    panels: dict[str, list[Row]] = {}
    for caption, step in steps.items():
        rank = step.ranks[0]
        sent = [span for bucket in rank.buckets for span in _sent(bucket)]
        caption = f"{caption}: exposed {rank.exposed:.1f} ms"
        panels[caption] = [("main thread", _compute(rank)), ("gradients", sent)]
    return draw_panels(panels, *paths, title=title)


def draw_panels(panels: Mapping[str, Sequence[Row]], *paths: Path, title: str = "") -> bool:
    """Draws rows under captions, on one scale of ms, into files of the formats of their names.

    Returns: see `draw`.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    counts = [len(rows) for rows in panels.values()]
    figure = Figure(figsize=(12, 1.2 + 0.28 * sum(counts) + 0.45 * len(counts)))
    # Not pyplot: the program may draw with it, on a screen of its own.
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained")
    all_axes = figure.subplots(
        len(panels), sharex=True, squeeze=False, gridspec_kw={"height_ratios": counts}
    )[:, 0]
    for axes, (caption, rows) in zip(all_axes, panels.items(), strict=True):
        _draw_rows(axes, rows)
        axes.set_title(caption, loc="left")
        axes.tick_params(axis="x", labelbottom=axes is all_axes[-1])
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    ends = [span[1] for rows in panels.values() for _, spans in rows for _, span in spans]
    all_axes[-1].set_xlim(0, max(ends))
    all_axes[-1].set_xlabel("ms")
    if title:
        figure.suptitle(title)
    handles = [axes.barh(0, 0, color=colour, label=what) for what, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    for path in paths:
        figure.savefig(path, dpi=120)
    return True


def _compute(rank: RankTimes) -> list[tuple[str, Span]]:
    spans = [("forward", span) for span in rank.forward]
    spans += [("backward", span) for span in rank.backward]
    if rank.optimizer is not None:
        spans.append(("optimizer", rank.optimizer))
    for bucket in rank.buckets:
        spans += [("pack, unpack", bucket.pack), ("pack, unpack", bucket.unpack)]
        spans.append(("exposed wait", bucket.wait))
    return spans


def _sent(bucket: BucketTimes) -> list[tuple[str, Span]]:
    waits = "waits for a rank", (bucket.sent[0], bucket.met)
    return [waits, ("moves", (bucket.moving, bucket.sent[1]))]


def _draw_rows(axes: Any, rows: Sequence[Row]) -> None:
    for place, (label, spans) in enumerate(rows):
        # A rank's own row stands out from those of what it sends.
        height = 0.8 if label.startswith(("rank", "main")) else 0.55
        for what, (begin, end) in spans:
            bar = [(begin, end - begin)], (place - height / 2, height)
            axes.broken_barh(*bar, color=COLOURS[what], linewidth=0)
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
