"""Compares the phases of ranks' steps: the arithmetic of straggler reports."""

from dataclasses import dataclass

import torch

# The phases in which a rank works, in the order of a step, and then the one in which it waits.
WORK = ("data", "forward", "backward", "optimizer")
PHASES = (*WORK, "waiting")

# A rank is a straggler if it comes last in so many steps, and so late, as parts of all steps and of
# a step. Chance alone, or a rank that loses its CPU now and then, reaches neither.
OFTEN, LATE = 2 / 3, 0.1


@dataclass(frozen=True)
class StragglerReport:
    """The rank that others waited for, in some steps; times in ms, medians of the steps.

    Attributes:
        first, last: the averages at the end of the first and the last step, counted from 1.
        rank: the rank that came last most often.
        times: the number of steps in which it came last.
        late_ms: the time by which it came after the median of the others.
        phase: the phase in which it takes the most time beyond that of the others.
        is_late: True if that is no chance; see `OFTEN` and `LATE`.
        own_ms: the phases of `rank`, by the names of `PHASES`.
        others_ms: those of the other ranks, their medians.
        exposed_ms: the time that the last rank to come waits: communication that is not hidden.
        step_ms: the length of a step.
        world_size: the number of ranks that were compared.
    """

    first: int
    last: int
    rank: int
    times: int
    late_ms: float
    phase: str
    is_late: bool
    own_ms: dict[str, float]
    others_ms: dict[str, float]
    exposed_ms: float
    step_ms: float
    world_size: int

    @property
    def steps(self) -> int:
        """The number of steps."""
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
    """Finds the rank that the others wait for.

    All ranks leave an average together, so the rank that works longest until the next one comes
    last, by the time that it works longer: no clocks are compared. A rank that did not work in some
    step is left out, unless all are: it has run out of data inside `join()`.

    Args:
        seconds: float64 of shape (ranks, steps, `PHASES`).
        last: the number of averages at the end of the last step.
        only: the phases that are compared; others hold waits for peers, too.
    """
    present = (seconds[:, :, :-1].sum(2) > 0).all(1)
    ranks = present.nonzero().flatten().tolist() or list(range(len(seconds)))
    ms = 1e3 * seconds[ranks]
    compared = [PHASES.index(phase) for phase in only]
    work = ms[:, :, compared].sum(2)
    world_size, steps = work.shape
    # In each step one rank is the last.
    counts = torch.bincount(work.argmax(0), minlength=world_size)
    rank = int(counts.argmax())
    others = [r for r in range(world_size) if r != rank] or [rank]
    late_ms = _median(work[rank] - work[others].median(0).values)
    own, theirs = ms[rank].median(0).values, ms[others].median(1).values.median(0).values
    more = own - theirs
    step_ms = _median(ms.sum(2).median(0).values)
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
        exposed_ms=_median(ms[:, :, -1].min(0).values),
        step_ms=step_ms,
        world_size=world_size,
    )


def _median(values: torch.Tensor) -> float:
    return float(values.median())
