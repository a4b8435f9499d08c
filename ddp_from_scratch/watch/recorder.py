"""Records the events of training steps on one rank, and turns them into times.

A step lasts from the end of one average to the end of the next:

    begin  step stepped  forward forwarded  backward  launch.. over  all launched  averaged
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
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch

from ddp_from_scratch.common import gpu
from ddp_from_scratch.core.bucket import Bucket
from ddp_from_scratch.core.observer import Tracer
from ddp_from_scratch.options.unused import find_tensors

TimeMark = Any  # what `Marks.take` returns: a time of the host, or an event of a GPU
BucketNames = tuple[tuple[str, ...], ...]
Span = tuple[float, float]  # begin and end

# Marks ------------------------------------------------------------------------------------------


class Marks:
    """Takes times of the device that computes. Those of a GPU are read after the steps.

    On the host, all ranks of a Linux machine share one clock. A GPU's times are events on the
    current stream, since the host runs ahead of it.
    """

    def __init__(self, device: torch.device) -> None:
        # The clock function itself: every gradient calls it, and a wrapper would double the cost.
        self.take: Callable[[], TimeMark] = time.perf_counter
        if gpu.is_gpu(device):
            self.take = partial(gpu.record, device, timed=True)
            gpu.synchronize(device)  # one moment on both clocks
            self._near, self._its_seconds = self.take(), time.perf_counter()
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


@dataclass
class StepMarks:
    """The marks of one step."""

    iteration: int  # the number of averages before it
    layout: BucketNames = ()  # the parameters of each bucket, in launch order
    arrived: list[tuple[str, TimeMark]] = field(default_factory=list)  # a parameter's gradient
    buckets: dict[int, dict[str, TimeMark]] = field(default_factory=dict)  # by index and moment
    events: list[tuple[str, TimeMark]] = field(default_factory=list)  # a launch has no mark
    launched: bool = False  # True once all buckets are


class Recorder(Tracer):
    """Takes a mark at each event of a step. Subclasses decide where a step ends, and read it."""

    def __init__(self, device: torch.device) -> None:
        self.marks: Marks = Marks(device)
        self.step: StepMarks | None = None  # the current step; None records nothing
        self._in_backward = False

    def begin(self, step: StepMarks) -> None:
        self.step = step
        self.note("begin")

    def note(self, event: str) -> None:
        if self.step is not None:
            self.step.events.append((event, self.marks.take()))
            self._in_backward = event in ("backward", "waited")

    def on_forward(self) -> None:
        if torch.is_grad_enabled():  # else it is an evaluation
            self.note("forward")

    def on_forwarded(self, outputs: object) -> None:
        if torch.is_grad_enabled():
            self.note("forwarded")
        for tensor in find_tensors(outputs):
            # A leaf may be a parameter, which would keep the hook forever.
            if tensor.grad_fn is not None:
                tensor.register_hook(self._on_backward)

    def _on_backward(self, gradient: torch.Tensor) -> None:
        # Only the first output that autograd reaches begins the pass.
        if self.step is not None and not self._in_backward:
            self.note("backward")
            # A pass under no_sync() launches nothing, so autograd must report its end.
            torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)

    def _on_backward_end(self) -> None:
        if self._in_backward:
            self.note("over")

    def on_launch(self, bucket: Bucket) -> None:
        if self.step is not None:
            # A launch after these events shows a backward pass whose begin was not noted.
            self._in_backward |= self.step.events[-1][0] in ("begin", "over", "step", "stepped")
            self.step.events.append(("launch", None))

    def on_wait(self, bucket: Bucket | None) -> None:
        # Only waits during backward, as with PowerSGD; later ones are part of the final wait.
        if self.step is not None and not self.step.launched:
            self.note("wait")

    def on_waited(self, bucket: Bucket | None) -> None:
        if self.step is not None and not self.step.launched:
            self.note("waited")

    def on_all_launched(self) -> None:
        self.note("all launched")
        if self.step is not None:
            self.step.launched = True

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.note("step")

    def on_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self.note("stepped")


# Times, in ms on one clock ----------------------------------------------------------------------


@dataclass(frozen=True)
class BucketTimes:
    """One bucket of a step on one rank."""

    index: int
    pack: Span  # the copies into the buffer, and the call of the comm hook
    sent: Span  # from the launch to the average
    wait: Span  # the main thread does nothing else: this time is exposed
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
    """One step on one rank."""

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
        if not self.communication:
            return 0.0
        sent, waits = [b.sent for b in self.buckets], [b.wait for b in self.buckets]
        both = self.communication + _covered(waits) - _covered([*sent, *waits])
        return 1 - both / self.communication


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


def rank_times(rank: int, marks: Marks, step: StepMarks) -> RankTimes:
    """Converts one step's marks to times on the rank's own clock."""

    def ms(mark: TimeMark) -> float:
        return marks.seconds(mark) * 1e3

    forward: list[Span] = []
    starts: list[float] = []
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
    arrived = tuple((name, ms(mark)) for name, mark in step.arrived)
    starts = starts or [at for _, at in arrived[:1]]
    events = [(event, mark) for event, mark in step.events if event != "launch"]
    first, last = dict(reversed(events)), dict(events)  # by event
    averaged, launched = (ms(last.get(e, 0.0)) for e in ("averaged", "all launched"))
    # A backward pass ends at the next forward pass, and the last one once all buckets are launched.
    ends = [next((f[0] for f in forward if f[0] > start), launched) for start in starts]
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
    update = None
    if "step" in first and "stepped" in last:
        # `backward_and_step` notes "step" before its backward pass.
        update = max(ms(first["step"]), averaged), ms(last["stepped"])
    # Inside `join()`, a rank without data has only buckets.
    begin = min([*(s[0] for s in (*forward, *backward)), *(b.pack[0] for b in buckets), averaged])
    end = averaged if update is None else max(averaged, update[1])
    return RankTimes(rank, tuple(forward), backward, arrived, tuple(buckets), update, begin, end)


def step_times(iteration: int, layout: BucketNames, ranks: Sequence[RankTimes]) -> StepTimes:
    """Joins one step of all ranks, whose times are on one clock, and fills in `met` and `last`."""
    launches: dict[int, tuple[float, int]] = {}  # the last of each bucket, and its rank
    for times in ranks:
        for bucket in times.buckets:
            launch = bucket.sent[0], times.rank
            launches[bucket.index] = max(launch, launches.get(bucket.index, launch))
    first = min(times.begin for times in ranks)
    joined = []
    for times in ranks:
        buckets: list[BucketTimes] = []
        for bucket in times.buckets:
            met, last = launches[bucket.index]
            # The clocks may differ a little, but no bucket arrives before its last launch.
            met, landed = min(met, bucket.sent[1]), bucket.sent[1]
            # Most groups move buckets one by one. In others, a later bucket may arrive first.
            earlier = [other.sent[1] for other in buckets if other.sent[1] <= landed]
            buckets.append(replace(bucket, met=met, last=last, moving=max([met, *earlier])))
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
