"""Tunes the bucket size: `bucket_cap_mb="auto"` tries several in training and keeps the fastest.

The layouts take turns. A turn launches buckets during backward (overlap) and at its end, twice
each, and reads the clock at the end of each average:

    | new layout    | during | at its end | during | at its end |   new layout ...
      not counted

In a round each layout has one turn. A measured time covers a whole step, from one average to the
next: backward and remaining communication, optimizer, forward, data.
"""

import math
import statistics
import time
from collections.abc import Hashable, Mapping, Sequence
from operator import truediv
from typing import NamedTuple

import torch
import torch.distributed as dist

from ddp_from_scratch.common import gpu
from ddp_from_scratch.core import comm_hooks
from ddp_from_scratch.core.bucket import CommHook
from ddp_from_scratch.core.extension import Extension
from ddp_from_scratch.core.layout import BUCKET_CAP_MB, FIRST_BUCKET_CAP_MB, bucket_caps
from ddp_from_scratch.core.reducer import CoreReducer

DEFAULT = (FIRST_BUCKET_CAP_MB, BUCKET_CAP_MB)
# In order of preference where costs are equal.
CAPS: tuple[float | tuple[float, ...], ...] = (DEFAULT, 4.0, 1.0, math.inf)
ROUNDS = 5
# A candidate ties with the best if its median step is at most 1 % longer,
TIE = 0.01
# or if it was slower in less than 60 % of the steps, a difference that may be noise.
SURE = 0.6


class Candidate(NamedTuple):
    """A bucket size, with or without overlap."""

    bucket_cap_mb: float | Sequence[float]  # see `bucket_caps`
    overlap: bool  # True launches buckets during backward, False at its end


def candidates(
    layouts: Mapping[float | tuple[float, ...], Sequence[Hashable]], overlap: bool
) -> list[list[Candidate]]:
    """Lists the candidates of each distinct layout. `layouts` maps caps to their buckets."""
    # Several caps may give the same buckets; the preferred one comes first.
    first: dict[tuple[Hashable, ...], float | tuple[float, ...]] = {}
    for cap, buckets in layouts.items():
        first.setdefault(tuple(buckets), cap)
    # A single bucket is only full at the end of backward, so it cannot overlap.
    return [
        [Candidate(cap, way) for way in ([True, False] if overlap and len(b) > 1 else [overlap])]
        for b, cap in first.items()
    ]


def trials(groups: Sequence[Sequence[Candidate]]) -> list[tuple[Candidate, bool]]:
    """Plans the coming averages, and whether their times count."""
    found: list[tuple[Candidate, bool]] = []
    for number in range(ROUNDS if sum(map(len, groups)) > 1 else 0):
        for place in range(len(groups)):
            # Rounds begin with different layouts, so that a periodic delay does not hit only one.
            group = groups[(number + place) % len(groups)]
            # The first step includes the cost of laying out the buckets.
            found += [(group[0], False), *((each, True) for each in (*group, *group))]
    return found


def choose(times: Mapping[Candidate, Sequence[float]]) -> Candidate:
    """Returns the first candidate that ties with the best in `times`, preferring overlap."""
    # Steps are compared within a round, because a machine that is slow for a while slows all of
    # them. Medians ignore the occasional step with an evaluation or a slow batch.
    usual = [statistics.median(of_all) for of_all in zip(*times.values(), strict=True)]
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
    """Tries several bucket sizes in the first averages, and keeps the fastest."""

    def attach(self, reducer: CoreReducer) -> None:
        self.settled: bool = False  # True when `present` is final
        self.present: Candidate = Candidate(DEFAULT, reducer.overlap)
        super().attach(reducer)
        self._known_order = reducer.ready_order  # of the current layout
        # Trials to come; None before the first average. All ranks plan the same, without a clock.
        self._ahead: list[tuple[Candidate, bool]] | None = None
        self._counts = False  # the time of the average to come
        self._times: dict[Candidate, list[float]] = {}
        self._last = math.nan  # the clock at the end of the last average

    def on_average(self, iteration: int, takes_part: bool) -> None:
        if self.settled:
            return
        reducer: CoreReducer = self._of()
        # The Reducer has just rebuilt the buckets, which makes the time of this step useless.
        if reducer.ready_order is not self._known_order:
            self._known_order = reducer.ready_order
            return
        now = clock(reducer.device)
        if self._ahead is None:
            order = reducer.ready_order or reducer.names[::-1]
            layouts = {cap: reducer.layout.plan(order, bucket_caps(cap)) for cap in CAPS}
            groups = candidates(layouts, self.present.overlap)
            self._times = {candidate: [] for group in groups for candidate in group}
            self._ahead = trials(groups)
        elif self._counts:
            self._times[self.present].append(now - self._last)
        self._last = now
        if self._ahead:
            candidate, self._counts = self._ahead.pop(0)
            self._apply(candidate)
            return
        if len(self._times) > 1:
            rows = list(self._times.values())
            times = torch.tensor(rows, dtype=torch.float64, device=reducer.device)
            # The slowest rank sets the time. With equal times, all ranks make the same choice.
            dist.all_reduce(times, dist.ReduceOp.MAX, group=reducer.process_group)
            self._apply(choose(dict(zip(self._times, times.tolist(), strict=True))))
        self.settled = True

    def check_hook(self, hook: CommHook) -> None:
        # Hooks that key state by bucket index, like torch's PowerSGD, would mix up buckets.
        if not self.settled and not comm_hooks.is_ours(hook):
            raise RuntimeError(
                f'bucket_cap_mb="auto" has not settled, and the comm hook {hook!r} may remember '
                f'buckets by index, but "auto" rebuilds them: give bucket_cap_mb a number'
            )

    def _apply(self, candidate: Candidate) -> None:
        if candidate.bucket_cap_mb != self.present.bucket_cap_mb:
            self._of().lay_out(bucket_caps(candidate.bucket_cap_mb))
        self._of().set_overlap(candidate.overlap)
        self.present = candidate


def clock(device: torch.device) -> float:
    """Returns seconds. Waits for a GPU first, because its work is asynchronous."""
    gpu.synchronize(device)
    return time.perf_counter()
