"""Renders a record: a step as text or as a picture, all steps as a page."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ddp_from_scratch.watch.recorder import BucketTimes, RankTimes, Record, Span, StepTimes

WIDTH = 100
MOST = 12  # buckets per rank that get a line; a rank may have hundreds
_LEAST = 0.05  # ms; shorter waits are not mentioned
_LABELLED = 0.03  # of a picture's width; a longer bar has its ms written on it

# By symbol: its meaning, its colour on a terminal, and its name in a picture.
_KINDS = {
    "F": ("forward", 34, "forward"),
    "B": ("backward", 36, "backward"),
    "p": ("pack", 33, "pack, unpack"),
    "!": ("wait, exposed", 31, "exposed wait"),
    "u": ("unpack", 33, "pack, unpack"),
    "O": ("optimizer", 35, "optimizer"),
    ".": ("gradients arrive", 90, ""),
    "-": ("waits for a rank", 31, "waits for a rank"),
    "=": ("moves", 32, "moves"),
}
# Safe for colour-blind readers (Okabe and Ito 2008). The page uses the same colours.
COLOURS = {
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "optimizer": "#cc79a7",
    "pack, unpack": "#e69f00",
    "exposed wait": "#d55e00",
    "waits for a rank": "#f4c7a5",
    "moves": "#009e73",
}

Spans = list[tuple[str, Span]]  # symbols, with begin and end in ms
TimelineRow = tuple[str, Spans]  # a label, and the spans of its line


def computed(rank: RankTimes) -> Spans:
    """Returns the spans of a rank's main thread."""
    spans = [("F", span) for span in rank.forward] + [("B", span) for span in rank.backward]
    if rank.optimizer is not None:
        spans.append(("O", rank.optimizer))
    for bucket in rank.buckets:
        spans += [("p", bucket.pack), ("!", bucket.wait), ("u", bucket.unpack)]
    return spans


def sent(bucket: BucketTimes) -> Spans:
    """Returns the spans of a bucket's communication."""
    return [("-", (bucket.sent[0], bucket.met)), ("=", (bucket.moving, bucket.sent[1]))]


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
    rows: list[TimelineRow] = []
    for rank, bucket, label in _rows(record, step):
        if bucket is None:
            rows.append((label, computed(rank)))
            continue
        names = set(step.layout[bucket.index])
        begin = min((at for name, at in rank.arrived if name in names), default=bucket.pack[0])
        spans = [(".", (begin, bucket.pack[0])), ("p", bucket.pack), *sent(bucket)]
        rows.append((f"  {label}", [*spans, ("u", bucket.unpack)]))
    width = max(len(label) for label, _ in rows) + 1
    lines = [record.title, f"step {step.iteration}: {step.length:.1f} ms", ""]
    lines += [line(label, width, spans, step.length, colour) for label, spans in rows]
    if len(step.layout) > MOST:
        lines.append(f"{len(step.layout)} buckets, of which those are shown that were waited for")
    return "\n".join([*lines, "", legend(), "", *summary(record, step)])


def line(
    label: str, labels: int, spans: Iterable[tuple[str, Span]], length: float, colour: bool
) -> str:
    """Draws a label of `labels` characters, then the spans; `length` ms fill the rest."""
    bars = WIDTH - labels - 2
    cells, covered = [" "] * bars, [0.0] * bars
    width = length / bars
    for symbol, (begin, end) in spans:
        first, last = int(begin / width), min(int(end / width), bars - 1)
        for cell in range(max(first, 0), last + 1):
            # A cell shows the span that fills most of it. Short kinds of spans count double.
            part = min(end, (cell + 1) * width) - max(begin, cell * width)
            if part > 0 and part >= covered[cell] * (0.5 if symbol in "p!u" else 1):
                cells[cell], covered[cell] = symbol, part
    if colour:
        cells = [c if c == " " else f"\033[{_KINDS[c][1]}m{c}\033[0m" for c in cells]
    return f"{label:<{labels}}|{''.join(cells)}|"


def legend() -> str:
    """Returns the meanings of the symbols, in two lines."""
    items = [f"{symbol} {what}" for symbol, (what, _, _) in _KINDS.items()]
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
        (label, computed(rank) if bucket is None else sent(bucket))
        for rank, bucket, label in _rows(record, step)
    ]
    title = f"{record.title}: step {step.iteration}, {step.length:.1f} ms"
    return draw_panels({title: rows}, *paths)


def draw_panels(panels: Mapping[str, Sequence[TimelineRow]], *paths: Path, title: str = "") -> bool:
    """Draws captioned panels of rows on one ms scale; file names choose the formats."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    counts = [len(rows) for rows in panels.values()]
    figure = Figure(figsize=(12, 1.2 + 0.28 * sum(counts) + 0.45 * len(counts)))
    # Not pyplot, which the program may use with a backend of its own.
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained")
    all_axes = figure.subplots(
        len(panels), sharex=True, squeeze=False, gridspec_kw={"height_ratios": counts}
    )[:, 0]
    ends = [span[1] for rows in panels.values() for _, spans in rows for _, span in spans]
    for axes, (caption, rows) in zip(all_axes, panels.items(), strict=True):
        for place, (label, spans) in enumerate(rows):
            # The rows of a rank's main thread are taller than those of its buckets.
            height = 0.8 if label.startswith(("rank", "main")) else 0.55
            for symbol, (begin, end) in spans:
                bar = [(begin, end - begin)], (place - height / 2, height)
                axes.broken_barh(*bar, color=COLOURS[_KINDS[symbol][2]], linewidth=0)
                if end - begin > _LABELLED * max(ends):
                    at = (begin + end) / 2, place
                    axes.text(*at, f"{end - begin:.0f}", ha="center", va="center", fontsize=7)
        axes.set_yticks(range(len(rows)), [label for label, _ in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.set_title(caption, loc="left")
        axes.tick_params(axis="x", labelbottom=axes is all_axes[-1])
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    all_axes[-1].set_xlim(0, max(ends))
    all_axes[-1].set_xlabel("ms")
    if title:
        figure.suptitle(title)
    handles = [axes.barh(0, 0, color=colour, label=what) for what, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    for path in paths:
        figure.savefig(path, dpi=120)
    return True


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
