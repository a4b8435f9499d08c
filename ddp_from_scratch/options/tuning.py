"""Tunes the bucket size: `bucket_cap_mb="auto"` tries several in training, and keeps the fastest.

Each layout of the buckets has its turn. A turn tries backward with overlap ("during") and without
("at its end"), twice each; the clock is read at the end of each average:

    | new layout    | during | at its end | during | at its end |   new layout ...
      not counted

A round is a turn of each layout. A measured time is that of a whole step, from one average to the
next: backward and any communication behind it, the optimizer, forward, the data.
"""

import math
import statistics
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import truediv

import torch
import torch.distributed as dist

from ddp_from_scratch import gpu
from ddp_from_scratch.core import comm_hooks
from ddp_from_scratch.core.bucket import CommHook
from ddp_from_scratch.core.extension import Extension
from ddp_from_scratch.core.layout import BUCKET_CAP_MB, FIRST_BUCKET_CAP_MB, bucket_caps
from ddp_from_scratch.core.reducer import CoreReducer

DEFAULT = (FIRST_BUCKET_CAP_MB, BUCKET_CAP_MB)
# In the order of preference, if they cost the same.
CAPS: tuple[float | tuple[float, ...], ...] = (DEFAULT, 4.0, 1.0, math.inf)
ROUNDS = 5
# A candidate is as good as the best if its median step is longer by no more than this part,
TIE = 0.01
# or if it was longer in a smaller part of the steps than this: such a difference is noise.
SURE = 0.6


@dataclass(frozen=True)
class Candidate:
    """A way to launch buckets."""

    bucket_cap_mb: float | Sequence[float]  # see `bucket_caps`
    overlap: bool  # True launches buckets during backward, False at its end


@dataclass(frozen=True)
class Trial:
    """The candidate of one average."""

    candidate: Candidate
    counted: bool  # its time counts


def candidates(
    layouts: Mapping[float | tuple[float, ...], Sequence[Hashable]], overlap: bool
) -> list[list[Candidate]]:
    """Lists the candidates to choose from, for each layout: the buckets that a cap leads to."""
    # Caps that lead to the same buckets are one candidate; the preferred cap comes first.
    first: dict[tuple[Hashable, ...], float | tuple[float, ...]] = {}
    for cap, buckets in layouts.items():
        first.setdefault(tuple(buckets), cap)
    # A single bucket is full at the end of backward: overlap makes no difference for it.
    return [
        [Candidate(cap, way) for way in ([True, False] if overlap and len(b) > 1 else [overlap])]
        for b, cap in first.items()
    ]


def trials(groups: Sequence[Sequence[Candidate]], rounds: int = ROUNDS) -> list[Trial]:
    """Plans the coming averages: a round tries each candidate twice. None for a single one."""
    if sum(map(len, groups)) == 1:
        return []
    found: list[Trial] = []
    for number in range(rounds):
        for place in range(len(groups)):
            # Another layout begins each round: what recurs every so many steps hits each of them.
            group = groups[(number + place) % len(groups)]
            # The first step includes the work of laying out the buckets, so it is not counted.
            found += [Trial(group[0], False), *(Trial(c, True) for c in (*group, *group))]
    return found


def choose(times: Mapping[Candidate, Sequence[float]]) -> Candidate:
    """Returns the first candidate that is as good as the best; those with overlap come first.

    `times` are seconds of each candidate's steps, in the order of `trials`; as many of each.
    """
    # Each step is compared with the others of its round: a machine that is slow for a while slows
    # all of them alike. Medians, since an evaluation or a slow batch is in a step now and then.
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


class BucketTuning(Extension):
    """Tries buckets of several sizes in the first averages, and keeps the fastest."""

    def attach(self, reducer: CoreReducer) -> None:
        self.settled = False  # `present` is not final
        self.present = Candidate(DEFAULT, reducer.overlap)
        super().attach(reducer)
        # The order that the present layout was made for. A new one means new buckets.
        self._known_order = reducer.ready_order
        self._overlap = reducer.overlap
        # Trials still to come; None until the first average has ended. The plan depends on no
        # clock, so all ranks lay out the same buckets at the end of the same average.
        self._ahead: list[Trial] | None = None
        self._trial: Trial | None = None
        self._times: dict[Candidate, list[float]] = {}
        # The clock at the end of the last average.
        self._last = math.nan

    def on_average(self, iteration: int, takes_part: bool) -> None:
        if self.settled:
            return
        # The Reducer has just laid out the buckets again, so the time of this step is of no use.
        if self._of().ready_order is not self._known_order:
            self._known_order = self._of().ready_order
            return
        now, order = clock(self._of().device), self._of().present_order()
        if self._ahead is None:
            layouts = {cap: self._of().plan(order, bucket_caps(cap)) for cap in CAPS}
            groups = candidates(layouts, self._overlap)
            self._times = {candidate: [] for group in groups for candidate in group}
            self._ahead = trials(groups)
        elif self._trial is not None and self._trial.counted:
            self._times[self._trial.candidate].append(now - self._last)
        self._last = now
        self._trial = self._ahead.pop(0) if self._ahead else None
        if self._trial is not None:
            self._apply(self._trial.candidate, order)
            return
        if len(self._times) > 1:
            device = self._of().device
            times = torch.tensor(list(self._times.values()), dtype=torch.float64, device=device)
            # The longest over ranks is the step's. From the same times all choose the same.
            dist.all_reduce(times, dist.ReduceOp.MAX, group=self._of().process_group)
            self._times = dict(zip(self._times, times.tolist(), strict=True))
            self._apply(choose(self._times), order)
        self.settled = True

    def check_hook(self, hook: CommHook) -> None:
        # A hook that remembers a bucket by its index (torch's PowerSGD does) would take it for
        # another. The hooks of this package remember parameters.
        if not self.settled and not comm_hooks.is_ours(hook):
            raise RuntimeError(
                f'bucket_cap_mb="auto" has not settled, and the comm hook {hook!r} may remember '
                f"buckets by their index, which it lays out anew: give bucket_cap_mb a number"
            )

    def _apply(self, candidate: Candidate, order: Sequence[str]) -> None:
        if candidate.bucket_cap_mb != self.present.bucket_cap_mb:
            self._of().lay_out(order, bucket_caps(candidate.bucket_cap_mb))
        self._of().overlap = candidate.overlap
        self.present = candidate


def clock(device: torch.device) -> float:
    """Returns seconds. Waits for a GPU first, which the program is otherwise ahead of."""
    gpu.synchronize(device)
    return time.perf_counter()
