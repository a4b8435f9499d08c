"""A step as a picture, for documents."""

from pathlib import Path

from ddp_from_scratch.profiling.record import RankTimes, Record, Span, StepTimes

# Told apart also by who sees no red or green (Okabe and Ito 2008). The page has the same.
COLOURS = {
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "optimizer": "#cc79a7",
    "pack, unpack": "#e69f00",
    "exposed wait": "#d55e00",
    "waits for a rank": "#f4c7a5",
    "moves": "#009e73",
}


def draw(record: Record, step: StepTimes, *paths: Path) -> bool:
    """Draws one step into files of the formats that their names say.

    Returns:
        False if there is no matplotlib; nothing is drawn then.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    rows = sum(1 + len(rank.buckets) for rank in step.ranks)
    figure = Figure(figsize=(12, 1.6 + 0.28 * rows))
    # Not pyplot: the program may draw with it, on a screen of its own.
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    labels: list[str] = []
    for rank in step.ranks:
        _draw_row(axes, len(labels), _compute(rank), 0.8)
        labels.append(f"rank {rank.rank}")
        for bucket in rank.buckets:
            sent = (bucket.sent[0], bucket.met), (bucket.met, bucket.sent[1])
            row = [("waits for a rank", sent[0]), ("moves", sent[1])]
            _draw_row(axes, len(labels), row, 0.55)
            mib = record.bucket_nbytes(step, bucket.index) / 2**20
            labels.append(f"bucket {bucket.index}, {mib:.3g} MiB")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, step.length)
    axes.set_xlabel("ms")
    axes.set_title(f"{record.title}: step {step.iteration}, {step.length:.1f} ms", loc="left")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    handles = [axes.barh(0, 0, color=colour, label=what) for what, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.set_layout_engine("constrained")
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


def _draw_row(axes: object, row: int, spans: list[tuple[str, Span]], height: float) -> None:
    for what, (begin, end) in spans:
        axes.broken_barh(  # type: ignore[attr-defined]  # matplotlib may not be there
            [(begin, end - begin)], (row - height / 2, height), color=COLOURS[what], linewidth=0
        )
