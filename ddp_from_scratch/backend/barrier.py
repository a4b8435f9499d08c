"""Barrier before each collective: ranks sleep in it, and are compared.

Waits of a message-passing library poll, and can take the core from a rank that still computes. So
ranks meet here first, where a waiting rank sleeps, and communicate once all have arrived.
"""

import atexit
import math
import os
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from ddp_from_scratch.backend.operations import (
    FINGERPRINT_NBYTES,
    describe_difference,
    fingerprint_of,
    mark_place,
    name_ranks,
    operation_in,
    split_fingerprints,
)
from ddp_from_scratch.backend.shared_memory import (
    DisseminationBarrier,
    Nodes,
    SharedMemory,
    semaphores_nbytes,
)
from ddp_from_scratch.backend.transport import ProcessWatch, Transport
from ddp_from_scratch.errors import CommunicationError
from ddp_from_scratch.waiting import lost_rank_check, may_be_left_behind

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
        arrived: the number of waits that the rank has reached.
        passed: the number of waits that it has left again: others need nothing more of it there.
        left: 1 once its program has ended: others stop waiting for it at once.
        lost: 1 once others have given up on this rank.
        gave_up: * the number of a meeting that some rank has given up: no rank may then continue.
        fingerprints: a pair: which operation the rank is about to run.
        heard: * a pair: fingerprints of all machines' first ranks.
        eager: small tensors that the rank brings along; uint8, shape (2, eager_nbytes).
    """

    def __init__(self, node: Transport, machines: int) -> None:
        self.eager_nbytes = EAGER_NBYTES // max(node.size, 2) // 64 * 64
        heard_nbytes = machines * FINGERPRINT_NBYTES if machines > 1 else 0
        fields = np.dtype(
            [
                ("semaphores", "u1", semaphores_nbytes(node.size)),
                *((name, "i8") for name in ("arrived", "passed", "left", "lost", "gave_up")),
                ("rest", "u1", 24),  # counters share a cache line with nothing else
                ("fingerprints", "u1", (2, FINGERPRINT_NBYTES)),
                ("heard", "u1", (2, heard_nbytes)),
            ]
        )
        self._memory = SharedMemory(node, fields.itemsize + 2 * self.eager_nbytes)
        self.addresses, segments = self._memory.addresses, self._memory.segments
        self.eager = [segment[fields.itemsize :].view(2, -1) for segment in segments]
        segments[node.rank][: fields.itemsize].zero_()
        # Views that are made once: making one takes longer than a meeting.
        each = [segment[: fields.itemsize].numpy().view(fields) for segment in segments]
        self.arrived, self.passed = ([one[name] for one in each] for name in ("arrived", "passed"))
        self.left, self.lost = [one["left"] for one in each], [one["lost"] for one in each]
        self.gave_up = each[0]["gave_up"]
        self.fingerprints = [[part.data for part in one["fingerprints"][0]] for one in each]
        self.heard = [part.data for part in each[0]["heard"][0]]

    def free(self) -> None:
        self._memory.free()


# Lets messages that are under way go on; returns seconds until it is to be called again.
Progress = Callable[[], float]

# Seconds between two looks of a sleeping rank for lost ranks; below, in a job that continues
# without them.
_CHECK_EVERY = 0.5
_CHECK_SOON = 0.02


class CheckedBarrier:
    """Barrier of a group's ranks that compares their operations and names missing ranks.

    `meet`, before each collective:

    1. publish: this rank's fingerprint goes into shared memory;
    2. wait: for the ranks of this machine, asleep;
    3. exchange, on several machines: the first rank of each gathers the others' fingerprints;
    4. compare: every rank reads all fingerprints, and all raise where they differ.

    `wait` is step 2 alone, which an operation may call any number of times after it has met.

    Attributes:
        rank, size: this rank's place among those of its machine, and their number.
        same_place: all ranks gave the same place at the last meeting; the same on all of them.
        eager, eager_nbytes: see `BarrierMemory`.
        progress: as given; other waits of the group call it, too.
    """

    def __init__(self, nodes: Nodes, progress: Progress = lambda: math.inf) -> None:
        self._nodes, self.progress = nodes, progress
        self.rank, self.size = nodes.node.rank, nodes.node.size
        self._process = os.getpid()
        self._ranks = nodes.node.world_ranks
        self._processes = ProcessWatch(nodes.node.allgather(self._process))
        self._memory = memory = BarrierMemory(nodes.node, nodes.count)
        self.eager, self.eager_nbytes = memory.eager, memory.eager_nbytes
        self._semaphores = DisseminationBarrier(memory.addresses, self.rank)
        self.same_place = True
        # The number of meetings so far. Ranks in the same meeting have the same number.
        self._number = 0
        # The number of waits so far, in meetings and after them; and that at the last meeting.
        self._waits = self._met_at = 0
        # Of the last meeting; also the limit of each `wait` after it.
        self._timeout = self._deadline = 0.0
        # Set once. Ranks that fail at different places can never meet again.
        self._failure: CommunicationError | None = None
        self._abandoned = False
        self._check_every = _CHECK_SOON if may_be_left_behind() else _CHECK_EVERY
        self._is_broken = lost_rank_check()
        # When this rank began to wait.
        self._since = 0.0
        nodes.node.allgather(None)  # no rank may touch a semaphore that is not there yet
        _open.add(self)

    @property
    def parity(self) -> int:
        """0 after an even meeting, 1 after an odd one."""
        return self._number % 2

    @property
    def missing(self) -> list[int]:
        """Ranks of this machine that have not arrived at the last meeting."""
        return self._behind(self._memory.arrived, self._met_at)

    @property
    def missing_names(self) -> str:
        if self.missing:
            return name_ranks(self.missing)
        # This machine's first rank may be behind only because it waits for another machine.
        if self._nodes.count > 1:
            return "ranks on other machines"
        return (
            name_ranks(self._behind(self._memory.arrived, self._waits)) or "a rank that has stopped"
        )

    def _behind(self, numbers: Counters, wait: int) -> list[int]:
        """Ranks of this machine whose number is less than this wait's."""
        pairs = zip(self._ranks, numbers, strict=True)
        return [rank for rank, number in pairs if number[0] < wait]

    def meet(self, operation: str, place: str, timeout: float) -> None:
        """Returns when every rank of the group has arrived.

        Args:
            operation: must be the same on all ranks.
            place: a detail in which they may differ; `same_place` is False where they do.
            timeout: seconds in which all must arrive, and pass each `wait` after it.

        Raises:
            CommunicationError: a rank did not arrive in time, or runs another operation; again on
                each later call.
        """
        if self._failure is not None:
            raise CommunicationError(f"the group has failed before: {self._failure}")
        self._timeout, self._deadline = timeout, time.monotonic() + timeout
        self._number += 1
        parity = self.parity
        # Publish.
        own = fingerprint_of(operation, place)
        self._memory.fingerprints[self.rank][parity][: len(own)] = own
        # Wait, exchange, compare.
        self._met_at = self._waits + 1
        self.wait()
        if self._nodes.count > 1:
            self._exchange(parity)
        self._compare(own, parity)

    def wait(self) -> None:
        """Returns when every rank of this machine has called it, in the timeout of the meeting."""
        self._waits += 1
        self._since = time.monotonic()
        # After the fingerprint, so that the fingerprint of a rank that has arrived is complete.
        self._memory.arrived[self.rank][0] = self._waits
        self.progress()
        self._semaphores.wait(self._next_check, self._check_in_vain)
        self._memory.passed[self.rank][0] = self._waits
        # All have arrived, but one of them may have timed out just before the last did.
        self._check_given_up()

    def break_off(self, error: BaseException) -> None:
        """Gives up the group, after an error between a meeting and the end of its operation."""
        # Where the other ranks are is unknown, and they cannot go on without this one.
        if self._failure is None:
            self._give_up(f"a call was left with {error!r}")

    def fail(self, text: str) -> CommunicationError:
        """The error to raise, where all ranks do; each later `meet` raises it again."""
        self._failure = CommunicationError(text)
        return self._failure

    def leave(self) -> None:
        """Publishes that this rank meets the others no more. A no-op in a forked child."""
        if os.getpid() == self._process:
            self._memory.left[self.rank][0] = 1

    def abandon(self) -> None:
        """As `leave`, and another thread of this rank that waits here gives up."""
        self._abandoned = True
        self.leave()

    def free(self) -> None:
        """Gives this rank's memory back."""
        _open.discard(self)
        self._processes.close()
        self._memory.free()

    def _exchange(self, parity: int) -> None:
        """Publishes on each machine the fingerprints of all machines' first ranks."""
        if self.rank == 0:
            own = self._memory.fingerprints[0][parity]
            # Another machine hears of this one's other ranks by its first one's place alone.
            if len({bytes(pair[parity]) for pair in self._memory.fingerprints}) > 1:
                mark_place(own)
            arrived = self._nodes.peers.begin_allgather(own, self._memory.heard[parity])
            # Polled with growing pauses: between machines there is nothing to sleep on.
            pause = 1e-5
            while not self._in_time(arrived):
                # Nor does a machine that is gone end the request.
                if time.monotonic() > self._deadline:
                    raise self._time_out()
                time.sleep(pause)
                pause = min(2 * pause, 1e-3)
        self.wait()

    def _in_time(self, arrived: Callable[[], bool]) -> bool:
        try:
            return arrived()
        except RuntimeError:
            if time.monotonic() <= self._deadline:
                raise
            return False  # gloo has the same timeout, and may be first to say so

    def _compare(self, own: bytes, parity: int) -> None:
        found = [bytes(pair[parity]) for pair in self._memory.fingerprints]
        if self._nodes.count > 1:
            found += split_fingerprints(bytes(self._memory.heard[parity]))
        # Compared as bytes, without decoding: this is in every collective's way.
        self.same_place = True
        for other in found:
            if not other.startswith(own):
                self.same_place = False
        if self.same_place:
            return
        # Places may differ, operations must not.
        operations = [operation_in(other) for other in found]
        if operations.count(operations[self.rank]) < len(operations):
            here = list(zip(self._ranks, operations, strict=False))
            difference = describe_difference(here, operations[self.size :])
            raise self.fail(f"the ranks called different operations: {difference}")

    def _next_check(self) -> float:
        nap = min(self.progress(), self._check_every)
        return min(self._deadline, time.monotonic() + nap)

    def _check_in_vain(self) -> None:
        if self._abandoned:
            raise self._give_up("this rank has left the group")
        gone = self._marked(self._memory.left).intersection(
            self._behind(self._memory.arrived, self._waits)
        )
        # One that was killed after it came may have slept, with others still to be woken by it. One
        # that has left goes on with what it came to.
        killed = {self._ranks[index] for index in self._processes.ended()}
        gone |= killed.intersection(self._behind(self._memory.passed, self._waits))
        if gone:
            # Those that others have given up for are the cause; these others may be gone by now.
            lost = self._marked(self._memory.lost) or gone
            for rank in lost:
                self._memory.lost[self._ranks.index(rank)][0] = 1
            raise self._give_up(_lost_text(lost))
        if time.monotonic() > self._deadline:
            raise self._time_out()
        # Not at once: who leaves after the same step as this rank may have left already.
        if time.monotonic() > self._since + _CHECK_EVERY and self._is_broken():
            raise self._give_up("a rank of the group was lost")
        # Not while a rank is missing: the deadline then names it, which says more.
        if not self.missing:
            self._check_given_up()

    def _check_given_up(self) -> None:
        if 0 < self._memory.gave_up[0] <= self._number:
            lost = self._marked(self._memory.lost)
            raise self.fail(_lost_text(lost) if lost else "another rank has given up on it")

    def _marked(self, marks: Counters) -> set[int]:
        """Ranks of this machine that are marked."""
        return {rank for rank, mark in zip(self._ranks, marks, strict=True) if mark[0]}

    def _give_up(self, text: str) -> CommunicationError:
        """As `fail`, while others may still arrive: they fail, too."""
        self._memory.gave_up[0] = self._number
        return self.fail(text)

    def _time_out(self) -> CommunicationError:
        return self._give_up(
            f"the timeout of {self._timeout:g} s passed without {self.missing_names}"
        )


def _lost_text(ranks: set[int]) -> str:
    return f"{name_ranks(sorted(ranks))} ended without coming to it"


_open: "weakref.WeakSet[CheckedBarrier]" = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    """Leaves every open barrier: ranks that wait for this one need not wait for the timeout.

    Runs after the worker threads have ended (`work.py` registers later): they still hold meetings.
    """
    for barrier in list(_open):
        barrier.leave()
