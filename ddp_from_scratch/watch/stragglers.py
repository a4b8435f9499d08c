"""Finds stragglers, ranks that the others wait for, by the phases of each rank's steps."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist

from ddp_from_scratch.common import gpu
from ddp_from_scratch.common.log import logger
from ddp_from_scratch.options.launch_order import communicate
from ddp_from_scratch.watch.record import Clock, Event, EventMark, StepMarks, TimeMark
from ddp_from_scratch.watch.recorder import Recorder


class Phase(StrEnum):
    """What a rank does, in the order of a step.

    - data: until the forward pass. Without an optimizer step it begins at the average.
    - forward: until backward reaches the outputs, so it includes the loss and its backward.
    - backward: until all buckets are launched. If the program never calls the module as a whole,
      it includes everything before.
    - optimizer: until the last optimizer's step ends; includes clipping and loss scaling.
    - waiting: for averages, for weights, and for later ranks.
    """

    DATA = auto()
    FORWARD = auto()
    BACKWARD = auto()
    OPTIMIZER = auto()
    WAITING = auto()


PHASES = tuple(Phase)
WORK = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)

# A rank is a straggler if it is last in more than this share of the steps, by more than this share
# of a step. Chance, or a rank that loses its CPU now and then, reaches neither.
OFTEN, LATE = 2 / 3, 0.1


@dataclass(frozen=True)
class StragglerReport:
    """The slowest rank of some steps. Times are medians over the steps, in ms."""

    first: int  # the average at the end of the first step, counted from 1
    last: int
    rank: int  # the rank that was last most often
    times: int  # the number of steps in which it was last
    late_ms: float  # how much later than the median of the others it was
    phase: Phase  # the phase with the most time beyond that of the others
    is_late: bool  # True if this is not chance; see `OFTEN` and `LATE`
    own_ms: dict[Phase, float]  # the phases of `rank`
    others_ms: dict[Phase, float]  # the medians of the other ranks
    exposed_ms: float  # the wait of the last rank, which is communication that is not hidden
    step_ms: float  # the length of a step
    world_size: int  # the number of ranks that were compared

    @property
    def steps(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        steps, length = f"steps {self.first}-{self.last}", f"a step takes {self.step_ms:.1f} ms"
        if not self.is_late:
            shown = ", ".join(f"{phase} {ms:.1f}" for phase, ms in self.others_ms.items())
            none = "no rank is late; " if self.world_size > 1 else ""
            return f"{steps}: {none}{length}: {shown}"
        own, others = self.own_ms[self.phase], self.others_ms[self.phase]
        return (
            f"{steps}: rank {self.rank} came last in {self.times} of {self.steps}, "
            f"{self.late_ms:.1f} ms after the others, in {self.phase} ({own:.1f} ms, the others "
            f"{others:.1f}); {length}"
        )


def compare(seconds: torch.Tensor, last: int, only: tuple[Phase, ...] = WORK) -> StragglerReport:
    """Finds the rank that the others wait for, from seconds of shape (ranks, steps, `PHASES`).

    Ranks leave an average together, so the slowest one is last at the next; no clocks are
    compared. A rank without work in some step (`join()`) is left out, unless all are. `last` is the
    number of averages so far. Phases but `only` contain waits for peers.
    """
    present = (seconds[:, :, :-1].sum(2) > 0).all(1)
    ranks = present.nonzero().flatten().tolist() or list(range(len(seconds)))
    ms = 1e3 * seconds[ranks]
    compared = [PHASES.index(phase) for phase in only]
    work = ms[:, :, compared].sum(2)
    world_size, steps = work.shape
    counts = torch.bincount(work.argmax(0), minlength=world_size)
    rank = int(counts.argmax())
    others = [r for r in range(world_size) if r != rank] or [rank]
    late_ms = float((work[rank] - work[others].median(0).values).median())
    own, theirs = ms[rank].median(0).values, ms[others].median(1).values.median(0).values
    more = own - theirs
    step_ms = float(ms.sum(2).median(0).values.median())
    return StragglerReport(
        first=last - steps + 1,
        last=last,
        rank=ranks[rank],
        times=int(counts[rank]),
        late_ms=late_ms,
        phase=max(only, key=lambda phase: float(more[PHASES.index(phase)])),
        is_late=world_size > 1 and counts[rank].item() > OFTEN * steps and late_ms > LATE * step_ms,
        own_ms=dict(zip(PHASES, own.tolist(), strict=True)),
        others_ms=dict(zip(PHASES, theirs.tolist(), strict=True)),
        exposed_ms=float(ms[:, :, -1].min(0).values.median()),
        step_ms=step_ms,
        world_size=world_size,
    )


class PhaseMark(NamedTuple):
    """The begin of a phase, which lasts until the next one begins."""

    phase: Phase
    mark: TimeMark


_BEGINS = {
    Event.BEGIN: Phase.OPTIMIZER,
    Event.FORWARD: Phase.FORWARD,
    Event.BACKWARD: Phase.BACKWARD,
    Event.WAIT: Phase.WAITING,
    Event.WAITED: Phase.BACKWARD,
    Event.OVER: Phase.DATA,
    Event.ALL_LAUNCHED: Phase.WAITING,
    Event.STEPPED: Phase.DATA,
}


def phases(events: Sequence[EventMark]) -> list[PhaseMark]:
    """Turns the events of a step into phases, of which the last one ends with the step."""
    found: list[PhaseMark] = []
    has_stepped = False
    for event, mark in events:
        if event is Event.LAUNCH and found[-1].phase in (Phase.DATA, Phase.OPTIMIZER):
            # The backward pass is not over yet.
            found[-1] = PhaseMark(Phase.BACKWARD, found[-1].mark)
        elif event is Event.FORWARD and not has_stepped:
            # Without an optimizer step, the time before was data.
            found[0] = PhaseMark(Phase.DATA, found[0].mark)
        elif event is Event.STEPPED:
            has_stepped = True
            # The last of several optimizers ends the phase.
            if [phase for phase, _ in found[-2:]] == [Phase.OPTIMIZER, Phase.DATA]:
                found.pop()
        if event in _BEGINS and not _continues(event, found):
            found.append(PhaseMark(_BEGINS[event], mark))
    return found


def _continues(event: Event, found: Sequence[PhaseMark]) -> bool:
    """True if the phase continues at this event, which else begins another one."""
    if event is Event.BACKWARD:
        return found[-1].phase is Phase.BACKWARD
    # Only a pass that launches nothing, such as one under no_sync(), ends with data.
    return event is Event.OVER and found[-1].phase is not Phase.BACKWARD


def phase_seconds(events: Sequence[EventMark], clock: Clock) -> list[float]:
    """Returns the seconds of a step in each of `PHASES`."""
    found, seconds = phases(events), dict.fromkeys(PHASES, 0.0)
    times = [clock.seconds(mark) for mark in (*(begin.mark for begin in found), events[-1].mark)]
    for (phase, _), (begin, end) in zip(found, pairwise(times), strict=True):
        seconds[phase] += end - begin
    return list(seconds.values())


class StragglerWatch(Recorder):
    """Compares the ranks' steps every `every` averages, and reports the straggler.

    Each rank times each `Phase` of its steps; a collective gathers them. If layers communicate
    (synchronised batch norm), only data and optimizer are compared. `tell` gets each report on
    every rank; by default rank 0 logs it.
    """

    def __init__(
        self,
        every: int,
        device: torch.device,
        process_group: dist.ProcessGroup | None,
        tell: Callable[[StragglerReport], None] | None = None,
    ) -> None:
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"straggler_every must be 1 or more averages, got {every!r}")
        super().__init__(device)
        self._every, self._device, self._process_group = every, device, process_group
        self._tell = tell
        self._steps: list[StepMarks] = []  # since the last report

    def on_average(self, iteration: int, takes_part: bool) -> None:
        """Ends the step. If a report is due, gathers the steps (collective) and reports."""
        if gpu.is_gpu(self._device) and gpu.is_capturing():
            return  # events in a graph have no times, and its replays do not call this method
        if self.step is not None:
            self.note(Event.AVERAGED)
            if not takes_part:
                # A rank without data has waited all the time, in a collective of `join`.
                self.step.events[1:-1] = [EventMark(Event.WAIT, self.step.events[0].mark)]
            self._steps.append(self.step)
        try:
            if self._steps and iteration % self._every == 0:
                self._report(iteration)
        finally:  # the program may continue after an error in `tell`
            self.begin(StepMarks(iteration))

    def on_set_step(self) -> None:
        """Drops the steps since the last report, since ranks that join later do not have them."""
        self._steps.clear()
        self.step: StepMarks | None = None

    def _report(self, iteration: int) -> None:
        rows = [phase_seconds(step.events, self.clock) for step in self._steps]
        own = torch.tensor(rows, dtype=torch.float64, device=self._device)
        self._steps.clear()
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(self._process_group))]
        dist.all_gather(everyone, own, group=self._process_group)
        only = (Phase.DATA, Phase.OPTIMIZER) if communicate(self._reducer()) else WORK
        report = compare(torch.stack(everyone).cpu(), iteration, only)
        if self._tell is not None:
            self._tell(report)
        elif dist.get_rank(self._process_group) == 0:
            logger.log(logging.WARNING if report.is_late else logging.INFO, str(report))
