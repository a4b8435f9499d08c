"""Where the ranks of a group meet before each collective: asleep, watched, and compared.

MPI's own waits poll. With as many ranks as cores, a rank that waits in MPI for one that still
computes can take the core from it. So the ranks meet here first, where waiting is sleeping, and
call MPI when all have come. That tells two things more: who has not come when the time is over,
and whether all have come for the same.
"""

import atexit
import itertools
import os
import time
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ddp_from_scratch.errors import CommunicationError
from ddp_from_scratch.mpi import p2p
from ddp_from_scratch.mpi.runtime import MPI
from ddp_from_scratch.node import semaphore
from ddp_from_scratch.node.semaphore import Semaphore
from ddp_from_scratch.node.shared_memory import SharedMemory, can_share

_WORD_BYTES = 256

# How many ranks hear of one another in a round of the barrier.
_WAYS = 4

# Bytes that all ranks of a machine together can bring along to a meeting. Each reads all of them,
# so with many ranks it is better to bring less and read what somebody has summed.
LUGGAGE = 256 * 1024


@dataclass(frozen=True)
class Nodes:
    """A group's ranks by machine.

    Attributes:
        communicator: all of them.
        node: those on this machine, which can share memory.
        leaders: the first one of each machine; MPI.COMM_NULL on the others.
        count: the number of machines.
    """

    communicator: MPI.Intracomm
    node: MPI.Intracomm
    leaders: MPI.Intracomm
    count: int

    @staticmethod
    def of(communicator: MPI.Intracomm, node: MPI.Intracomm | None = None) -> "Nodes":
        """Asks MPI. Collective.

        Args:
            communicator: the ranks.
            node: what to take for this machine's ranks; None asks MPI.
        """
        if node is not None:
            node = node.Dup()
        else:
            # Where memory cannot be shared, each rank counts as a machine of its own.
            here = MPI.Intracomm(communicator.Split_type(MPI.COMM_TYPE_SHARED))
            shared = semaphore.AVAILABLE and can_share(here)
            node = MPI.Intracomm(here.Split(0 if shared else communicator.rank))
            here.Free()
        leaders = MPI.Intracomm(communicator.Split(0 if node.rank == 0 else MPI.UNDEFINED))
        count = node.bcast(leaders.size if node.rank == 0 else 0)
        return Nodes(communicator, node, leaders, count)

    def free(self) -> None:
        for communicator in (self.node, self.leaders):
            if communicator != MPI.COMM_NULL:
                communicator.Free()


class Meeting:
    """Brings the ranks of a group together, one time after another.

    On a machine they meet in shared memory. Each rank has a segment there:

        semaphores | come | left | gave up | words 0, 1 | heard 0, 1 | luggage 0, 1

    The semaphores make a dissemination barrier (Hensgen, Finkel and Manber 1988) with several ways
    in a round (Hoefler, Mehlan, Mietke and Rehm 2006): in round k rank r wakes the ranks r + 4^k,
    r + 2 x 4^k and r + 3 x 4^k, those that are less than n away, and waits for the ranks that wake
    it; after log4(n) rounds each has heard of all. There is one for each of them in each round, so
    that the second post of a fast rank does not stand for the first of a slow one.
    `come` counts the meetings that the rank has come to; `left` says that its program has ended, so
    that who waits for it need not wait for the timeout. `gave up`, the first rank's, is the number
    of a meeting that a rank no longer waits for, or has left: another must not go on alone.
    `word` says what the rank has come for.
    Words and luggage are double, for even and odd meetings, since a fast rank brings its next ones
    while a slow one still reads these. (It cannot bring the ones after that: they need all ranks at
    the meeting between.)

    Between machines the first rank of each exchanges its word with the others', polling MPI with
    sleep in between, and leaves what it `heard` to the ranks of its machine.

    Args:
        nodes: the group's ranks by machine.

    Attributes:
        rank, size: this rank's place among those of its machine, and how many they are.
        luggage: what each rank of the machine brings along; uint8, shape (2, luggage_nbytes), for
            even and odd meetings.
        luggage_nbytes: how much that can be.
        same_place: whether all ranks said the same place at the last meeting.
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self.rank, self.size = nodes.node.rank, nodes.node.size
        self._ranks = nodes.node.allgather(MPI.COMM_WORLD.rank)
        heard_bytes = nodes.count * _WORD_BYTES if nodes.count > 1 else 0
        rounds = rounds_of(self.size)
        come_at = sum(map(len, rounds)) * semaphore.NBYTES
        words_at = come_at + 64
        heard_at = words_at + 2 * _WORD_BYTES
        luggage_at = heard_at + 2 * heard_bytes
        self.luggage_nbytes = LUGGAGE // max(self.size, 2) // 64 * 64
        self._memory = SharedMemory(nodes.node, luggage_at + 2 * self.luggage_nbytes)
        self._memory.segments[self.rank][:luggage_at].zero_()
        segments = self._memory.segments
        self._come = [segment[come_at:][:8].view(torch.int64).numpy() for segment in segments]
        self._left = [segment[come_at + 8 :][:8].view(torch.int64).numpy() for segment in segments]
        gave_up = segments[0][come_at + 16 :][:8]
        self._gave_up = gave_up.view(torch.int64).numpy()
        self._words = [_pair(segment, words_at, _WORD_BYTES) for segment in segments]
        self._heard = _pair(segments[0], heard_at, heard_bytes)
        self.luggage = [segment[luggage_at:].view(2, self.luggage_nbytes) for segment in segments]
        addresses = self._memory.addresses
        self._rounds: list[tuple[list[Semaphore], list[Semaphore]]] = []
        places = itertools.count(0, semaphore.NBYTES)
        for distances in rounds:
            wakes, waits = [], []
            for distance in distances:
                place = next(places)
                wakes.append(Semaphore(addresses[(self.rank + distance) % self.size] + place))
                waits.append(Semaphore(addresses[self.rank] + place))
                waits[-1].create()
            self._rounds.append((wakes, waits))
        self.same_place = True
        self._number = 0
        self._timeout = self._deadline = 0.0
        self._failure: CommunicationError | None = None
        nodes.node.Barrier()  # nobody may touch a semaphore that is not there yet
        _meetings.add(self)

    @property
    def parity(self) -> int:
        """Whether the last meeting was an even (0) or an odd one (1)."""
        return self._number % 2

    @property
    def missing(self) -> list[int]:
        """The ranks of this machine that have not come to this rank's last meeting."""
        come = zip(self._ranks, self._come, strict=True)
        return [rank for rank, number in come if number[0] < self._number]

    def meet(self, purpose: str, place: str, timeout: float) -> None:
        """Returns when every rank of the group has come.

        Args:
            purpose: what for; must be the same on all ranks.
            place: a detail in which they may differ; `same_place` then says whether they do.
            timeout: seconds until all must have come, and have passed the barriers after it.

        Raises:
            CommunicationError: a rank did not come in time, or has come for something else.
                There is no going on after that: each later call raises it again.
        """
        if self._failure is not None:
            raise CommunicationError(f"the group has failed before: {self._failure}")
        self._timeout, self._deadline = timeout, time.monotonic() + timeout
        self._number += 1
        parity = self.parity
        word = _word(purpose, place)
        self._words[self.rank][parity][: len(word)] = word
        self._come[self.rank][0] = self._number
        self.barrier()
        if self._nodes.count > 1:
            self._exchange(parity)
        words = [bytes(pair[parity]) for pair in self._words]
        if self._nodes.count > 1:
            words += _split(bytes(self._heard[parity]))
        self.same_place = True
        for other in words:
            if not other.startswith(word):
                self.same_place = False
        if not self.same_place:
            purposes = [_purpose(other) for other in words]
            if purposes.count(purposes[self.rank]) < len(words):
                raise self.fail(f"the ranks called different operations: {self._who(purposes)}")

    def barrier(self) -> None:
        """Returns when every rank of this machine has called it, once more after a `meet`.

        Raises:
            CommunicationError: not in the time that the meeting has.
        """
        p2p.progress()
        for wakes, waits in self._rounds:
            for other in wakes:
                other.post()
            for own in waits:
                # Awake once in a while, to see whether it is in vain.
                while not (own.look() or own.sleep(self._next_look())):
                    self._check_in_vain()
        self._check_given_up()

    def break_off(self, error: BaseException) -> None:
        """After an error between this rank's coming and the end of what it has come for.

        Where the others are is not known, nor can they go on without this rank: they are told.
        """
        if self._failure is None:
            self._give_up(f"a call was left with {error!r}")

    def _next_look(self) -> float:
        """When to be awake next; messages go on meanwhile."""
        p2p.progress()
        nap = p2p.PAUSE if p2p.under_way() else 0.5
        return min(self._deadline, time.monotonic() + nap)

    def _check_in_vain(self) -> None:
        left = {rank for rank, left in zip(self._ranks, self._left, strict=True) if left[0]}
        if gone := sorted(left.intersection(self.missing)):
            raise self._give_up(f"{_ranks(gone)} ended without coming to it")
        if time.monotonic() > self._deadline:
            raise self._fail_in_time()
        if not self.missing:  # or the deadline will tell who that is
            self._check_given_up()

    def _check_given_up(self) -> None:
        if 0 < self._gave_up[0] <= self._number:
            raise self.fail("another rank has given up on it")

    def leave(self) -> None:
        """Tells the others that this rank will not come again."""
        self._left[self.rank][0] = 1

    def free(self) -> None:
        """Gives the memory back. Collective; only where no meeting has failed."""
        _meetings.discard(self)
        self._memory.free()

    def fail(self, text: str) -> CommunicationError:
        """What to raise, where all ranks do; each later `meet` raises it again."""
        self._failure = CommunicationError(text)
        return self._failure

    def _give_up(self, text: str) -> CommunicationError:
        """As `fail`, where others may still come."""
        self._gave_up[0] = self._number
        return self.fail(text)

    def _fail_in_time(self) -> CommunicationError:
        return self._give_up(f"the timeout of {self._timeout:g} s passed without {self.whom}")

    def _exchange(self, parity: int) -> None:
        """The word of each machine's first rank becomes known on all machines."""
        if self.rank == 0:
            own = self._words[0][parity]
            request = self._nodes.leaders.Iallgather(own, self._heard[parity])
            pause = 1e-5
            while not request.Test():
                if time.monotonic() > self._deadline:
                    raise self._fail_in_time()
                time.sleep(pause)
                pause = min(2 * pause, 1e-3)
        self.barrier()

    @property
    def whom(self) -> str:
        """Whom this rank waits for, in words."""
        if self.missing:
            return _ranks(self.missing)
        if self._nodes.count > 1:
            return "ranks on other machines"
        return "a rank that came and has stopped since"

    def _who(self, purposes: list[str]) -> str:
        """`rank 0 broadcast(...); ranks 1, 2 all_reduce(...)`."""
        here, elsewhere = purposes[: self.size], purposes[self.size :]
        told = [
            f"{_ranks([r for r, p in zip(self._ranks, here, strict=True) if p == purpose])} "
            f"{purpose}"
            for purpose in dict.fromkeys(here)
        ]
        others = [purpose for purpose in dict.fromkeys(elsewhere) if purpose not in here]
        return "; ".join(told + [f"another machine's ranks {purpose}" for purpose in others])


_rank_process = os.getpid()
_meetings: "weakref.WeakSet[Meeting]" = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    """Before MPI is finalised, which waits for the other ranks: they may wait for this one."""
    if os.getpid() == _rank_process:  # and not a child that it forked
        for meeting in list(_meetings):
            meeting.leave()


def rounds_of(size: int) -> list[list[int]]:
    """How far off those are whom a rank wakes, in each round: [[1, 2, 3], [4, 8]] of 12 ranks."""
    rounds, step = [], 1
    while step < size:
        rounds.append(list(range(step, size, step))[: _WAYS - 1])
        step *= _WAYS
    return rounds


def _pair(segment: torch.Tensor, begin: int, nbytes: int) -> list[memoryview]:
    return [segment[begin + i * nbytes :][:nbytes].numpy().data for i in range(2)]


@lru_cache(maxsize=256)
def _word(purpose: str, place: str) -> bytes:
    """What a rank says; ends with a zero, so that none is the beginning of another."""
    word = f"{purpose}\n{place}\0".encode()
    if len(word) > _WORD_BYTES:  # lists of many sizes
        short = f"{purpose[:150]}... (checksum {zlib.crc32(purpose.encode()):08x})"
        word = f"{short}\n{place[:50]}\0".encode()
    return word


def _split(heard: bytes) -> list[bytes]:
    return [heard[i : i + _WORD_BYTES] for i in range(0, len(heard), _WORD_BYTES)]


def _purpose(word: bytes) -> str:
    return word.partition(b"\n")[0].decode()


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
