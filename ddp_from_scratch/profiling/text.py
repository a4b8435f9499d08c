"""A step as text, 100 columns wide: a line for what each rank computes, one for each bucket."""

from collections.abc import Iterable, Iterator

from ddp_from_scratch.profiling.record import BucketTimes, RankTimes, Record, Span, StepTimes

WIDTH = 100

# Buckets with a line of their own; a rank may have hundreds.
MOST = 12
# Ms of waiting that are worth a word.
_LEAST = 0.05

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
    rows: list[tuple[str, list[tuple[str, Span]]]] = []
    for rank in step.ranks:
        rows.append((f"rank {rank.rank}", _compute(rank)))
        for bucket in shown(rank):
            label = f"  bucket {bucket.index}, {size_of(record.bucket_nbytes(step, bucket.index))}"
            rows.append((label, _bucket(rank, bucket, step)))
    width = max(len(label) for label, _ in rows) + 1
    lines = [record.title, f"step {step.iteration}: {step.length:.1f} ms", ""]
    lines += [_line(label, width, spans, step.length, colour) for label, spans in rows]
    if len(step.layout) > MOST:
        lines.append(f"{len(step.layout)} buckets, of which those are shown that were waited for")
    lines += ["", legend(), ""]
    return "\n".join([*lines, *summary(record, step)])


def two_lines(step: StepTimes, length: float, *, colour: bool = False) -> str:
    """Draws rank 0's part of a step, all its buckets in one line; `length` ms fill the width."""
    rank = step.ranks[0]
    # Marks of arriving gradients would fill the whole line.
    sent = [s for b in rank.buckets for s in _bucket(rank, b, step) if s[0] in "-="]
    rows = ("main thread", _compute(rank)), ("gradients", sent)
    return "\n".join(_line(label, 12, spans, length, colour) for label, spans in rows)


def legend() -> str:
    """Returns what the symbols stand for, in two lines."""
    items = [f"{symbol} {what}" for symbol, (what, _) in _KINDS.items()]
    return "  ".join(items[:6]) + "\n" + "  ".join(items[6:])


def summary(record: Record, step: StepTimes) -> list[str]:
    """Says what was hidden, what was exposed, and who was waited for."""
    lines = [line for rank in step.ranks for line in _of_rank(rank)]
    waited = dict.fromkeys(range(len(step.ranks)), 0.0)
    for rank in step.ranks:
        for bucket in rank.buckets:
            waited[bucket.last] += bucket.exposed_for_a_rank
    late = max(waited, key=lambda rank: waited[rank])
    if waited[late] >= _LEAST:
        lines.append(f"rank {late} was late: the others waited {waited[late]:.1f} ms for it in all")
    if len(step.layout) == 1:
        size = size_of(record.bucket_nbytes(step, 0))
        lines.append(f"1 bucket of {size}: it is full near the end of backward, so little overlaps")
    if record.clock_error:
        lines.append(f"the clocks of the machines may differ by {record.clock_error:.2f} ms")
    return lines


def _of_rank(rank: RankTimes) -> Iterator[str]:
    yield (
        f"rank {rank.rank}: communication {rank.communication:.1f} ms, {rank.hidden:.0%} hidden; "
        f"exposed {rank.exposed:.1f} ms"
    )
    longest = max(rank.buckets, key=lambda bucket: bucket.exposed, default=None)
    if longest is not None and longest.exposed >= _LEAST:
        text = f"rank {rank.rank} waited {longest.exposed:.1f} ms for bucket {longest.index}"
        if longest.exposed_for_a_rank >= _LEAST:
            part = longest.exposed_for_a_rank
            text += f", of which {part:.1f} until rank {longest.last} launched it"
        yield text


def shown(rank: RankTimes) -> list[BucketTimes]:
    """Returns the buckets that get a line: all, or those that were waited for longest."""
    longest = sorted(rank.buckets, key=lambda bucket: -bucket.exposed)[:MOST]
    return sorted(longest, key=lambda bucket: bucket.index)


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
        ("=", (bucket.moving, bucket.sent[1])),
        ("u", bucket.unpack),
    ]


def _line(
    label: str, labels: int, spans: Iterable[tuple[str, Span]], length: float, colour: bool
) -> str:
    bars = WIDTH - labels - 2
    cells, covered = [" "] * bars, [0.0] * bars
    width = length / bars
    for symbol, (begin, end) in spans:
        first, last = int(begin / width), min(int(end / width), bars - 1)
        for cell in range(max(first, 0), last + 1):
            # The one that fills most of a cell. Short ones count double: they are rarely alone.
            part = min(end, (cell + 1) * width) - max(begin, cell * width)
            if part > 0 and part >= covered[cell] * (0.5 if symbol in "p!u" else 1):
                cells[cell], covered[cell] = symbol, part
    if colour:
        cells = [c if c == " " else f"\033[{_KINDS[c][1]}m{c}\033[0m" for c in cells]
    return f"{label:<{labels}}|{''.join(cells)}|"


def size_of(nbytes: int) -> str:
    """Bytes in words."""
    mib = nbytes / 2**20
    return f"{mib:.3g} MiB" if mib >= 0.01 else f"{nbytes} B"
