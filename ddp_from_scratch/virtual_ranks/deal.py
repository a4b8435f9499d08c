"""Which rank runs which virtual ranks: neighbours, so that few partial sums are sent."""

from collections.abc import Sequence
from itertools import accumulate, pairwise


def equal_counts(count: int, ranks: int) -> list[int]:
    """Returns how many of `count` virtual ranks each rank runs; they differ by at most one."""
    return [(rank + 1) * count // ranks - rank * count // ranks for rank in range(ranks)]


def counts_by_speed(count: int, seconds: Sequence[float]) -> list[int]:
    """Returns how many virtual ranks each rank runs so that the last rank ends as early as can be.

    At least one each. Rank r needs `seconds[r]` for one.
    """
    counts = [1] * len(seconds)
    for _ in range(count - len(seconds)):
        ends = [(own + 1) * each for own, each in zip(counts, seconds, strict=True)]
        counts[ends.index(min(ends))] += 1
    return counts


def longest(counts: Sequence[int], seconds: Sequence[float]) -> float:
    """Returns the seconds after which the last rank ends."""
    return max(own * each for own, each in zip(counts, seconds, strict=True))


def parts_of(virtual_ranks: Sequence[int], counts: Sequence[int]) -> list[tuple[int, ...]]:
    """Deals these virtual ranks out in order, to each rank its count."""
    bounds = accumulate(counts, initial=0)
    return [tuple(virtual_ranks[begin:end]) for begin, end in pairwise(bounds)]
