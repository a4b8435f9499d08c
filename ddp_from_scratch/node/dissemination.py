"""Dissemination barrier of semaphores in shared memory."""

import itertools
from collections.abc import Callable, Sequence

from ddp_from_scratch.node import semaphore
from ddp_from_scratch.node.semaphore import Semaphore

# Ranks that hear of one another in a round.
_WAYS = 4


class DisseminationBarrier:
    """Returns on no rank of a machine before every one has called `wait`.

    Follows Hensgen, Finkel and Manber (1988), with several ways in a round (Hoefler, Mehlan, Mietke
    and Rehm 2006): in round k rank r wakes the ranks r + 4^k, r + 2 x 4^k and r + 3 x 4^k, those
    that are less than n away, and waits for the ranks that wake it. After log4(n) rounds each has
    heard of all.

    Args:
        addresses: of each rank's semaphores, `nbytes(size)` bytes, in this process.
        rank: creates its own semaphores; no other may `wait` before that.
    """

    def __init__(self, addresses: Sequence[int], rank: int) -> None:
        self._rounds: list[tuple[list[Semaphore], list[Semaphore]]] = []
        # One semaphore for each distance in each round: the second post of a fast rank must not
        # stand for the first of a slow one.
        places = itertools.count(0, semaphore.NBYTES)
        for distances in rounds_of(len(addresses)):
            wakes, waits = [], []
            for distance, place in zip(distances, places, strict=False):
                wakes.append(Semaphore(addresses[(rank + distance) % len(addresses)] + place))
                waits.append(Semaphore(addresses[rank] + place))
                waits[-1].create()
            self._rounds.append((wakes, waits))

    def wait(self, next_check: Callable[[], float], check: Callable[[], None]) -> None:
        """Sleeps until every rank has called it, but for a `check`, which may raise, at times."""
        for wakes, waits in self._rounds:
            for other in wakes:
                other.post()
            for own in waits:
                # `sleep` also ends without being woken: at the time of a check, or by a signal.
                while not (own.spin() or own.sleep(next_check())):
                    check()


def nbytes(size: int) -> int:
    """Bytes of one rank's semaphores."""
    return sum(map(len, rounds_of(size))) * semaphore.NBYTES


def rounds_of(size: int) -> list[list[int]]:
    """Distances to the ranks that a rank wakes, by round: [[1, 2, 3], [4, 8]] of 12 ranks."""
    rounds, step = [], 1
    while step < size:
        rounds.append(list(range(step, size, step))[: _WAYS - 1])
        step *= _WAYS
    return rounds
