"""Finds stragglers, ranks that the others wait for, by the phases of each rank's steps."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddp_from_scratch.common import gpu
from ddp_from_scratch.options.launch_order import communicate
from ddp_from_scratch.watch.recorder import Recorder, StepMarks, TimeMark

# The phases in which a rank works, in the order of a step; then the phase in which it waits.
WORK = ("data", "forward", "backward", "optimizer")
PHASES = (*WORK, "waiting")

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
    phase: str  # the phase with the most time beyond that of the others
    is_late: bool  # True if this is not chance; see `OFTEN` and `LATE`
    own_ms: dict[str, float]  # the phases of `rank`, by the names of `PHASES`
    others_ms: dict[str, float]  # the medians of the other ranks
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


def compare(seconds: torch.Tensor, last: int, only: tuple[str, ...] = WORK) -> StragglerReport:
    """Finds the rank that the others wait for, from seconds of shape (ranks, steps, `PHASES`).

    All ranks leave an average together, so the rank that then works longest is last; no clocks are
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


def phases(events: Sequence[tuple[str, TimeMark]]) -> list[tuple[str, TimeMark]]:  # noqa: C901
    """Turns the events of a step into phases, each with the mark of its begin; "end" is last.

    - optimizer: until the last optimizer's step ends; includes clipping and loss scaling.
    - data: until the forward pass. Without an optimizer step it begins at the average.
    - forward: until backward reaches the outputs, so it includes the loss and its backward.
    - backward: until all buckets are launched. If the program never calls the module as a whole,
      it includes everything before.
    - waiting: for averages, for weights, and for later ranks.
    """
    enters = {"begin": "optimizer", "wait": "waiting", "waited": "backward"}
    enters |= {"all launched": "waiting", "averaged": "end"}
    found: list[tuple[str, TimeMark]] = []
    stepped = False
    for event, mark in events:
        if event == "launch":
            # The backward pass is not over yet.
            if found[-1][0] in ("data", "optimizer"):
                found[-1] = ("backward", found[-1][1])
        elif event == "over":
            # A pass under no_sync() launches nothing, and data follows it.
            if found[-1][0] == "backward":
                found.append(("data", mark))
        elif event == "stepped":
            # The last of several optimizers ends the phase.
            if [phase for phase, _ in found[-2:]] == ["optimizer", "data"]:
                found.pop()
            found.append(("data", mark))
            stepped = True
        elif event not in ("forwarded", "step"):
            if event == "forward" and not stepped:
                # Without an optimizer step, the time before was data.
                found[0] = ("data", found[0][1])
            if event != "backward" or found[-1][0] != "backward":
                found.append((enters.get(event, event), mark))
    return found


class StragglerWatch(Recorder):
    """Compares the ranks' steps every `every` averages, and reports the straggler.

    Each rank times the `phases` of its steps; a collective gathers them. If layers communicate
    (synchronised batch norm), only data and optimizer are compared. `tell` gets each report on
    every rank; by default rank 0 prints it to standard error.
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
            self.note("averaged")
            if not takes_part:
                # A rank without data has waited all the time, in a collective of `join`.
                self.step.events[1:-1] = [("wait", self.step.events[0][1])]
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
        rows = []
        for step in self._steps:
            found, seconds = phases(step.events), dict.fromkeys(PHASES, 0.0)
            times = [self.marks.seconds(mark) for _, mark in found]
            for (phase, _), begin, end in zip(found, times, times[1:], strict=False):
                seconds[phase] += end - begin
            rows.append(list(seconds.values()))
        own = torch.tensor(rows, dtype=torch.float64, device=self._device)
        self._steps.clear()
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(self._process_group))]
        dist.all_gather(everyone, own, group=self._process_group)
        only = ("data", "optimizer") if communicate(self._reducer()) else WORK
        report = compare(torch.stack(everyone).cpu(), iteration, only)
        if self._tell is not None:
            self._tell(report)
        elif dist.get_rank(self._process_group) == 0:
            print(report, file=sys.stderr, flush=True)
