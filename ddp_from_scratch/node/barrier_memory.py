"""Shared memory of a `CheckedBarrier`, by field."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from ddp_from_scratch.node import fingerprint, semaphore
from ddp_from_scratch.node.communicator import Communicator
from ddp_from_scratch.node.semaphore import Semaphore
from ddp_from_scratch.node.shared_memory import SharedMemory

# Bytes of the eager buffers of all ranks of a machine together. Each rank reads all of them, so
# with many ranks it is better to bring less and to read what another rank has summed.
EAGER_NBYTES = 256 * 1024


# A number of each rank, in its segment; an array of one element.
Counters: TypeAlias = "list[np.ndarray[Any, np.dtype[np.int64]]]"


class BarrierMemory:
    """One segment for each rank of the machine.

        semaphores | counters | fingerprints 0, 1 | heard 0, 1 | eager 0, 1

    Fingerprints, heard and eager buffers are double, for even and odd meetings: a fast rank brings
    its next ones while a slow one still reads these. (It cannot bring the ones after that, which
    need all ranks at the meeting between.)

    Collective to make. One for each rank, or for all ranks (*):

    Attributes:
        addresses: of the semaphores.
        come: number of waits that the rank has come to.
        passed: number of waits that the rank has passed: others need nothing more of it there.
        left: 1 once its program has ended: nobody need wait for it until the timeout.
        lost: 1 once others have given up for want of this rank.
        gave_up: * number of a meeting that a rank no longer waits for: none may go on alone then.
        fingerprints: a pair: the operation that the rank has come for.
        heard: * a pair: fingerprints of all machines' first ranks.
        eager: small tensors that the rank brings along; uint8, shape (2, eager_nbytes).
    """

    def __init__(self, node: Communicator, machines: int) -> None:
        heard_nbytes = machines * fingerprint.NBYTES if machines > 1 else 0
        counters_at = counters_nbytes(node.size)
        fingerprints_at = counters_at + 64  # counters share a cache line with nothing else
        heard_at = fingerprints_at + 2 * fingerprint.NBYTES
        eager_at = heard_at + 2 * heard_nbytes
        self.eager_nbytes = EAGER_NBYTES // max(node.size, 2) // 64 * 64
        self._memory = SharedMemory(node, eager_at + 2 * self.eager_nbytes)
        segments = self._memory.segments
        segments[node.rank][:eager_at].zero_()
        self.addresses = self._memory.addresses
        # Views that are made once: making one takes longer than a meeting.
        counters = [segment[counters_at:][:40].view(torch.int64).numpy() for segment in segments]
        self.come: Counters = [counter[0:1] for counter in counters]
        self.passed: Counters = [counter[1:2] for counter in counters]
        self.left: Counters = [counter[2:3] for counter in counters]
        self.lost: Counters = [counter[3:4] for counter in counters]
        self.gave_up = counters[0][4:5]
        self.fingerprints = [_pair(s, fingerprints_at, fingerprint.NBYTES) for s in segments]
        self.heard = _pair(segments[0], heard_at, heard_nbytes)
        self.eager = [segment[eager_at:].view(2, self.eager_nbytes) for segment in segments]

    def free(self) -> None:
        self._memory.free()


def _pair(segment: torch.Tensor, begin: int, nbytes: int) -> list[memoryview]:
    return [segment[begin + i * nbytes :][:nbytes].numpy().data for i in range(2)]


# Ranks that hear of one another in a round.
_WAYS = 4


class DisseminationBarrier:
    """Returns on no rank of a machine before every one has called `wait`.

    Follows Hensgen, Finkel and Manber (1988), with several ways in a round (Hoefler, Mehlan, Mietke
    and Rehm 2006): in round k rank r wakes the ranks r + 4^k, r + 2 x 4^k and r + 3 x 4^k, those
    that are less than n away, and waits for the ranks that wake it. After log4(n) rounds each has
    heard of all.

    Args:
        addresses: of each rank's semaphores, `counters_nbytes(size)` bytes, in this process.
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


def counters_nbytes(size: int) -> int:
    """Bytes of one rank's semaphores."""
    return sum(map(len, rounds_of(size))) * semaphore.NBYTES


def rounds_of(size: int) -> list[list[int]]:
    """Distances to the ranks that a rank wakes, by round: [[1, 2, 3], [4, 8]] of 12 ranks."""
    rounds, step = [], 1
    while step < size:
        rounds.append(list(range(step, size, step))[: _WAYS - 1])
        step *= _WAYS
    return rounds
