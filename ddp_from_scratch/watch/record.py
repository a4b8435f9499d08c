"""The record of a step: marks that a rank takes while the step runs, and the times they turn into.

A step lasts from the end of one average to the end of the next, with these events (`Event`):

    BEGIN  STEP STEPPED  FORWARD FORWARDED  BACKWARD  LAUNCH.. OVER  ALL_LAUNCHED  AVERAGED
           '- in a timeline, this optimizer step belongs to the previous step

`stragglers.py` turns the events into phases, `rank_times` into the spans of a timeline. In these a
bucket's communication has three parts:

    launched       the rank launches the bucket's collective
      |  waiting   until the last rank launches it, too
    met
      |  moving    until the average has arrived
    landed
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from typing import NamedTuple

import torch

from ddp_from_scratch.common import gpu

TimeMark = float | torch.Event  # what `Clock.take` returns: a time of the host, or a GPU's event
BucketNames = tuple[tuple[str, ...], ...]

# Marks, while a step runs -----------------------------------------------------------------------


class Clock:
    """Takes marks on the device that computes. Those of a GPU are read after the steps.

    On the host, all ranks of a Linux machine share one clock. A GPU's marks are events on the
    current stream, since the host runs ahead of it.
    """

    def __init__(self, device: torch.device) -> None:
        # The clock function itself: every gradient calls it, and a wrapper would double the cost.
        self.take: Callable[[], TimeMark] = time.perf_counter
        if gpu.is_gpu(device):
            event = partial(gpu.record, device, timed=True)
            self.take = event
            gpu.synchronize(device)  # one moment on both clocks
            self._near, self._its_seconds = event(), time.perf_counter()
            self._near.synchronize()

    def seconds(self, mark: TimeMark) -> float:
        """Returns a mark in seconds of `time.perf_counter`. Waits for a GPU's event."""
        if isinstance(mark, float):
            return mark
        mark.synchronize()
        # `elapsed_time` is a float32 in ms, exact to 0.1 us only if the events are close together.
        passed = self._near.elapsed_time(mark) / 1e3
        seconds = self._its_seconds + passed
        if passed > 1:
            self._near, self._its_seconds = mark, seconds
        return seconds


class Event(Enum):
    """What happens in a step."""

    BEGIN = auto()
    FORWARD = auto()  # the module is called, and FORWARDED when it returns
    FORWARDED = auto()
    BACKWARD = auto()  # autograd reaches an output of the module
    LAUNCH = auto()  # a bucket is launched; its mark is that of the event before it
    WAIT = auto()  # for a bucket or for weights, in the midst of backward, until WAITED
    WAITED = auto()
    OVER = auto()  # the backward pass ends
    ALL_LAUNCHED = auto()
    AVERAGED = auto()
    STEP = auto()  # an optimizer steps, until STEPPED
    STEPPED = auto()


class EventMark(NamedTuple):
    """When an event happened."""

    event: Event
    mark: TimeMark


class GradientMark(NamedTuple):
    """When a parameter's gradient arrived."""

    name: str
    mark: TimeMark


@dataclass
class BucketMarks:
    """The marks of one bucket; None for what has not happened yet."""

    pack: TimeMark
    launched: TimeMark | None = None
    landed: TimeMark | None = None  # taken by a thread of the group
    wait: TimeMark | None = None  # the first wait; a comm hook may make a second one
    waited: TimeMark | None = None
    unpack: TimeMark | None = None  # the end of the last wait
    unpacked: TimeMark | None = None


@dataclass
class StepMarks:
    """The marks of one step on one rank."""

    iteration: int  # the number of averages before it
    layout: BucketNames = ()  # the parameters of each bucket, in launch order
    events: list[EventMark] = field(default_factory=list)
    arrived: list[GradientMark] = field(default_factory=list)
    buckets: dict[int, BucketMarks] = field(default_factory=dict)  # by index

    def first(self, event: Event) -> TimeMark | None:
        return next((mark for found, mark in self.events if found is event), None)

    def last(self, event: Event) -> TimeMark | None:
        return next((mark for found, mark in reversed(self.events) if found is event), None)


# Times, in ms on one clock ----------------------------------------------------------------------


class Span(NamedTuple):
    """A stretch of time."""

    begin: float
    end: float

    @property
    def length(self) -> float:
        return self.end - self.begin

    def moved(self, by: float) -> "Span":
        return Span(self.begin + by, self.end + by)


class Arrival(NamedTuple):
    """When a parameter's gradient arrived."""

    name: str
    at: float


@dataclass(frozen=True)
class BucketTimes:
    """One bucket of a step on one rank."""

    index: int
    pack: Span  # the copies into the buffer, and the call of the comm hook
    sent: Span  # from the launch to the average
    wait: Span  # the main thread does nothing else: this time is exposed
    unpack: Span  # the copies into `.grad`
    # Known once all ranks' times are joined (`step_times`).
    met: float = 0.0  # when the last rank launched the bucket
    last: int = 0  # the rank that launched it last
    moving: float = 0.0  # when data began to move

    @property
    def exposed(self) -> float:
        return self.wait.length

    @property
    def exposed_for_a_rank(self) -> float:
        """The part of `exposed` before the last rank launched the bucket."""
        return min(max(self.met - self.wait.begin, 0.0), self.exposed)

    def moved(self, by: float) -> "BucketTimes":
        return replace(
            self,
            pack=self.pack.moved(by),
            sent=self.sent.moved(by),
            wait=self.wait.moved(by),
            unpack=self.unpack.moved(by),
            met=self.met + by,
            moving=self.moving + by,
        )


@dataclass(frozen=True)
class RankTimes:
    """One step on one rank."""

    rank: int
    forward: tuple[Span, ...]
    backward: tuple[Span, ...]
    arrived: tuple[Arrival, ...]  # in the order of the gradients
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
        if not self.communication:
            return 0.0
        sent, waits = [b.sent for b in self.buckets], [b.wait for b in self.buckets]
        both = self.communication + _covered(waits) - _covered([*sent, *waits])
        return 1 - both / self.communication

    def moved(self, by: float) -> "RankTimes":
        """Returns these times on a clock that is ahead by so many ms."""
        return replace(
            self,
            forward=tuple(span.moved(by) for span in self.forward),
            backward=tuple(span.moved(by) for span in self.backward),
            arrived=tuple(Arrival(name, at + by) for name, at in self.arrived),
            buckets=tuple(bucket.moved(by) for bucket in self.buckets),
            optimizer=None if self.optimizer is None else self.optimizer.moved(by),
            begin=self.begin + by,
            end=self.end + by,
        )


@dataclass(frozen=True)
class StepTimes:
    """One step; time 0 is its beginning on the first rank to begin."""

    iteration: int
    layout: BucketNames  # the parameters of each bucket
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


def _covered(spans: Sequence[Span]) -> float:
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


# From marks to times ----------------------------------------------------------------------------


def rank_times(rank: int, clock: Clock, step: StepMarks) -> RankTimes:
    """Converts one step's marks to times on the rank's own clock."""

    def ms(mark: TimeMark) -> float:
        return clock.seconds(mark) * 1e3

    forward, starts = _passes(step.events, ms)
    arrived = tuple(Arrival(name, ms(mark)) for name, mark in step.arrived)
    starts = starts or [at for _, at in arrived[:1]]
    averaged = ms(step.last(Event.AVERAGED) or 0.0)
    launched = ms(step.last(Event.ALL_LAUNCHED) or 0.0)
    # A backward pass ends at the next forward pass, and the last one once all buckets are launched.
    ends = [next((f.begin for f in forward if f.begin > at), launched) for at in starts]
    backward = [Span(at, max(at, end)) for at, end in zip(starts, ends, strict=True)]
    found = [_bucket_times(index, marks, ms) for index, marks in sorted(step.buckets.items())]
    buckets = [bucket for bucket in found if bucket is not None]
    update = None
    first, last = step.first(Event.STEP), step.last(Event.STEPPED)
    if first is not None and last is not None:
        # `backward_and_step` notes STEP before its backward pass.
        update = Span(max(ms(first), averaged), ms(last))
    # Inside `join()`, a rank without data has only buckets.
    spans = [*forward, *backward, *(bucket.pack for bucket in buckets)]
    return RankTimes(
        rank,
        tuple(forward),
        tuple(backward),
        arrived,
        tuple(buckets),
        update,
        begin=min([*(span.begin for span in spans), averaged]),
        end=averaged if update is None else max(averaged, update.end),
    )


def _passes(
    events: Sequence[EventMark], ms: Callable[[TimeMark], float]
) -> tuple[list[Span], list[float]]:
    """Returns the forward passes, and the begin of each one's first backward pass."""
    forward: list[Span] = []
    starts: list[float] = []
    began: TimeMark | None = None
    is_new = False
    for event, mark in events:
        if event is Event.FORWARD:
            # A pass that raises has no end, nor has a checkpoint's partial recomputation.
            began = mark
        elif event is Event.FORWARDED and began is not None:
            forward.append(Span(ms(began), ms(mark)))
            began, is_new = None, True
        elif event is Event.BACKWARD and is_new:
            # Only the first backward pass: more losses of the same forward pass may follow.
            starts.append(ms(mark))
            is_new = False
    return forward, starts


def _bucket_times(
    index: int, marks: BucketMarks, ms: Callable[[TimeMark], float]
) -> BucketTimes | None:
    if marks.launched is None or marks.wait is None or marks.waited is None:
        return None
    if marks.unpack is None or marks.unpacked is None:
        return None
    launched, waited = ms(marks.launched), ms(marks.waited)
    # Sparse buckets and PowerSGD's arrive during the wait, and a callback may run late.
    landed = waited if marks.landed is None else min(ms(marks.landed), waited)
    return BucketTimes(
        index,
        pack=Span(ms(marks.pack), launched),
        sent=Span(launched, max(landed, launched)),
        wait=Span(ms(marks.wait), waited),
        unpack=Span(ms(marks.unpack), ms(marks.unpacked)),
    )


def step_times(iteration: int, layout: BucketNames, ranks: Sequence[RankTimes]) -> StepTimes:
    """Joins one step of all ranks, whose times are on one clock, and fills in `met` and `last`."""
    launches: dict[int, tuple[float, int]] = {}  # the last of each bucket, and its rank
    for times in ranks:
        for bucket in times.buckets:
            launch = bucket.sent.begin, times.rank
            launches[bucket.index] = max(launch, launches.get(bucket.index, launch))
    first = min(times.begin for times in ranks)
    joined = []
    for times in ranks:
        buckets: list[BucketTimes] = []
        for bucket in times.buckets:
            met, last = launches[bucket.index]
            # The clocks may differ a little, but no bucket arrives before its last launch.
            met, landed = min(met, bucket.sent.end), bucket.sent.end
            # Most groups move buckets one by one. In others, a later bucket may arrive first.
            earlier = [other.sent.end for other in buckets if other.sent.end <= landed]
            buckets.append(replace(bucket, met=met, last=last, moving=max([met, *earlier])))
        joined.append(replace(times, buckets=tuple(buckets)).moved(-first))
    return StepTimes(iteration, layout, tuple(joined))
