"""A step as text, 100 columns wide: a line for what each rank computes, one for each bucket."""

from collections.abc import Iterable
from statistics import mean

from ddp_from_scratch.profiling.record import BucketTimes, RankTimes, Record, Span, StepTimes

WIDTH = 100
_LABEL = 22
_BARS = WIDTH - _LABEL - 2
# Buckets with a line of their own; a rank may have hundreds.
_MOST = 12

# A symbol, what it stands for, and its colour on a terminal.
_KINDS = {
    "F": ("forward", 34),
    "B": ("backward", 36),
    "p": ("pack", 33),
    "!": ("wait, exposed", 31),
    "u": ("unpack", 33),
    "O": ("optimizer", 35),
    ".": ("gradients arrive", 90),
    "-": ("waits for a rank", 31),
    "=": ("moves", 32),
}


def as_text(record: Record, step: StepTimes, *, colour: bool = False) -> str:
    """Draws one step: a line for each rank and each of its buckets, then the sums in words."""
    lines = [record.title, f"step {step.iteration}: {step.length:.1f} ms", ""]
    for rank in step.ranks:
        lines.append(_line(f"rank {rank.rank}", _compute(rank), step.length, colour))
        for bucket in rank.buckets[:_MOST]:
            label = f"  bucket {bucket.index}, {_size(record.bucket_nbytes(step, bucket.index))}"
            lines.append(_line(label, _bucket(rank, bucket, step), step.length, colour))
        if len(rank.buckets) > _MOST:
            lines.append(f"  and {len(rank.buckets) - _MOST} more buckets")
    lines += ["", legend(), ""]
    return "\n".join([*lines, *summary(record, step)])


def two_lines(step: StepTimes, length: float, *, colour: bool = False) -> str:
    """Draws rank 0's part of a step, all its buckets in one line; `length` ms fill the width."""
    rank = step.ranks[0]
    # Gradients arrive all the time, so one line of all buckets would hold nothing else.
    sent = [s for b in rank.buckets for s in _bucket(rank, b, step) if s[0] in "-="]
    computes = _line("computes", _compute(rank), length, colour)
    return computes + "\n" + _line("gradients", sent, length, colour)


def legend() -> str:
    """Returns what the symbols stand for, in two lines."""
    items = [f"{symbol} {what}" for symbol, (what, _) in _KINDS.items()]
    return "  ".join(items[:6]) + "\n" + "  ".join(items[6:])


def summary(record: Record, step: StepTimes) -> list[str]:
    """Says what was hidden, what was exposed, and who was waited for."""
    lines = [_of_rank(rank, step) for rank in step.ranks]
    buckets = step.ranks[0].buckets
    if len(step.ranks) > 1 and buckets:
        lasts = [bucket.last for bucket in buckets]
        latest = max(set(lasts), key=lasts.count)
        others = [r for r in step.ranks if r.rank != latest]
        waits = [b.met - b.sent[0] for r in others for b in r.buckets if b.last == latest]
        lines.append(
            f"rank {latest} launched {lasts.count(latest)} of {len(buckets)} buckets last; the "
            f"others had waited {mean(waits):.1f} ms for each"
        )
    if len(step.layout) == 1:
        size = _size(record.bucket_nbytes(step, 0))
        lines.append(f"1 bucket of {size}: it is full when backward ends, so nothing can overlap")
    if record.clock_error:
        lines.append(f"the clocks of the machines may differ by {record.clock_error:.2f} ms")
    return lines


def _of_rank(rank: RankTimes, step: StepTimes) -> str:
    text = (
        f"rank {rank.rank}: communication {rank.communication:.1f} ms, {rank.hidden:.0%} hidden; "
        f"exposed {rank.exposed:.1f} ms, {rank.exposed / step.length:.0%} of the step"
    )
    waits = [(bucket.wait[1] - bucket.wait[0], bucket.index) for bucket in rank.buckets]
    if waits and rank.exposed:
        longest, index = max(waits)
        text += f", {longest:.1f} of it for bucket {index}"
    return text


def _compute(rank: RankTimes) -> list[tuple[str, Span]]:
    spans = [("F", span) for span in rank.forward] + [("B", span) for span in rank.backward]
    if rank.optimizer is not None:
        spans.append(("O", rank.optimizer))
    for bucket in rank.buckets:
        spans += [("p", bucket.pack), ("!", bucket.wait), ("u", bucket.unpack)]
    return spans


def _bucket(rank: RankTimes, bucket: BucketTimes, step: StepTimes) -> list[tuple[str, Span]]:
    names = set(step.layout[bucket.index])
    begin = min((at for name, at in rank.arrived if name in names), default=bucket.pack[0])
    return [
        (".", (begin, bucket.pack[0])),
        ("p", bucket.pack),
        ("-", (bucket.sent[0], bucket.met)),
        ("=", (bucket.met, bucket.sent[1])),
        ("u", bucket.unpack),
    ]


def _line(label: str, spans: Iterable[tuple[str, Span]], length: float, colour: bool) -> str:
    cells = [" "] * _BARS
    covered = [0.0] * _BARS
    width = length / _BARS
    for symbol, (begin, end) in spans:
        first, last = int(begin / width), min(int(end / width), _BARS - 1)
        for cell in range(max(first, 0), last + 1):
            # The one that fills most of a cell; among equals the later, which is the finer one.
            part = min(end, (cell + 1) * width) - max(begin, cell * width)
            if part > 0 and part >= covered[cell] * (0.5 if symbol in "p!u" else 1):
                cells[cell], covered[cell] = symbol, part
    if colour:
        cells = [c if c == " " else f"\033[{_KINDS[c][1]}m{c}\033[0m" for c in cells]
    return f"{label:<{_LABEL}}|{''.join(cells)}|"


def _size(nbytes: int) -> str:
    mib = nbytes / 2**20
    return f"{mib:.3g} MiB" if mib >= 0.01 else f"{nbytes} B"
