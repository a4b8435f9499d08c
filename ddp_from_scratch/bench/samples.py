"""Arithmetic of timed steps: medians, and ratios with their intervals."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

Interval = tuple[float, float, float]  # an estimate, and the ends of its 95 % interval

_DRAWS = 2000


@dataclass(frozen=True)
class Samples:
    """One contender's steps, round by round; of the slowest rank in each.

    Attributes:
        name: the contender's.
        milliseconds: from the ranks' meeting before the step to its end.
        cpu_milliseconds: of all threads of the rank's process, until the step's last call
            returned: with a GPU what it costs to drive it.
    """

    name: str
    milliseconds: list[float]
    cpu_milliseconds: list[float] = field(default_factory=list)

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """The 25th, 50th and 75th percentile."""
        low, median, high = np.percentile(self.milliseconds, [25, 50, 75])
        return float(low), float(median), float(high)

    def ratio_to(self, other: "Samples") -> Interval:
        """Median of the ratios round by round, with its 95 % bootstrap interval."""
        # Round by round, and the median of that: what slows the machine for a while slows both
        # steps of a round, and cancels out.
        return median_interval(np.array(self.milliseconds) / np.array(other.milliseconds))

    def unpaired_ratio_to(self, other: "Samples") -> Interval:
        """Ratio of the medians of two runs that shared no rounds, with its bootstrap interval."""
        random = np.random.default_rng(0)
        drawn = _medians(self.milliseconds, random) / _medians(other.milliseconds, random)
        low, high = np.percentile(drawn, [2.5, 97.5])
        return self.quartiles[1] / other.quartiles[1], float(low), float(high)

    def minus(self, other: "Samples") -> Interval:
        """Median of the differences round by round in ms, with its 95 % bootstrap interval."""
        return median_interval(np.array(self.milliseconds) - np.array(other.milliseconds))


def median_interval(values: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]") -> Interval:
    """The median, and the 2.5th and 97.5th percentile of 2000 bootstrap medians."""
    # The bootstrap assumes no shape of the noise. A fixed seed: a file gives the same interval
    # again.
    low, high = np.percentile(_medians(values, np.random.default_rng(0)), [2.5, 97.5])
    return float(np.median(values)), float(low), float(high)


def _medians(
    values: "Sequence[float] | np.ndarray[tuple[int, ...], np.dtype[np.float64]]",
    random: np.random.Generator,
) -> "np.ndarray[tuple[int, ...], np.dtype[np.float64]]":
    """Medians of samples drawn from these with replacement."""
    medians: np.ndarray[tuple[int, ...], np.dtype[np.float64]]
    medians = np.median(random.choice(values, (_DRAWS, len(values))), axis=1)
    return medians
