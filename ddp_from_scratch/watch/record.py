"""The record of some steps on all ranks, in milliseconds on one clock.

launched       the rank launches a bucket's collective
  |  waiting   until the last rank launches it, too
met
  |  moving    until the average has arrived
landed
  |  waited    by the main thread; this time is exposed
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ddp_from_scratch.watch.recorder import Layout, Mark, Marks, StepMarks

Span = tuple[float, float]  # begin and end


@dataclass(frozen=True)
class BucketTimes:
    """One bucket of a step on one rank, in ms."""

    index: int
    pack: Span  # the copies into the buffer, and the call of the comm hook
    sent: Span  # from the launch to the average
    wait: Span  # the main thread does nothing else
    unpack: Span  # the copies into `.grad`
    met: float = 0.0  # when the last rank launched the bucket
    last: int = 0  # the rank that launched it last
    moving: float = 0.0  # when data began to move

    @property
    def exposed(self) -> float:
        return self.wait[1] - self.wait[0]

    @property
    def exposed_for_a_rank(self) -> float:
        """The part of `exposed` before the last rank launched the bucket."""
        return min(max(self.met - self.wait[0], 0.0), self.exposed)


@dataclass(frozen=True)
class RankTimes:
    """One step on one rank, in ms."""

    rank: int
    forward: tuple[Span, ...]
    backward: tuple[Span, ...]
    arrived: tuple[tuple[str, float], ...]  # parameters, in the order of their gradients
    buckets: tuple[BucketTimes, ...]  # only launched ones
    optimizer: Span | None  # None if no optimizer stepped
    begin: float
    end: float

    @property
    def communication(self) -> float:
        return _covered([bucket.sent for bucket in self.buckets])

    @property
    def exposed(self) -> float:
        return sum(bucket.exposed for bucket in self.buckets)

    @property
    def hidden(self) -> float:
        """The share of communication during which the main thread did not wait, 0 to 1."""
        whole, waits = self.communication, [bucket.wait for bucket in self.buckets]
        if not whole:
            return 0.0
        sent = [bucket.sent for bucket in self.buckets]
        both = whole + _covered(waits) - _covered([*sent, *waits])
        return 1 - both / whole


@dataclass(frozen=True)
class StepTimes:
    """One step; time 0 is its beginning on the first rank to begin."""

    iteration: int
    layout: Layout  # the parameters of each bucket
    ranks: tuple[RankTimes, ...]

    @property
    def length(self) -> float:
        return max(rank.end for rank in self.ranks)


@dataclass(frozen=True)
class Record:
    """Steps of all ranks."""

    title: str  # names the model, the transport, and the number of ranks
    nbytes: dict[str, int]  # of each parameter's gradient
    hosts: tuple[str, ...]  # of each rank
    clock_error: float  # the remaining ms between the clocks of two hosts; 0 on one host
    steps: tuple[StepTimes, ...]

    @property
    def typical(self) -> StepTimes:
        return sorted(self.steps, key=lambda step: step.length)[len(self.steps) // 2]

    def bucket_nbytes(self, step: StepTimes, index: int) -> int:
        return sum(self.nbytes[name] for name in step.layout[index])


def rank_times(rank: int, marks: Marks, step: StepMarks) -> RankTimes:
    """Converts one step's marks to times, in ms on the rank's own clock."""

    def ms(mark: Mark) -> float:
        return marks.seconds(mark) * 1e3

    forward: list[Span] = []
    starts: list[float] = []
    optimizer: list[float] = []
    averaged = backward_end = 0.0
    began, is_new = None, False
    for event, mark in step.events:
        if event == "forward":
            # A pass that raises has no end, nor has a checkpoint's partial recomputation.
            began = mark
        elif event == "forwarded" and began is not None:
            forward.append((ms(began), ms(mark)))
            began, is_new = None, True
        elif event == "backward" and is_new:
            # Only the first backward pass: more losses of the same forward pass may follow.
            starts.append(ms(mark))
            is_new = False
        elif event == "all launched":
            backward_end = ms(mark)
        elif event == "averaged":
            averaged = ms(mark)
        elif event == "step" and not optimizer:
            optimizer = [ms(mark)]
        elif event == "stepped" and optimizer:
            # The last of several optimizers ends the step.
            optimizer[1:] = [ms(mark)]
    marked = zip(step.arrived[::2], step.arrived[1::2], strict=True)
    arrived = tuple((name, ms(mark)) for name, mark in marked)
    starts = starts or [at for _, at in arrived[:1]]
    # A backward pass ends at the next forward pass, and the last one once all buckets are launched.
    ends = [next((f[0] for f in forward if f[0] > start), backward_end) for start in starts]
    backward = tuple((start, max(start, end)) for start, end in zip(starts, ends, strict=True))
    buckets = []
    for index, found in sorted(step.buckets.items()):
        at = {moment: ms(mark) for moment, mark in found.items() if mark is not None}
        if not {"launched", "unpacked"} <= at.keys():
            continue
        # Sparse buckets and PowerSGD's arrive during the wait, and a callback may run late.
        landed = min(at.get("landed", at["waited"]), at["waited"])
        pack, sent = (at["pack"], at["launched"]), (at["launched"], max(landed, at["launched"]))
        wait, unpack = (at["wait"], at["waited"]), (at["unpack"], at["unpacked"])
        buckets.append(BucketTimes(index, pack, sent, wait, unpack))
    # `backward_and_step` notes "step" before its backward pass.
    update = (max(optimizer[0], averaged), optimizer[1]) if len(optimizer) == 2 else None
    # Inside `join()`, a rank without data has only buckets.
    begin = min([*(s[0] for s in (*forward, *backward)), *(b.pack[0] for b in buckets), averaged])
    end = averaged if update is None else max(averaged, update[1])
    return RankTimes(rank, tuple(forward), backward, arrived, tuple(buckets), update, begin, end)


def step_times(iteration: int, layout: Layout, ranks: Sequence[RankTimes]) -> StepTimes:
    """Joins one step of all ranks, whose times are on one clock, and fills in `met` and `last`."""
    sent: dict[int, list[tuple[float, int]]] = {}
    for times in ranks:
        for bucket in times.buckets:
            sent.setdefault(bucket.index, []).append((bucket.sent[0], times.rank))
    first = min(times.begin for times in ranks)
    joined = []
    for times in ranks:
        buckets: list[BucketTimes] = []
        for bucket in times.buckets:
            met, last = max(sent[bucket.index])
            # The clocks may differ a little, but no bucket arrives before its last launch.
            met, landed = min(met, bucket.sent[1]), bucket.sent[1]
            # Most groups move buckets one by one. In others, a later bucket may arrive first.
            earlier = [other.sent[1] for other in buckets if other.sent[1] <= landed]
            moving = max([met, *earlier])
            buckets.append(replace(bucket, met=met, last=last, moving=moving))
        joined.append(moved(replace(times, buckets=tuple(buckets)), -first))
    return StepTimes(iteration, layout, tuple(joined))


def moved(value: Any, by: float) -> Any:
    """Adds `by` ms to every time in a span, a tuple, or an instance of the classes above."""
    if isinstance(value, float):
        return value + by
    if isinstance(value, tuple):
        return tuple(moved(item, by) for item in value)
    if isinstance(value, (RankTimes, BucketTimes)):
        times = {field.name: moved(getattr(value, field.name), by) for field in fields(value)}
        return replace(value, **times)
    return value


def _covered(spans: Sequence[Span]) -> float:
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
