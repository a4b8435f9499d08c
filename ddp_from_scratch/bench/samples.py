"""Statistics of timed steps: medians, ratios with intervals, and whether the machine was quiet."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

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


def median_interval(values: NDArray[np.float64]) -> Interval:
    """Returns the median, and the 2.5th and 97.5th percentiles of 2000 bootstrap medians."""
    # The bootstrap assumes no distribution of the noise. The seed makes it reproducible.
    low, high = np.percentile(_medians(values, np.random.default_rng(0)), [2.5, 97.5])
    return float(np.median(values)), float(low), float(high)


def _medians(
    values: Sequence[float] | NDArray[np.float64], random: np.random.Generator
) -> NDArray[np.float64]:
    medians: NDArray[np.float64] = np.median(random.choice(values, (_DRAWS, len(values))), axis=1)
    return medians


MOST_WALL = 1.3  # wall time of a step as a multiple of its CPU time


def disturbance(alone: Samples | None, ranks: int, cores: int) -> str | None:
    """Describes a sign that something else ran during the steps `alone`; None if there is none."""
    # Such a step always computes. Ranks that share cores wait, too: that shows no other process.
    if alone is None or not alone.cpu_milliseconds or ranks > cores:
        return None
    pairs = zip(alone.milliseconds, alone.cpu_milliseconds, strict=True)
    ratio = statistics.median(wall / cpu for wall, cpu in pairs)
    if ratio <= MOST_WALL:
        return None
    return f"a step without communication takes {ratio:.2f} x its CPU time"
