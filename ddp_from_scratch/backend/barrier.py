"""Barrier before each collective: ranks sleep until all have arrived, and compare operations.

A message-passing library polls while it waits, and can take the core from a rank that still
computes. A rank that waits here sleeps instead, and communicates only once all have arrived.
"""

import atexit
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch

from ddp_from_scratch.backend import operations
from ddp_from_scratch.backend.operations import COUNT_NBYTES, FINGERPRINT_NBYTES, name_ranks
from ddp_from_scratch.backend.shared_memory import (
    LASTING,
    DisseminationBarrier,
    SharedMemory,
    Topology,
    semaphores_nbytes,
)
from ddp_from_scratch.backend.transport import ProcessWatch, Transport
from ddp_from_scratch.common.errors import CommunicationError
from ddp_from_scratch.common.group import failure_detector, may_be_in_flight
from ddp_from_scratch.common.whereabouts import whereabouts

# Bytes of all eager buffers of a machine. Every rank reads all of them, so the more ranks there
# are, the smaller are the tensors for which this is the fastest way.
EAGER_NBYTES = 256 * 1024

# Bytes that a machine sends along with its fingerprint: what its ranks bring to a small operation,
# which then needs no messages of its own. At 10 Gbit/s they take a microsecond.
ALONG_NBYTES = 1024
_ALIGNMENT = 16  # of the largest dtype

# By parity and by rank of the group, a view of what the rank brings to a small operation.
EagerBuffers: TypeAlias = list[list[torch.Tensor]]

# By rank, a number in the rank's segment, as an array of one element.
Counters: TypeAlias = "list[np.ndarray[Any, np.dtype[np.int64]]]"


class BarrierMemory:
    """A barrier's shared memory, with one segment for each rank of the machine.

        semaphores | counters | fingerprints 0, 1 | messages 0, 1 | others | eager 0, 1

    Messages are those of all machines: a fingerprint, and what its ranks bring along.
    Fingerprints, messages and eager buffers exist twice, for even and odd meetings: a fast rank
    writes for the next meeting, which needs all ranks, while a slow rank still reads. Attributes
    hold one item per rank; `gave_up` and `messages` are shared. The constructor is collective.
    """

    def __init__(self, node: Transport, machines: int) -> None:
        self.eager_nbytes: int = EAGER_NBYTES // max(node.size, 2) // 64 * 64
        fields = np.dtype(
            [
                ("semaphores", "u1", semaphores_nbytes(node.size)),
                *((name, "i8") for name in ("arrived", "passed", "left", "lost", "gave_up")),
                ("rest", "u1", 24),  # padding: the counters have a cache line of their own
                ("fingerprints", "u1", (2, FINGERPRINT_NBYTES)),
                ("messages", "u1", (2, machines, FINGERPRINT_NBYTES + ALONG_NBYTES)),
                ("others", "u1", FINGERPRINT_NBYTES),
            ]
        )
        memory = SharedMemory(node, fields.itemsize + 2 * self.eager_nbytes)
        self.free: Callable[[], None] = memory.free
        self.addresses: list[int] = memory.addresses
        segments = memory.segments
        self.eager: list[torch.Tensor] = [s[fields.itemsize :].view(2, -1) for s in segments]
        segments[node.rank][: fields.itemsize].zero_()
        # Making a view takes longer than a meeting, so all of them are made here.
        each = [segment[: fields.itemsize].numpy().view(fields) for segment in segments]
        # The number of waits that a rank has reached, and that it has left.
        self.arrived: Counters = [one["arrived"] for one in each]
        self.passed: Counters = [one["passed"] for one in each]
        # 1 once a rank has left the group, or others have given up on it.
        self.left: Counters = [one["left"] for one in each]
        self.lost: Counters = [one["lost"] for one in each]
        # The number of a meeting that some rank gave up; no rank may continue after it.
        self.gave_up: np.ndarray[Any, np.dtype[np.int64]] = each[0]["gave_up"]
        prints = [[part.data for part in one["fingerprints"][0]] for one in each]
        self.fingerprints: list[list[memoryview]] = prints
        self.messages: np.ndarray[Any, np.dtype[np.uint8]] = each[0]["messages"][0]
        self.others: list[memoryview] = [one["others"][0].data for one in each]


Progress = Callable[[], float]  # advances messages; returns the seconds until it must run again

_CHECK_EVERY = 0.5  # seconds between checks for lost ranks while a rank sleeps
_CHECK_SOON = 0.02  # in elastic jobs


class CheckedBarrier:
    """A group's barrier, which compares the ranks' operations and names missing ranks.

    `meet` runs before each collective:

    1. publish: this rank writes its fingerprint into shared memory;
    2. wait: this rank sleeps until all ranks of its machine have arrived;
    3. exchange: with several machines, the first rank of each gathers the others' fingerprints;
    4. compare: every rank reads all fingerprints, and all ranks raise if they differ.

    `wait` is step 2 alone. An operation may call it any number of times after its meeting.
    `rank` and `size` are those among the ranks of this machine.
    """

    def __init__(self, topology: Topology, progress: Progress = lambda: math.inf) -> None:
        self._topology, self._process = topology, os.getpid()
        self.progress = progress
        self.rank: int = topology.intra_node.rank
        self.size: int = topology.intra_node.size
        self.machines: int = topology.count
        self._ranks = topology.intra_node.world_ranks
        self._processes = ProcessWatch(topology.intra_node.allgather(self._process))
        self._memory = memory = BarrierMemory(topology.intra_node, topology.count)
        # By rank of the group, where all read what it brings to a small operation, by parity.
        self._lanes = self._along() if topology.count > 1 else memory.eager
        # Cached, since making a view takes as long as summing a small tensor.
        self.eager: Callable[[torch.Size, torch.dtype], EagerBuffers]
        self.eager = lru_cache(maxsize=256)(self._make_eager)
        self._semaphores = DisseminationBarrier(memory.addresses, self.rank)
        self.same_place: bool = True  # whether all ranks gave one place; equal on all ranks
        self._number = 0  # of meetings so far; equal on all ranks in one meeting
        self.parity: int = 0  # of that number: chooses the buffers that the last meeting used
        # The number of waits so far, in meetings and after them, and its value at the last meeting.
        self._waits = self._met_at = 0
        self._timeout = self._deadline = 0.0  # of the last meeting, and of each `wait` after it
        self.caller: int | None = None  # the thread that has called the group last
        # Set once: ranks that fail at different places can never meet again.
        self._failure: CommunicationError | None = None
        self._ended = ""  # why another thread has ended this rank's part
        # Returns how many collectives the main thread has called on the gloo group beside this one,
        # and names them, from one sequence number to another; None if that is not known.
        self.name_others: Callable[[int, int], tuple[int, str] | None] | None = None
        self._others = 0  # the sequence number at the last meeting where the ranks had as many more
        self._compared = 0  # how often different numbers were only messages, or another thread's
        self._compare_from = 0  # the meeting from which on numbers are compared
        self._check_every = _CHECK_SOON if may_be_in_flight() else _CHECK_EVERY
        self._is_broken = failure_detector()
        self._since = 0.0  # when this rank began to wait
        # No rank may touch a semaphore before its owner creates it.
        topology.intra_node.allgather(None)
        _open.add(self)

    def missing(self) -> list[int]:
        """The ranks for which the others wait; none if they are on other machines."""
        missing = self._behind(self._memory.arrived, self._met_at)
        # This machine's first rank may be behind only because it waits for another machine.
        if not missing and self._topology.count == 1:
            missing = self._behind(self._memory.arrived, self._waits)
        return missing

    @property
    def missing_names(self) -> str:
        unknown = (
            "ranks on other machines" if self._topology.count > 1 else "a rank that has stopped"
        )
        return name_ranks(self.missing()) or unknown

    def _behind(self, numbers: Counters, wait: int) -> list[int]:
        return [rank for rank, number in zip(self._ranks, numbers, strict=True) if number[0] < wait]

    @property
    def under_way(self) -> str:
        """The operation in which this rank waits for others; "" if none. For any thread."""
        if self._memory.arrived[self.rank][0] <= self._memory.passed[self.rank][0]:
            return ""
        return operations.operation_in(bytes(self._memory.fingerprints[self.rank][self.parity]))

    def compare_others(
        self, others: int, name_others: Callable[[int, int], tuple[int, str] | None]
    ) -> None:
        """Compares the number of calls on the gloo group beside this one, now `others`."""
        if self._topology.count == 1:  # of other machines a rank hears only one fingerprint
            self._others, self.name_others = others, name_others

    def meet(self, operation: str, place: str, timeout: float, others: int = 0) -> None:
        """Returns when every rank of the group has arrived.

        Raises a CommunicationError if a rank does not arrive, or pass each `wait` after it, in
        `timeout` seconds, runs another operation, or has called more of the `others`, the calls on
        the gloo group beside this one. Every later call raises it again.
        """
        if self._failure is not None:
            raise CommunicationError(f"the group has failed before: {self._failure}")
        self._timeout, self._deadline = timeout, time.monotonic() + timeout
        self._number += 1
        parity = self.parity = self._number % 2
        own = operations.fingerprint_of(operation, place)
        looks = self.name_others is not None and self._number >= self._compare_from
        own += (others - self._others if looks else 0).to_bytes(COUNT_NBYTES, "little")
        self._memory.fingerprints[self.rank][parity][: len(own)] = own
        self._met_at = self._waits + 1
        self.wait()
        if self._topology.count > 1:
            self._exchange(parity)
        if not self._is_same(own, parity):
            self._compare(own, parity, others)
        if looks:
            self._others = others

    def wait(self) -> None:
        """Returns when every rank of this machine has called it. The meeting's timeout applies."""
        self._waits += 1
        self._since = time.monotonic()
        # Written after the fingerprint, so a rank that has arrived has a complete fingerprint.
        self._memory.arrived[self.rank][0] = self._waits
        self.progress()
        self._semaphores.wait(self._next_check, self._check_in_vain)
        self._memory.passed[self.rank][0] = self._waits
        # All ranks have arrived, but one may have timed out just before the last arrived.
        self._check_given_up()

    def break_off(self, error: BaseException) -> None:
        """Gives up the group after an error in an operation, which other ranks cannot finish."""
        if self._failure is None:
            self._give_up(f"a call was interrupted by {error!r}")

    def fail(self, text: str) -> CommunicationError:
        """Returns the error to raise where all ranks fail; each later `meet` raises it again."""
        self._failure = CommunicationError(text)
        return self._failure

    def leave(self) -> None:
        """Tells the other ranks not to wait for this one. A no-op in a forked child."""
        if os.getpid() == self._process:
            self._memory.left[self.rank][0] = 1

    def abandon(self) -> None:
        """Leaves, and makes a thread of this rank that waits in the barrier give up."""
        self._ended = "this rank has left the group"
        self.leave()

    def end(self, reason: str) -> None:
        """Makes a thread of this rank that waits in the barrier, now or later, give up."""
        self._ended = reason

    def free(self) -> None:
        _open.discard(self)
        self._processes.close()
        self.eager.cache_clear()  # type: ignore[attr-defined]
        self._memory.free()

    def _along(self) -> list[torch.Tensor]:
        """Divides the messages of all machines among their ranks. Collective."""
        world = self._topology.world
        machine_of = [tuple(ranks) for ranks in world.allgather(self._ranks)]
        machines = sorted(set(machine_of))  # by first rank, as their messages
        nbytes = ALONG_NBYTES // max(map(len, machines)) // _ALIGNMENT * _ALIGNMENT
        messages = torch.from_numpy(self._memory.messages)
        lanes = []
        for rank, ranks in zip(world.world_ranks, machine_of, strict=True):
            begin = FINGERPRINT_NBYTES + ranks.index(rank) * nbytes
            lanes.append(messages[:, machines.index(ranks), begin : begin + nbytes])
        return lanes

    @LASTING
    def _make_eager(self, shape: torch.Size, dtype: torch.dtype) -> EagerBuffers:
        """Returns tensors of this shape in the eager buffers; none if they are too large."""
        nbytes = shape.numel() * dtype.itemsize
        if nbytes > self._lanes[0].shape[1]:
            return []
        return [
            [lane[parity][:nbytes].view(dtype).view(shape) for lane in self._lanes]
            for parity in range(2)
        ]

    def _exchange(self, parity: int) -> None:
        if self.rank == 0:
            messages = self._memory.messages[parity]
            own = messages[self._topology.inter_node.rank].copy()
            own[:FINGERPRINT_NBYTES] = self._memory.fingerprints[0][parity]
            # Other machines see this one alone: a place that no rank gives shows that ours differ.
            if len({bytes(pair[parity]) for pair in self._memory.fingerprints}) > 1:
                own[bytes(own).index(b"\n") + 1] = ord("*")
            heard = messages.reshape(-1).data
            arrived = self._topology.inter_node.begin_allgather(own.data, heard)
            pause = 1e-5  # polled with growing pauses, since no semaphore reaches another machine
            while True:
                try:
                    if arrived():
                        break
                except RuntimeError:  # gloo has the same timeout, and may raise first
                    if time.monotonic() <= self._deadline:
                        raise
                if time.monotonic() > self._deadline:  # a lost machine does not end it either
                    raise self._time_out()
                time.sleep(pause)
                pause = min(2 * pause, 1e-3)
        self.wait()

    def _found(self, parity: int) -> list[bytes]:
        found = [bytes(pair[parity]) for pair in self._memory.fingerprints]
        if self._topology.count > 1:
            found += [bytes(one[:FINGERPRINT_NBYTES]) for one in self._memory.messages[parity]]
        return found

    def _is_same(self, own: bytes, parity: int) -> bool:
        # Compared as bytes, since every collective pays for decoding.
        self.same_place = True
        for other in self._found(parity):
            if not other.startswith(own):
                self.same_place = False
        return self.same_place

    def _compare(self, own: bytes, parity: int, others: int) -> None:
        found = self._found(parity)
        text = own[:-COUNT_NBYTES]
        self.same_place = all(other.startswith(text) for other in found)
        called = [operations.operation_in(other) for other in found]
        if called.count(called[self.rank]) < len(called):
            here = list(zip(self._ranks, called, strict=False))
            difference = operations.describe_difference(here, called[self.size :])
            raise self.fail(f"the ranks called different operations: {difference}")
        # The numbers follow the places, which may differ.
        ends = [other.index(b"\0") + 1 for other in found]
        counts = {other[end : end + COUNT_NBYTES] for other, end in zip(found, ends, strict=True)}
        if len(counts) > 1 and self.name_others is not None:
            self._compare_others(called[self.rank], others)

    def _compare_others(self, operation: str, others: int) -> None:
        """Raises if ranks differ in the gloo group's collectives, and not in messages alone."""
        assert self.name_others is not None
        count, names = self.name_others(self._others, others) or (-1, "")
        own = operations.fingerprint_of(f"{count} {names}", "")
        self._memory.others[self.rank][: len(own)] = own
        self.wait()
        found = [operations.operation_in(bytes(one)).partition(" ") for one in self._memory.others]
        counts = [int(count) for count, _, _ in found]
        if len(set(counts)) > 1 and -1 not in counts:
            each = (f"{count} ({names})" if names else str(count) for count, _, names in found)
            told = "; ".join(
                f"rank {rank} {one}" for rank, one in zip(self._ranks, each, strict=True)
            )
            raise self.fail(
                f"before {operation} the ranks called different numbers of collectives on the "
                f"gloo group: {told}: all ranks must call the same ones in the same order"
            )
        # Looking takes up to a second, so ranks that exchange messages look less and less often.
        self._compared += 1
        self._compare_from = self._number + 2 ** min(self._compared, 20)

    def _next_check(self) -> float:
        return min(self._deadline, time.monotonic() + min(self.progress(), self._check_every))

    def _check_in_vain(self) -> None:
        if self._ended:
            raise self._give_up(self._ended)
        behind = self._behind(self._memory.arrived, self._waits)
        gone = self._marked(self._memory.left).intersection(behind)
        # A rank killed after its arrival may not have woken the others; a rank that left does.
        killed = {self._ranks[index] for index in self._processes.ended()}
        gone |= killed.intersection(self._behind(self._memory.passed, self._waits))
        if gone:
            # Ranks marked lost are the cause; the ranks that marked them may be gone by now, too.
            lost = self._marked(self._memory.lost) or gone
            for rank in lost:
                self._memory.lost[self._ranks.index(rank)][0] = 1
            raise self._give_up(_lost_text(lost))
        if time.monotonic() > self._deadline:
            raise self._time_out()
        # Not at once: a rank that leaves after the same step may already have left.
        if time.monotonic() > self._since + _CHECK_EVERY and self._is_broken():
            raise self._give_up("a rank of the group was lost")
        # Else wait for the deadline, whose error names the ranks that have not arrived.
        if not self._behind(self._memory.arrived, self._met_at):
            self._check_given_up()

    def _check_given_up(self) -> None:
        if 0 < self._memory.gave_up[0] <= self._number:
            lost = self._marked(self._memory.lost)
            text = _lost_text(lost) if lost else "another rank has given up on it"
            raise self.fail(self._ended or text)

    def _marked(self, marks: Counters) -> set[int]:
        return {rank for rank, mark in zip(self._ranks, marks, strict=True) if mark[0]}

    def _give_up(self, text: str) -> CommunicationError:
        """Fails, and makes the ranks that arrive later fail, too."""
        self._memory.gave_up[0] = self._number
        return self.fail(text)

    def _time_out(self) -> CommunicationError:
        self._memory.gave_up[0] = self._number  # first, since looking takes up to a second
        where = whereabouts(self.missing(), self._timeout)
        text = f"the timeout of {self._timeout:g} s passed without {self.missing_names}{where}"
        return self._give_up(text)


def _lost_text(ranks: set[int]) -> str:
    return f"{name_ranks(sorted(ranks))} ended without reaching it"


_open: "weakref.WeakSet[CheckedBarrier]" = weakref.WeakSet()


def _leave_before_threads_end() -> None:
    """Leaves the groups of the main thread, which has ended, while others keep the process alive.

    Python waits for threads that are not daemons before it runs what `atexit` has.
    """
    main = threading.main_thread()
    if any(not thread.daemon and thread is not main for thread in threading.enumerate()):
        for barrier in list(_open):
            if barrier.caller == main.ident:
                barrier.leave()


threading._register_atexit(_leave_before_threads_end)  # type: ignore[attr-defined]


@atexit.register
def _leave() -> None:
    """Leaves every open barrier, so other ranks need not wait for the timeout.

    Runs after the worker threads have ended (`work.py` registers later), since those still meet.
    """
    for barrier in list(_open):
        barrier.leave()
