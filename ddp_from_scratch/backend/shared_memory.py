"""Memory that the ranks of one machine share, and POSIX semaphores in it.

A rank sleeps on a semaphore until another rank wakes it. The memory is a file without a name. MPI's
windows are not used: they are files in `/dev/shm`, which containers often keep at 64 MB, and where
one rank finds no room there, the others wait for it.
"""

import ctypes
import mmap
import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from typing import Any, Self

import numpy as np
import torch

from ddp_from_scratch.backend.transport import Transport
from ddp_from_scratch.errors import NoSharedMemory

SEMAPHORES_AVAILABLE = sys.platform.startswith("linux")  # macOS has none that live in shared memory
SEMAPHORE_NBYTES = (
    64  # at least sizeof(sem_t), and a cache line: no two ranks write to the same one
)

# Seconds of spinning before a rank sleeps. It yields the core in between. Ranks that come together
# then meet in about a microsecond, where falling asleep and waking up takes ten to fifty; a rank
# that computes was slowed by no more than these. Where others want the core, the first yield takes
# longer than that, and a sleeper gets it back sooner than one that yields.
_SPIN = 50e-6

# Without the interpreter's lock where a call may sleep, with it where it returns at once.
if (
    SEMAPHORES_AVAILABLE
):  # the module is imported everywhere, and Windows has no library without a name
    _sleeping = ctypes.CDLL(None, use_errno=True)
    _at_once = ctypes.PyDLL(None)


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class Semaphore:
    """A counter in shared memory, which one rank raises and another one waits for.

    Memory written before a `post` can be read after the wait that it ended.
    """

    def __init__(self, address: int) -> None:
        self._address = ctypes.c_void_p(address)

    def create(self) -> None:
        """Sets it to zero. Called once, by one rank, before any other touches it."""
        between_processes = 1
        if _at_once.sem_init(self._address, between_processes, 0):
            raise OSError("cannot make a semaphore in shared memory")

    def post(self) -> None:
        _at_once.sem_post(self._address)

    def spin(self) -> bool:
        """Lowers it by one if it gets above zero within 50 µs; True if it did."""
        if _at_once.sem_trywait(self._address) == 0:
            return True
        began = time.monotonic()
        while time.monotonic() < began + _SPIN:
            os.sched_yield()
            if _at_once.sem_trywait(self._address) == 0:
                return True
        return False

    def sleep(self, deadline: float) -> bool:
        """Lowers it by one as soon as it is above zero; True if it did. May give up early."""
        # The system call knows the wall clock alone, which may be set meanwhile: deadlines are not
        # far off. It also ends with a signal: Ctrl-C is heard.
        seconds = time.time() + max(deadline - time.monotonic(), 0.0)
        until = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        return int(_sleeping.sem_timedwait(self._address, ctypes.byref(until))) == 0


# Ranks that hear of one another in a round.
_WAYS = 4


class DisseminationBarrier:
    """Returns on no rank of a machine before every one has called `wait`.

    Follows Hensgen, Finkel and Manber (1988), with several ways in a round (Hoefler, Mehlan, Mietke
    and Rehm 2006): in round k rank r wakes the ranks r + 4^k, r + 2 x 4^k and r + 3 x 4^k, those
    that are less than n away, and waits for the ranks that wake it. After log4(n) rounds each has
    heard of all.

    Args:
        addresses: of each rank's semaphores, `semaphores_nbytes(size)` bytes, in this process.
        rank: creates its own semaphores; no other may `wait` before that.
    """

    def __init__(self, addresses: Sequence[int], rank: int) -> None:
        self._rounds: list[tuple[list[Semaphore], list[Semaphore]]] = []
        # One semaphore for each distance in each round: the second post of a fast rank must not
        # stand for the first of a slow one.
        places = count(0, SEMAPHORE_NBYTES)
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


def semaphores_nbytes(size: int) -> int:
    """Bytes of one rank's semaphores."""
    return sum(map(len, rounds_of(size))) * SEMAPHORE_NBYTES


def rounds_of(size: int) -> list[list[int]]:
    """Distances to the ranks that a rank wakes, by round: [[1, 2, 3], [4, 8]] of 12 ranks."""
    rounds, step = [], 1
    while step < size:
        rounds.append(list(range(step, size, step))[: _WAYS - 1])
        step *= _WAYS
    return rounds


# Tensors that outlive a call are made under it. The program may be in inference mode in that call,
# and tensors that are made there cannot be written to elsewhere.
LASTING = torch.inference_mode(False)

# Bytes of all ranks of a machine: a barrier's memory, which a group cannot do without, and more.
# Tried before the barrier is made: other machines would wait for ranks that find no room there.
_TO_MEET = 2**20


class SharedMemory:
    """A segment for each rank of a node; every rank sees all of them.

        memory  | rank 0's segment | rank 1's segment | ...
                  nbytes             nbytes, from the next page on

    Collective to make; a failure raises NoSharedMemory on all ranks. The memory is gone
    with the last process that has it, however that ends.

    Args:
        node: the ranks.
        nbytes: size of this rank's segment; may differ over ranks.

    Attributes:
        addresses: of each rank's segment, in this process.
        segments: of each rank, as flat uint8 tensors; empty for one that was taken.
    """

    @LASTING
    def __init__(self, node: Transport, nbytes: int) -> None:
        sizes = node.allgather(nbytes)
        # Each on pages of its own: a page lies near the processor that first writes to it.
        *begins, end = accumulate(
            (-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes), initial=0
        )
        memory = _map(node, max(end, mmap.PAGESIZE))
        self._arrays = [
            np.frombuffer(memory, np.uint8, size, begin)
            for size, begin in zip(sizes, begins, strict=True)
        ]
        self.addresses = [array.ctypes.data for array in self._arrays]
        self._taken: weakref.ref[np.ndarray[Any, Any]] | None = None
        self.segments = [torch.from_numpy(array) for array in self._arrays]

    @LASTING
    def take(self, rank: int) -> torch.Tensor:
        """A rank's segment, in use for as long as a tensor lies in it. Called once."""
        # The tensor alone owns the array from now on, and views of it own it, too: when the weak
        # reference dies, no tensor lies in the segment any more.
        self._taken = weakref.ref(self._arrays[rank])
        taken, self.segments[rank] = self.segments[rank], torch.empty(0, dtype=torch.uint8)
        self._arrays.clear()
        return taken

    @property
    def in_use(self) -> bool:
        return self._taken is not None and self._taken() is not None

    def free(self) -> None:
        """Unmaps it, once no tensor lies in it any more."""
        self.segments = []
        self._arrays.clear()


def can_share(node: Transport) -> bool:
    """True where these ranks can share memory, enough to meet. Collective: the same on all."""
    try:
        SharedMemory(node, _TO_MEET // node.size).free()
    except NoSharedMemory as error:
        if node.rank == 0:
            warnings.warn(f"messages take the place of shared memory: {error}", stacklevel=2)
        return False
    return True


def _map(node: Transport, nbytes: int) -> mmap.mmap:
    """Zeros that are the same memory on all ranks of the node."""
    if node.size == 1:
        try:
            return mmap.mmap(-1, nbytes)
        except (OSError, OverflowError) as error:
            raise NoSharedMemory(f"this rank cannot have {nbytes} bytes: {error}") from error
    mapped, file, found = None, -1, ("", (0, 0))
    problem = ""
    if node.rank == 0:
        try:
            file = _nameless_file(nbytes)
            found = (f"/proc/{os.getpid()}/fd/{file}", _identity(file))
        except OSError as error:
            problem = str(error)
    (path, identity), problem = node.allgather((found, problem))[0]
    if not problem:
        try:
            mapped = _map_file(path, identity, nbytes)
        except OSError as error:
            problem = str(error)
    # All ranks hear of any rank's problem, so that none waits for one that has given up. The first
    # rank's file stays open until then: the others open it by the number that it has there.
    problems = [text for text in node.allgather(problem) if text]
    if file >= 0:
        os.close(file)
    if mapped is None or problems:
        raise NoSharedMemory(
            f"the {node.size} ranks of this machine cannot share {nbytes} bytes: {problems[0]}"
        )
    return mapped


def _nameless_file(nbytes: int) -> int:
    """A descriptor of zeros in memory, or an OSError."""
    # Linux would grant more than there is, and end the process that writes to it.
    if nbytes > os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE:
        raise OSError("this machine has less memory")
    file = os.memfd_create("ddp")
    try:
        os.ftruncate(file, nbytes)
    except OSError:
        os.close(file)
        raise
    return file


def _map_file(path: str, identity: tuple[int, int], nbytes: int) -> mmap.mmap:
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if _identity(file) != identity:  # containers number their processes each from 1
            raise OSError(f"{path} is another container's")
        return mmap.mmap(file, nbytes)
    finally:
        os.close(file)


def _identity(file: int) -> tuple[int, int]:
    status = os.fstat(file)
    return status.st_dev, status.st_ino


@dataclass(frozen=True)
class Nodes:
    """A group's ranks by machine.

        machine 0   | rank 0 | rank 1 |    <- node: a row
        machine 1   | rank 2 | rank 3 |
                        ^ peers: a column

    Attributes:
        everyone: all ranks of the group.
        node: those of this machine, which share memory.
        peers: rank i of every machine that has one, where this is rank i of its own.
        count: number of machines.
    """

    everyone: Transport
    node: Transport
    peers: Transport
    count: int

    @classmethod
    def of(cls, everyone: Transport) -> Self:
        """Finds the ranks that share memory."""
        here = everyone.split_by_machine()
        # Containers on one machine may be unable to share memory: then each rank counts as one.
        shared = SEMAPHORES_AVAILABLE and can_share(here)
        node = here.split(0 if shared else here.rank)
        here.free()
        peers = everyone.split(node.rank)
        # Every machine has a first rank, so the peers of that one count the machines.
        return cls(everyone, node, peers, count=node.allgather(peers.size)[0])

    @property
    def here(self) -> "Nodes":
        """This machine's ranks, as if there were no others."""
        return Nodes(self.node, self.node, self.node, count=1)

    def free(self) -> None:
        """Frees `node` and `peers`, but not `everyone`. Collective."""
        self.node.free()
        self.peers.free()
