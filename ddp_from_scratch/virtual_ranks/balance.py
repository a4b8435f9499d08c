"""Deals virtual ranks to ranks by speed, so that a slow rank runs fewer and all end together.

The result of a step does not depend on the deal (`tree_reduction.py`), so it may change in every
step. Each rank measures how long one of its virtual ranks computes, and sends that number with the
smallest bucket (`TreeReduction.note`). So all ranks get all numbers, and compute the same deal.
"""

from collections import deque
from collections.abc import Sequence
from statistics import fmean, median
from time import perf_counter
from typing import TypeAlias

import torch

from ddp_from_scratch.common import gpu
from ddp_from_scratch.common.log import logger
from ddp_from_scratch.core.observer import Tracer
from ddp_from_scratch.core.reducer import CoreReducer
from ddp_from_scratch.virtual_ranks.deal import counts_by_speed, equal_counts, longest
from ddp_from_scratch.virtual_ranks.tree_reduction import TreeReduction

# A deal that shortens the slowest rank's step by less is not worth a change.
_LEAST_GAIN = 0.05
# A rank's time is the median of this many steps, so that one slow step changes nothing.
_STEPS = 9

Moment: TypeAlias = float | torch.Event


class Balance(Tracer):
    """The times of all ranks, and the deal that follows from them.

    Attributes:
        counts: by rank, how many virtual ranks it runs; None for equal parts.
        seconds: by rank, how long it computes a virtual rank. Empty until all ranks know.
    """

    def __init__(self, count: int, reduction: TreeReduction) -> None:
        self.counts: list[int] | None = None
        self.seconds: tuple[float, ...] = ()
        self._count, self._reduction = count, reduction
        # The begins and ends of virtual ranks in this step, and in the last one, which a GPU has
        # finished when they are read.
        self._begin: Moment = 0.0
        self._spans: list[tuple[Moment, Moment]] = []
        self._last_spans: list[tuple[Moment, Moment]] | None = None
        self._own: deque[float] = deque(maxlen=_STEPS)
        self._notes: gpu.HostCopy | None = None

    def attach(self, reducer: CoreReducer) -> None:
        super().attach(reducer)
        # With shard="world" an empty bucket is not sent.
        full = [bucket for bucket in reducer.flat_buckets if bucket.flat.numel()]
        smallest = min(full, default=reducer.flat_buckets[0], key=lambda each: each.flat.nbytes)
        self._reduction.carrier = smallest.index()
        self._reduction.note = 0.0  # not measured yet

    def begin(self) -> None:
        """A virtual rank begins."""
        self._begin = self._now()

    def end(self) -> None:
        """A virtual rank has computed its gradients."""
        self._spans.append((self._begin, self._now()))

    def _now(self) -> Moment:
        device = self._reducer().device
        return gpu.record(device, timed=True) if gpu.is_gpu(device) else perf_counter()

    def own_seconds(self) -> float:
        """Returns how long this rank computes a virtual rank; 0 if that is not known yet."""
        return median(self._own) if self._own else 0.0

    def learn(self, seconds: Sequence[float]) -> None:
        """Takes over the times of all ranks, and deals by them if a step becomes shorter by that.

        A rank without a time, which has just joined, gets the mean of the others.
        """
        if not (known := [each for each in seconds if each > 0]):
            return
        self.seconds = tuple(each if each > 0 else fmean(known) for each in seconds)
        now = self._counts_now()
        best = counts_by_speed(self._count, self.seconds)
        before, after = longest(now, self.seconds), longest(best, self.seconds)
        if after > (1 - _LEAST_GAIN) * before:
            return
        self.counts = best
        if self._reducer().rank == 0:
            logger.info(
                f"virtual ranks are assigned by speed: {self}; the last rank computes for "
                f"{1e3 * after:.3g} ms a step, {1e3 * before:.3g} ms before"
            )

    def _counts_now(self) -> list[int]:
        if self.counts is not None and len(self.counts) == len(self.seconds):
            return self.counts
        return equal_counts(self._count, len(self.seconds))

    def forget_others(self) -> None:
        """Begins with equal parts: ranks may have been lost, and new ones know of no deal."""
        self.counts, self.seconds, self._notes = None, (), None
        self._reduction.notes = None

    # As an observer -------------------------------------------------------------------------------

    def on_all_launched(self) -> None:
        self.end()  # the last virtual rank: what follows is communication

    def on_average(self, iteration: int, takes_part: bool) -> None:
        spans, self._spans = self._spans, []
        if self._last_spans:
            # The last one also launches buckets, so it counts only if it is alone.
            times = [seconds_between(*span) for span in self._last_spans]
            self._own.append(fmean(times[:-1] or times))
        # Nothing of the first step counts: memory and kernels are not warm yet.
        self._last_spans = [] if self._last_spans is None else spans
        self._reduction.note = self.own_seconds()
        notes, self._notes = self._notes, None
        if self._reduction.notes is not None:
            self._notes = gpu.HostCopy(self._reduction.notes)
        if notes is not None:
            self.learn(notes.wait().tolist())

    def on_abort(self) -> None:
        self._spans = []

    def __str__(self) -> str:
        if not self.seconds:
            return "equal parts so far"
        rows = enumerate(zip(self._counts_now(), self.seconds, strict=True))
        return ", ".join(
            f"rank {rank} runs {own} ({1e3 * s:.3g} ms each)" for rank, (own, s) in rows
        )


def seconds_between(begin: Moment, end: Moment) -> float:
    """Returns the seconds between two moments; waits until a GPU has passed the second."""
    if isinstance(begin, float) and isinstance(end, float):
        return end - begin
    assert isinstance(begin, torch.Event)
    assert isinstance(end, torch.Event)
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
