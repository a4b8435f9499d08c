"""Tuning of the bucket size: `bucket_cap_mb="auto"` tries several in training, and keeps one.

A *turn* of one layout, from one average to the next; the clock is read at the end of each:

    | laid out anew | during | at its end | during | at its end |   laid out anew, the next one ...
      not counted     ^ backward           ^ the second time

A round is a turn of each layout. What is measured is the whole step, from the end of one average to
that of the next, as the user feels it: backward and what it does not hide, the optimizer, forward,
the data. An evaluation or a slow batch now and then is in it, too, so the median decides, and
another layout begins each round, so that what comes back every so many steps does not always meet
the same one.
"""

import math
import statistics
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import truediv

import torch
import torch.distributed as dist

from ddp_from_scratch.autograd.ready_order import ReadyOrder
from ddp_from_scratch.buckets.bucket_list import BucketList
from ddp_from_scratch.buckets.gradient_bucket import CommHook
from ddp_from_scratch.buckets.layout import BUCKET_CAP_MB, FIRST_BUCKET_CAP_MB, bucket_caps
from ddp_from_scratch.buckets.observer import Observer
from ddp_from_scratch.comm_hooks import default_hooks
from ddp_from_scratch.reducer.comm_state import CommState

DEFAULT = (FIRST_BUCKET_CAP_MB, BUCKET_CAP_MB)
# In the order of preference, where they cost the same.
CAPS: tuple[float | tuple[float, ...], ...] = (DEFAULT, 4.0, 1.0, math.inf)
ROUNDS = 5
TIE = 0.01  # of the shortest step: so much longer is as good,
SURE = 0.6  # and so is what was longer in a smaller part of the steps than this: that is noise


@dataclass(frozen=True)
class Candidate:
    """A way to send gradients.

    Attributes:
        bucket_cap_mb: as of `bucket_caps`.
        overlap: launch buckets during backward, not at its end.
    """

    bucket_cap_mb: float | Sequence[float]
    overlap: bool


@dataclass(frozen=True)
class Trial:
    """The candidate of one average, and whether its time counts."""

    candidate: Candidate
    counted: bool


def candidates(
    layouts: Mapping[float | tuple[float, ...], Sequence[Hashable]], overlap: bool
) -> list[list[Candidate]]:
    """The candidates to choose from, for each layout.

    Caps that lay buckets out alike are one. A single bucket is full at the end of backward, so it
    makes no difference when it is launched.

    Args:
        layouts: the buckets that each cap leads to.
        overlap: whether buckets may be launched during backward.
    """
    first: dict[tuple[Hashable, ...], float | tuple[float, ...]] = {}
    for cap, buckets in layouts.items():
        first.setdefault(tuple(buckets), cap)
    return [
        [Candidate(cap, way) for way in ([True, False] if overlap and len(b) > 1 else [overlap])]
        for b, cap in first.items()
    ]


def trials(groups: Sequence[Sequence[Candidate]], rounds: int = ROUNDS) -> list[Trial]:
    """What to do the coming averages with: each candidate counted twice in a round.

    Args:
        groups: the candidates of each layout, as `candidates`.
        rounds: each layout has one turn in each.

    Returns:
        Nothing, if there is nothing to choose from.
    """
    found: list[Trial] = []
    if sum(map(len, groups)) == 1:
        return found
    for number in range(rounds):
        for place in range(len(groups)):
            group = groups[(number + place) % len(groups)]
            found += [Trial(group[0], False), *(Trial(c, True) for c in (*group, *group))]
    return found


def choose(times: Mapping[Candidate, Sequence[float]]) -> Candidate:
    """The first that is as good as the best; those with overlap come first.

    By the median over steps of how long each was beside the others of its round: what slows the
    machine for a while slows all alike.

    Args:
        times: of each candidate, in the order of `trials`; as many of each.
    """
    usual = [statistics.median(alike) for alike in zip(*times.values(), strict=True)]
    medians = {
        candidate: statistics.median(map(truediv, steps, usual))
        for candidate, steps in times.items()
    }
    best = min(medians, key=lambda candidate: medians[candidate])

    def as_good(candidate: Candidate) -> bool:
        pairs = zip(times[candidate], times[best], strict=True)
        longer = sum(its > shortest for its, shortest in pairs)
        return longer < SURE * len(usual) or medians[candidate] <= medians[best] * (1 + TIE)

    return min(filter(as_good, medians), key=lambda candidate: not candidate.overlap)


class BucketTuning(Observer):
    """Tries buckets of several sizes in training, and keeps the fastest.

    In each of the first averages one candidate is tried. Which one does not depend on any clock, so
    all ranks lay out the same buckets at the end of the same average. After the last, the longest
    time over ranks of each step is agreed on, once: from the same times every rank makes the same
    choice.

    Args:
        buckets: are laid out as each candidate says.
        comm: launches early or late, as each candidate says.
        order: the order in which gradients become ready.
        process_group: the ranks that take part.

    Attributes:
        present: the candidate of the next average.
        settled: whether it stays that.
    """

    def __init__(
        self,
        buckets: BucketList,
        comm: CommState,
        order: ReadyOrder,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self.settled = False
        self.present = Candidate(DEFAULT, comm.overlap)
        self._buckets, self._comm, self._order = buckets, comm, order
        self._known_order = order.final
        self._overlap, self._process_group = comm.overlap, process_group
        self._ahead: list[Trial] | None = None
        self._trial: Trial | None = None
        self._times: dict[Candidate, list[float]] = {}
        self._last = math.nan  # the clock at the end of the last average

    def on_average(self, iteration: int, takes_part: bool) -> None:
        """Prepares the next average: the next candidate, or the best one for good."""
        if self._order.final is not self._known_order:  # buckets were laid out at its end
            self._known_order = self._order.final
            return
        now, order = clock(self._buckets.parameters[0].device), self._order.present()
        if self._ahead is None:
            layouts = {cap: self._buckets.planned(order, bucket_caps(cap)) for cap in CAPS}
            groups = candidates(layouts, self._overlap)
            self._times = {candidate: [] for group in groups for candidate in group}
            self._ahead = trials(groups)
        elif self._trial is not None and self._trial.counted:
            self._times[self._trial.candidate].append(now - self._last)
        self._last = now
        self._trial = self._ahead.pop(0) if self._ahead else None
        if self._trial is None:
            self._settle(order)
        else:
            self._apply(self._trial.candidate, order)

    def check_hook(self, hook: CommHook) -> None:
        """Raises if `hook` may not follow buckets that are laid out in another way so often.

        A hook that remembers a bucket by its index (torch's PowerSGD does) would take it for
        another. The hooks of this package remember parameters.
        """
        if not self.settled and not default_hooks.is_ours(hook):
            raise RuntimeError(
                f'bucket_cap_mb="auto" has not settled, and the comm hook {hook!r} may remember '
                f"buckets by their index, which it lays out anew: give bucket_cap_mb a number"
            )

    def _settle(self, order: Sequence[str]) -> None:
        if len(self._times) > 1:
            times = torch.tensor(
                list(self._times.values()),
                dtype=torch.float64,
                device=self._buckets.parameters[0].device,
            )
            dist.all_reduce(times, dist.ReduceOp.MAX, group=self._process_group)
            self._times = dict(zip(self._times, times.tolist(), strict=True))
            self._apply(choose(self._times), order)
        self.settled = True

    def _apply(self, candidate: Candidate, order: Sequence[str]) -> None:
        if candidate.bucket_cap_mb != self.present.bucket_cap_mb:
            self._buckets.lay_out(order, bucket_caps(candidate.bucket_cap_mb))
        self._comm.set_overlap(candidate.overlap)
        self.present = candidate


def clock(device: torch.device) -> float:
    """Seconds. A GPU is waited for, which the program is otherwise ahead of."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
