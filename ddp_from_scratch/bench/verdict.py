"""Tables of timed contenders, and the verdict in words below them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ddp_from_scratch.bench.contenders import NO_COMMUNICATION, TORCH
from ddp_from_scratch.bench.samples import Interval, Samples


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
        return fastest(s for s in self.samples if _is_reference(s.name))

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
        return one.ratio_to(other) if self.paired else one.unpaired_ratio_to(other)


def fastest(samples: Iterable[Samples]) -> Samples | None:
    """Returns the samples with the lowest median; None if there are none."""
    return min(samples, key=lambda s: s.quartiles[1], default=None)


def kind(name: str) -> str:
    """Tells whether a contender is "reference", "torch" or "ours"."""
    if name == NO_COMMUNICATION:
        return "reference"
    return "torch" if name.startswith(TORCH) else "ours"


def _is_reference(name: str) -> bool:
    what, _, group = name.partition(", ")[0].partition(" on ")
    return what == TORCH and group in ("", "gloo", "nccl")


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
    if ratio is None or ratio[1] == ratio[2] == 1:
        return "-" if ratio is None else "1"
    middle, low, high = ratio
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def verdict(run: Run) -> str:
    """Compares this library's fastest contender per backend, unless the machine was busy."""
    if run.disturbed is not None:
        return f"no verdict: the machine was not quiet ({run.disturbed})"
    torch_ddp, backends = run.torch_ddp, dict.fromkeys(_backend(s.name) for s in run.ours)
    if torch_ddp is None or not backends:
        return ""
    each = [[s for s in run.ours if _backend(s.name) == backend] for backend in backends]
    bests = [min(ours, key=lambda s: s.quartiles[1]) for ours in each]
    return "\n".join(f"for this model: {_compared(run, best, torch_ddp)}" for best in bests)


def _backend(name: str) -> str:
    return name.partition(", ")[0].partition(" on ")[2]


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
