"""Renders a record: a step as text or as a picture, all steps as a page."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from ddp_from_scratch.watch.record import BucketTimes, RankTimes, Record, Span, StepTimes

WIDTH = 100
MOST = 12  # buckets per rank that get a line; a rank may have hundreds
_LEAST = 0.05  # ms; shorter waits are not mentioned
_LABELLED = 0.03  # of a picture's width; a longer bar has its ms written on it


class Kind(Enum):
    """What a rank or a bucket does in a span, and how it is drawn."""

    FORWARD = "F", "forward", 34, "forward"
    BACKWARD = "B", "backward", 36, "backward"
    PACK = "p", "pack", 33, "pack, unpack"
    WAIT = "!", "wait, exposed", 31, "exposed wait"
    UNPACK = "u", "unpack", 33, "pack, unpack"
    OPTIMIZER = "O", "optimizer", 35, "optimizer"
    ARRIVE = ".", "gradients arrive", 90, ""
    LATE_RANK = "-", "waits for a rank", 31, "waits for a rank"
    MOVE = "=", "in flight", 32, "in flight"

    def __init__(self, symbol: str, meaning: str, terminal_colour: int, in_picture: str) -> None:
        self.symbol = symbol
        self.meaning = meaning  # in the legend
        self.terminal_colour = terminal_colour
        self.in_picture = in_picture  # its name there, a key of `COLOURS`

    def cell(self, colour: bool) -> str:
        """Returns its symbol in a text, with its colour for a terminal if asked."""
        return f"\033[{self.terminal_colour}m{self.symbol}\033[0m" if colour else self.symbol


# Short kinds of spans, which count double where they share a cell of a text.
_SHORT = (Kind.PACK, Kind.WAIT, Kind.UNPACK)

# Safe for colour-blind readers (Okabe and Ito 2008). The page uses the same colours.
COLOURS = {
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "optimizer": "#cc79a7",
    "pack, unpack": "#e69f00",
    "exposed wait": "#d55e00",
    "waits for a rank": "#f4c7a5",
    "in flight": "#009e73",
}
# Of a picture, which is transparent: legible on a white page and on a black one.
_INK = dict.fromkeys(
    ("text.color", "axes.labelcolor", "axes.edgecolor", "grid.color", "xtick.color", "ytick.color"),
    "#757575",
)


class Bar(NamedTuple):
    """A span in a drawing."""

    kind: Kind
    span: Span


class Row(NamedTuple):
    """A line of a drawing."""

    label: str
    bars: Sequence[Bar]
    is_thread: bool = False  # True for what a rank's main thread does, which is drawn taller


def computed(rank: RankTimes) -> list[Bar]:
    """Returns the spans of a rank's main thread."""
    bars = [Bar(Kind.FORWARD, span) for span in rank.forward]
    bars += [Bar(Kind.BACKWARD, span) for span in rank.backward]
    if rank.optimizer is not None:
        bars.append(Bar(Kind.OPTIMIZER, rank.optimizer))
    for bucket in rank.buckets:
        bars.append(Bar(Kind.PACK, bucket.pack))
        bars.append(Bar(Kind.WAIT, bucket.wait))
        bars.append(Bar(Kind.UNPACK, bucket.unpack))
    return bars


def sent(bucket: BucketTimes) -> list[Bar]:
    """Returns the spans of a bucket's communication."""
    return [
        Bar(Kind.LATE_RANK, Span(bucket.sent.begin, bucket.met)),
        Bar(Kind.MOVE, Span(bucket.moving, bucket.sent.end)),
    ]


def _rows(record: Record, step: StepTimes) -> Iterator[tuple[RankTimes, BucketTimes | None, str]]:
    # One row for what each rank computes, and one for each of the buckets with the longest waits.
    for rank in step.ranks:
        yield rank, None, f"rank {rank.rank}"
        longest = sorted(rank.buckets, key=lambda bucket: -bucket.exposed)[:MOST]
        for bucket in sorted(longest, key=lambda bucket: bucket.index):
            size = _size(record.bucket_nbytes(step, bucket.index))
            yield rank, bucket, f"bucket {bucket.index}, {size}"


def _size(nbytes: int) -> str:
    mib = nbytes / 2**20
    return f"{mib:.3g} MiB" if mib >= 0.01 else f"{nbytes} B"


def as_text(record: Record, step: StepTimes, *, colour: bool = False) -> str:
    """Draws one step, with a line for each rank and each of its buckets, and a summary."""
    rows: list[Row] = []
    for rank, bucket, label in _rows(record, step):
        if bucket is None:
            rows.append(Row(label, computed(rank)))
            continue
        names = set(step.layout[bucket.index])
        packed = bucket.pack.begin
        arrived = min((at for name, at in rank.arrived if name in names), default=packed)
        before = [Bar(Kind.ARRIVE, Span(arrived, packed)), Bar(Kind.PACK, bucket.pack)]
        rows.append(Row(f"  {label}", [*before, *sent(bucket), Bar(Kind.UNPACK, bucket.unpack)]))
    width = max(len(row.label) for row in rows) + 1
    lines = [record.title, f"step {step.iteration}: {step.length:.1f} ms", ""]
    lines += [line(row, width, step.length, colour) for row in rows]
    if len(step.layout) > MOST:
        lines.append(f"{len(step.layout)} buckets, of which those are shown that were waited for")
    return "\n".join([*lines, "", legend(), "", *summary(record, step)])


def line(row: Row, label_width: int, length: float, colour: bool) -> str:
    """Draws a row's label, then its bars: `length` ms fill the rest of the width."""
    count = WIDTH - label_width - 2
    cells, covered = [" "] * count, [0.0] * count
    width = length / count
    for kind, (begin, end) in row.bars:
        first, last = int(begin / width), min(int(end / width), count - 1)
        for cell in range(max(first, 0), last + 1):
            # A cell shows the span that fills most of it.
            part = min(end, (cell + 1) * width) - max(begin, cell * width)
            if part > 0 and part >= covered[cell] * (0.5 if kind in _SHORT else 1):
                cells[cell], covered[cell] = kind.cell(colour), part
    return f"{row.label:<{label_width}}|{''.join(cells)}|"


def legend() -> str:
    """Returns the meanings of the symbols, in two lines."""
    items = [f"{kind.symbol} {kind.meaning}" for kind in Kind]
    return "  ".join(items[:6]) + "\n" + "  ".join(items[6:])


def summary(record: Record, step: StepTimes) -> list[str]:
    """Describes how much communication was hidden or exposed, and which ranks were late."""
    lines = []
    waited = dict.fromkeys(range(len(step.ranks)), 0.0)
    for rank in step.ranks:
        lines.append(
            f"rank {rank.rank}: communication {rank.communication:.1f} ms, {rank.hidden:.0%} "
            f"hidden; exposed {rank.exposed:.1f} ms"
        )
        longest = max(rank.buckets, key=lambda bucket: bucket.exposed, default=None)
        if longest is not None and longest.exposed >= _LEAST:
            text = f"rank {rank.rank} waited {longest.exposed:.1f} ms for bucket {longest.index}"
            if longest.exposed_for_a_rank >= _LEAST:
                part = longest.exposed_for_a_rank
                text += f", of which {part:.1f} until rank {longest.last} launched it"
            lines.append(text)
        for bucket in rank.buckets:
            waited[bucket.last] += bucket.exposed_for_a_rank
    late = max(waited, key=lambda rank: waited[rank])
    if waited[late] >= _LEAST:
        lines.append(f"rank {late} was late: the others waited {waited[late]:.1f} ms for it in all")
    if len(step.layout) == 1:
        size = _size(record.bucket_nbytes(step, 0))
        lines.append(f"1 bucket of {size}: it is full near the end of backward, so little overlaps")
    if record.clock_error:
        lines.append(f"the clocks of the machines may differ by {record.clock_error:.2f} ms")
    return lines


def draw(record: Record, step: StepTimes, *paths: Path) -> bool:
    """Draws one step of all ranks; without matplotlib, draws nothing and returns False."""
    rows = [
        Row(label, computed(rank), is_thread=True) if bucket is None else Row(label, sent(bucket))
        for rank, bucket, label in _rows(record, step)
    ]
    title = f"{record.title}: step {step.iteration}, {step.length:.1f} ms"
    return draw_panels({title: rows}, *paths)


def draw_panels(panels: Mapping[str, Sequence[Row]], *paths: Path, title: str = "") -> bool:
    """Draws captioned panels of rows on one ms scale; file names choose the formats."""
    try:
        from matplotlib import rc_context
    except ImportError:
        return False
    with rc_context(_INK):
        figure = _figure(panels, title)
        for path in paths:
            figure.savefig(path, dpi=120, transparent=True)
    return True


def _figure(panels: Mapping[str, Sequence[Row]], title: str) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    counts = [len(rows) for rows in panels.values()]
    figure = Figure(figsize=(12, 1.2 + 0.28 * sum(counts) + 0.45 * len(counts)))
    # Not pyplot, which the program may use with a backend of its own.
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained")
    all_axes = figure.subplots(
        len(panels), sharex=True, squeeze=False, gridspec_kw={"height_ratios": counts}
    )[:, 0]
    longest = max(bar.span.end for rows in panels.values() for row in rows for bar in row.bars)
    for axes, (caption, rows) in zip(all_axes, panels.items(), strict=True):
        for place, row in enumerate(rows):
            height = 0.8 if row.is_thread else 0.55
            for kind, span in row.bars:
                bar = [(span.begin, span.length)], (place - height / 2, height)
                axes.broken_barh(*bar, color=COLOURS[kind.in_picture], linewidth=0)
                if span.length > _LABELLED * longest:
                    at = (span.begin + span.end) / 2, place
                    where = {"ha": "center", "va": "center", "fontsize": 7, "color": "black"}
                    axes.text(*at, f"{span.length:.0f}", **where)
        axes.set_yticks(range(len(rows)), [row.label for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.set_title(caption, loc="left")
        axes.tick_params(axis="x", labelbottom=axes is all_axes[-1])
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    all_axes[-1].set_xlim(0, longest)
    all_axes[-1].set_xlabel("ms")
    if title:
        figure.suptitle(title)
    handles = [axes.barh(0, 0, color=colour, label=what) for what, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return figure


def as_html(record: Record) -> str:
    """Returns a page that opens offline: `page.html` with the record in it."""

    def shallow(times: Any) -> dict[str, Any]:
        # Not `asdict`, which copies every time, nor `vars`, which leaves each object with a dict.
        return {field.name: getattr(times, field.name) for field in fields(times)}

    steps = []
    for step in record.steps:
        exposed = max(rank.exposed for rank in step.ranks)
        sums = {"length": step.length, "exposed": exposed, "summary": summary(record, step)}
        steps.append(shallow(step) | sums)
    data = {
        "title": record.title,
        "nbytes": record.nbytes,
        "hosts": [host.partition("/")[0] for host in record.hosts],
        "typical": record.steps.index(record.typical),
        "colours": COLOURS,
        "steps": steps,
    }
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    # "</script" would end the script element, and "<!--<script" would hide its end.
    text = json.dumps(data, default=shallow).replace("<", "\\u003c")
    return template.replace("{{record}}", text)
