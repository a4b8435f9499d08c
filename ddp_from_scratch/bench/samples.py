"""Statistics of timed steps: medians, ratios with intervals, and whether the machine was quiet."""

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch.distributed as dist

Interval = tuple[float, float, float]  # an estimate, and the ends of its 95 % interval

_DRAWS = 2000


@dataclass(frozen=True)
class Samples:
    """One contender's steps: the slowest rank's time in each round."""

    name: str
    milliseconds: list[float]  # from the barrier before the step to its end
    # Of all threads, until the step's last call returns; with a GPU, the cost of driving it.
    cpu_milliseconds: list[float] = field(default_factory=list)

    @property
    def quartiles(self) -> tuple[float, float, float]:
        low, median, high = np.percentile(self.milliseconds, [25, 50, 75])
        return float(low), float(median), float(high)

    def ratio_to(self, other: "Samples") -> Interval:
        """The median ratio over rounds, with its 95 % bootstrap interval."""
        # A disturbance slows both steps of a round, and cancels out.
        return median_interval(np.array(self.milliseconds) / np.array(other.milliseconds))

    def unpaired_ratio_to(self, other: "Samples") -> Interval:
        """The ratio of the medians of two separate runs, with its 95 % bootstrap interval."""
        random = np.random.default_rng(0)
        drawn = _medians(self.milliseconds, random) / _medians(other.milliseconds, random)
        low, high = np.percentile(drawn, [2.5, 97.5])
        return self.quartiles[1] / other.quartiles[1], float(low), float(high)


def median_interval(values: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]") -> Interval:
    """Returns the median, and the 2.5th and 97.5th percentiles of 2000 bootstrap medians."""
    # The bootstrap assumes no distribution of the noise. The seed makes it reproducible.
    low, high = np.percentile(_medians(values, np.random.default_rng(0)), [2.5, 97.5])
    return float(np.median(values)), float(low), float(high)


def _medians(
    values: "Sequence[float] | np.ndarray[tuple[int, ...], np.dtype[np.float64]]",
    random: np.random.Generator,
) -> "np.ndarray[tuple[int, ...], np.dtype[np.float64]]":
    medians: np.ndarray[tuple[int, ...], np.dtype[np.float64]]
    medians = np.median(random.choice(values, (_DRAWS, len(values))), axis=1)
    return medians


MOST_WALL = 1.3  # wall time of a step as a multiple of its CPU time
MOST_OTHERS = 0.1  # share of the processors' time that other processes take

_TICKS = os.sysconf("SC_CLK_TCK")


class CpuUse:
    """Measures the CPU time of others on the ranks' processors, from its creation. Collective."""

    def __init__(self) -> None:
        everyone: list[set[int]] = [set() for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, os.sched_getaffinity(0))
        # A launcher may bind each rank to other processors.
        self.processors = set().union(*everyone)
        self._began = time.perf_counter()
        self._busy, self._own = _busy_seconds(self.processors), time.process_time()

    def others(self) -> float | None:
        """Returns other processes' share of the processors' time; None if unknown. Collective.

        The ranks must be on one machine.
        """
        own = [0.0] * dist.get_world_size()
        dist.all_gather_object(own, time.process_time() - self._own)
        busy = _busy_seconds(self.processors)
        if busy is None or self._busy is None:
            return None
        took = (time.perf_counter() - self._began) * len(self.processors)
        return max(0.0, busy - self._busy - sum(own)) / took


def _busy_seconds(processors: set[int]) -> float | None:
    ticks = 0
    try:
        for line in Path("/proc/stat").read_text().splitlines():
            name, *columns = line.split()
            if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in processors:
                # Without interrupts, since those of gloo's sockets belong to no process.
                user, nice, system, *_ = map(int, columns)
                ticks += user + nice + system + int(columns[7])  # stolen by the hypervisor
    except (OSError, ValueError):
        return None
    return ticks / _TICKS


def disturbance(alone: Samples | None, others: float | None, ranks: int, cores: int) -> str | None:
    """Describes a sign that something else ran meanwhile; None if the machine was quiet.

    `alone` are the steps without communication, `others` is from `CpuUse`, and `cores` is the
    number of processors that the `ranks` of this machine may use.
    """
    if alone is not None and alone.cpu_milliseconds and ranks <= cores:
        # A step without communication always computes. Other processes may use idle cores.
        pairs = zip(alone.milliseconds, alone.cpu_milliseconds, strict=True)
        ratio = statistics.median(wall / cpu for wall, cpu in pairs)
        if ratio > MOST_WALL:
            return f"a step without communication takes {ratio:.2f} x its CPU time"
    elif others is not None and others > MOST_OTHERS:
        # Ranks that share cores wait for one another, so their times do not show other processes.
        return f"other processes took {100 * others:.0f} % of the processors' time"
    return None
