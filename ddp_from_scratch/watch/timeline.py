"""`timeline`: records steps of all ranks on one clock and writes them as text, page and picture."""

import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch.backend.transport import this_machine
from ddp_from_scratch.common import gpu
from ddp_from_scratch.common.arguments import check_whole
from ddp_from_scratch.common.errors import PeerError, UsageError, one_line
from ddp_from_scratch.common.group import cpu_group, gather_objects
from ddp_from_scratch.core.bucket import Bucket
from ddp_from_scratch.core.wrapped import reducer_of
from ddp_from_scratch.watch import render
from ddp_from_scratch.watch.record import (
    BucketMarks,
    BucketNames,
    Event,
    GradientMark,
    RankTimes,
    Record,
    StepMarks,
    TimeMark,
    rank_times,
    step_times,
)
from ddp_from_scratch.watch.recorder import Recorder

SKIP = 3  # averages before the first recorded step; the first of them rebuilds the buckets
TOO_FEW = "no timeline: too few steps"
_ROUNDS, _CLOCK_TAG = 20, 0  # of the messages that compare clocks


class Timeline(Recorder):
    """Records some steps, as `timeline` does. The constructor and `close` are collective."""

    def __init__(
        self, reducer: Any, folder: Path | str | None, steps: int = 5, skip: int = SKIP
    ) -> None:
        check_whole("steps", steps)
        check_whole("skip", skip)
        if steps < 1 or skip < 0:
            raise UsageError(f"steps must be 1 or more and skip 0 or more, got {steps}, {skip}")
        self.record: Record | None = None  # equal on every rank, once its steps are complete
        self.has_picture: bool = False  # True if rank 0 has matplotlib
        reducer = reducer_of(reducer)
        self._timed, self._count = reducer, steps
        self.folder: Path | None = None if folder is None else Path(folder)
        self._group = cpu_group(reducer.process_group)
        self.rank: int = self._group.rank()
        if self.folder is not None:
            self._on_rank_0(partial(_make, self.folder))
        self._hosts = gather_objects(f"{socket.gethostname()}/{this_machine()}", self._group)
        self._clocks = clock_offsets(self._hosts, self._group)
        super().__init__(reducer.core.device)
        self._steps: list[StepMarks] = []  # the last one is incomplete
        self._first = reducer.iteration + skip
        averaged = {name for bucket in reducer.buckets for name in bucket}
        parameters = {n: p for n, p in reducer.module.named_parameters() if n in averaged}
        self._sizes = {name: parameter.nbytes for name, parameter in parameters.items()}
        self._arrived, self._handles = mark_arrivals(parameters, self.clock.take)
        reducer.add_observer(self)
        self.is_open: bool = True  # False once it is closed or discarded
        self._begin(reducer.iteration)

    def close(self) -> None:
        """Ends the recording, gathers it and writes it. Collective, idempotent."""
        if not self.is_open:
            return
        self.discard()
        with gpu.current(self._timed.core.device):
            self.record = self._gathered()
        if self.record is not None and self.folder is not None:
            self.has_picture = bool(self._on_rank_0(partial(write, self.record, self.folder)))

    def as_text(self, *, colour: bool = False) -> str:
        """Returns the text of `timeline.txt`, perhaps with a terminal's colours.

        Raises a RuntimeError before the record is complete.
        """
        if self.record is None:
            raise RuntimeError("the timeline has no record yet: close() completes it")
        return render.as_text(self.record, self.record.typical, colour=colour)

    def discard(self) -> None:
        """Ends the recording and drops it on this rank. Idempotent."""
        if self.is_open:
            self.is_open, self.step = False, None
            self._timed.remove_observer(self)
            for handle in self._handles:
                handle.remove()

    # The steps ----------------------------------------------------------------------------------

    def _begin(self, iteration: int) -> None:
        self.step: StepMarks | None = None
        self._arrived.clear()
        if iteration >= self._first:
            step = StepMarks(iteration, self._timed.buckets)
            self._steps.append(step)
            self.begin(step)

    def _marks(self, bucket: Bucket | None) -> BucketMarks | None:
        """Returns the marks of a bucket that was launched in this step."""
        if self.step is None or bucket is None:
            return None
        return self.step.buckets.get(bucket.index())

    def on_launch(self, bucket: Bucket) -> None:
        super().on_launch(bucket)
        if self.step is not None:
            self.step.buckets[bucket.index()] = BucketMarks(pack=self.clock.take())

    def on_launched(self, bucket: Bucket) -> None:
        if (marks := self._marks(bucket)) is not None:
            marks.launched = self.clock.take()
            # No reference to this object, since the group's thread may keep the callback.
            bucket.when_landed(partial(_mark_landed, marks, self.clock.take))

    def on_wait(self, bucket: Bucket | None) -> None:
        super().on_wait(bucket)
        # A hook with one bucket in flight at a time makes two calls, of which the first counts.
        if (marks := self._marks(bucket)) is not None and marks.wait is None:
            marks.wait = self.clock.take()

    def on_waited(self, bucket: Bucket | None) -> None:
        if (marks := self._marks(bucket)) is not None:
            marks.unpack = self.clock.take()
            if marks.waited is None:
                marks.waited = marks.unpack
        super().on_waited(bucket)

    def on_unpacked(self, iteration: int, bucket: Bucket, takes_part: bool) -> None:
        if (marks := self._marks(bucket)) is not None:
            marks.unpacked = self.clock.take()

    def on_average(self, iteration: int, takes_part: bool) -> None:
        self.note(Event.AVERAGED)
        if self.step is not None:
            self.step.arrived = list(self._arrived)
        self._begin(iteration)
        # One average later, when every rank has ended the last step.
        if iteration > self._first + self._count:
            self.close()

    # The record ---------------------------------------------------------------------------------

    def _on_rank_0(self, write: Callable[[], object]) -> object:
        """Calls `write` on rank 0; if that fails, other ranks raise a PeerError. Collective."""
        result: object = None
        text, caught = "", None
        try:
            if self.rank == 0:
                result = write()
        # Any error, such as one of matplotlib, since the other ranks wait for the result.
        except Exception as error:  # noqa: BLE001
            text = f"cannot write the timeline to {self.folder}: {one_line(error)}; "
            text, caught = f"{text}give a folder that can be written", error
        result, text = gather_objects((result, text), self._group)[0]
        if text:
            raise (UsageError if caught else PeerError)(text) from caught
        return result

    def _gathered(self) -> Record | None:
        after = clock_offsets(self._hosts, self._group)
        clocks = list(zip(self._clocks, after, strict=True))
        offset = sum(ms for ms, _ in clocks[self.rank]) / 2
        own: dict[int, tuple[BucketNames, RankTimes]] = {}
        for step, following in pairwise(self._steps[: self._count + 1]):
            # Each from its forward pass to its optimizer's end.
            events = step.events[_opening(step) :] + following.events[: _opening(following)]
            times = rank_times(self.rank, self.clock, replace(step, events=events))
            own[step.iteration] = step.layout, times.moved(offset)
        ranks = gather_objects(own, self._group)
        steps = tuple(
            step_times(number, layout, [found[number][1] for found in ranks])
            for number, (layout, _) in own.items()
            if all(number in found for found in ranks)
        )
        if not steps:
            return None
        # Half a round trip, plus half of the clocks' drift between the two comparisons.
        error = max(max(b[1], a[1]) + abs(a[0] - b[0]) / 2 for b, a in clocks)
        mib = sum(self._sizes.values()) / 2**20
        title = (
            f"{type(self._timed.module).__name__}, {mib:.3g} MiB of gradients, "
            f"{len(ranks)} rank{'s'[: len(ranks) != 1]} by {self._timed.stats().transport}"
        )
        return Record(title, self._sizes, tuple(self._hosts), error, steps)


@contextmanager
def timeline(
    reducer: Any, folder: Path | str, steps: int = 5, skip: int = SKIP
) -> Iterator[Timeline]:
    """Records steps inside the context and writes them to a folder. Every rank must enter it.

        with ddp.timeline(reducer, "timeline"):
            for batch in batches:
                ...

    When the steps are complete, or at the end of the context, rank 0 writes

    - `timeline.txt`: the median step as text;
    - `timeline.html`: a page that works offline, with all steps;
    - `timeline.png` and `.svg`: the median step, if matplotlib is installed.

    It writes nothing if the context raises, or if no step is complete, which it warns about. If it
    cannot write, it raises a UsageError on rank 0, and a PeerError on the other ranks.

    The value of the context has `close()`, which ends the recording early (collective), `record`,
    which is None until then, and `as_text()`.

    Args:
        reducer: averages the module whose steps are recorded; a `DistributedDataParallel` stands
            for its own.
        folder: the folder to write to; rank 0 creates it if needed.
        steps: the number of steps to record.
        skip: averages before the first recorded step, which rebuild buckets and allocate memory.
    """
    recorded = Timeline(reducer, folder, steps, skip)
    try:
        yield recorded
    except BaseException:
        recorded.discard()
        raise
    if recorded.is_open:
        recorded.close()
        if recorded.record is None and recorded.rank == 0:
            warnings.warn(TOO_FEW, stacklevel=3)


def write(record: Record, folder: Path) -> bool:
    """Writes all forms of a record; returns False if there is no matplotlib for a picture."""
    text = render.as_text(record, record.typical)
    (folder / "timeline.txt").write_text(text + "\n", encoding="utf-8")
    (folder / "timeline.html").write_text(render.as_html(record), encoding="utf-8")
    return render.draw(record, record.typical, folder / "timeline.png", folder / "timeline.svg")


def _make(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # An unwritable folder should fail now, not in the middle of training.
    TemporaryFile(dir=folder).close()


def _mark_landed(marks: BucketMarks, take: Callable[[], TimeMark]) -> None:
    marks.landed = take()


def _opening(step: StepMarks) -> int:
    # Earlier events belong to the previous step's optimizer.
    opens = (Event.FORWARD, Event.LAUNCH, Event.ALL_LAUNCHED)
    places = (place for place, (event, _) in enumerate(step.events) if event in opens)
    return next(places, len(step.events))


def mark_arrivals(
    parameters: Mapping[str, torch.Tensor], take: Callable[[], TimeMark]
) -> tuple[list[GradientMark], list[Any]]:
    """Makes hooks that take a mark for each gradient; returns the list of marks, and the hooks."""
    # No reference to a recorder, since the garbage collector sees no cycle through these hooks.
    found: list[GradientMark] = []
    handles = []
    for name, parameter in parameters.items():
        if parameter.requires_grad:

            def note(_: torch.Tensor, name: str = name) -> None:
                found.append(GradientMark(name, take()))

            handles.append(parameter.register_post_accumulate_grad_hook(note))
            # Run before the Reducer's, which packs. `move_to_end` has no effect on autograd.
            hooks = handles[-1].hooks_dict_ref()
            for number in [number for number in hooks if number != handles[-1].id]:
                hooks[number] = hooks.pop(number)
    return found, handles


def clock_offsets(hosts: Sequence[str], group: dist.ProcessGroup) -> list[tuple[float, float]]:
    r"""Returns the ms to add to each rank's clock to get rank 0's, and the error. Collective.

    The first rank of every other machine exchanges messages with rank 0:

        rank 0        t0 ------.             .------> t1
                                \           /
        other rank               '--> t ---'        t is taken to be (t0 + t1) / 2

    The fastest of several rounds counts; its error is at most half of its round-trip time. See
    Cristian, "Probabilistic clock synchronization" (1989).
    """
    found: dict[str, tuple[float, float]] = {}
    there = torch.zeros(1, dtype=torch.float64, device="cpu")
    for host in list(dict.fromkeys(hosts))[1:]:
        other, rounds = hosts.index(host), []
        # The group's own methods, since torch's functions reject an unlisted group (`open_gloo`).
        for _ in range(_ROUNDS):
            if group.rank() == 0:
                began = time.perf_counter()
                group.send([there], other, _CLOCK_TAG).wait()
                group.recv([there], other, _CLOCK_TAG).wait()
                ended = time.perf_counter()
                rounds.append((ended - began, (began + ended) / 2 - there.item()))
            elif group.rank() == other:
                group.recv([there], 0, _CLOCK_TAG).wait()
                there.fill_(time.perf_counter())
                group.send([there], 0, _CLOCK_TAG).wait()
        if rounds:
            way, offset = min(rounds)
            found[host] = offset * 1e3, way / 2 * 1e3
    offsets = gather_objects(found, group)[0]
    return [offsets.get(host, (0.0, 0.0)) for host in hosts]
