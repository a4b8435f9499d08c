"""Memory that the ranks of one machine share, and POSIX semaphores in it.

The memory is an unnamed file. MPI windows would be files in `/dev/shm`, which containers often
limit to 64 MB, and a rank that found no room there would leave the others waiting.
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
from ddp_from_scratch.common.errors import NoSharedMemory

SEMAPHORES_AVAILABLE = sys.platform.startswith("linux")  # macOS has none in shared memory
SEMAPHORE_NBYTES = 64  # at least sizeof(sem_t), and a cache line, so no two ranks share one

# Seconds for which a rank spins, yielding the core, before it sleeps. Ranks that arrive together
# meet in about a microsecond, while falling asleep and waking up takes ten to fifty; a rank that
# computes loses no more. If others want the core, the first yield already takes longer than this,
# and a sleeping rank gets the core back sooner than a yielding one.
_SPIN = 50e-6

# Calls that may sleep release the GIL; the others keep it. Windows cannot load `None`.
if SEMAPHORES_AVAILABLE:
    _sleeping = ctypes.CDLL(None, use_errno=True)
    _at_once = ctypes.PyDLL(None)


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


def _spin(semaphore: ctypes.c_void_p) -> bool:
    """Decrements the counter if it gets above zero within 50 µs; True if it did."""
    if _at_once.sem_trywait(semaphore) == 0:
        return True
    began = time.monotonic()
    while time.monotonic() < began + _SPIN:
        os.sched_yield()
        if _at_once.sem_trywait(semaphore) == 0:
            return True
    return False


def _sleep(semaphore: ctypes.c_void_p, deadline: float) -> bool:
    """Decrements the counter once it is above zero; True if it did. May return early."""
    # The call takes wall-clock time, which may be set: deadlines are short. A signal ends it.
    seconds = time.time() + max(deadline - time.monotonic(), 0.0)
    until = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    return int(_sleeping.sem_timedwait(semaphore, ctypes.byref(until))) == 0


_WAYS = 4  # ranks that learn of one another in a round


class DisseminationBarrier:
    """A barrier of a machine's ranks, made of semaphores, which also order their memory.

    The algorithm is that of Hensgen, Finkel and Manber (1988) with several ways per round (Hoefler,
    Mehlan, Mietke and Rehm 2006): in round k rank r wakes ranks r + 4^k, r + 2 x 4^k and
    r + 3 x 4^k, where the distance is less than n, and waits for the ranks that wake it. After
    log4(n) rounds every rank knows that all have arrived.

    Each rank makes its own `semaphores_nbytes(size)` at `addresses[rank]`, before any may `wait`.
    """

    def __init__(self, addresses: Sequence[int], rank: int) -> None:
        self._rounds: list[tuple[list[ctypes.c_void_p], list[ctypes.c_void_p]]] = []
        # One for each distance and round, so a fast rank's post is not taken for a slow one's.
        places = count(0, SEMAPHORE_NBYTES)
        for distances in rounds_of(len(addresses)):
            wakes, waits = [], []
            for distance, place in zip(distances, places, strict=False):
                other = (rank + distance) % len(addresses)
                wakes.append(ctypes.c_void_p(addresses[other] + place))
                waits.append(ctypes.c_void_p(addresses[rank] + place))
                between_processes = 1
                if _at_once.sem_init(waits[-1], between_processes, 0):
                    raise OSError("cannot make a semaphore in shared memory")
            self._rounds.append((wakes, waits))

    def wait(self, next_check: Callable[[], float], check: Callable[[], None]) -> None:
        """Sleeps until every rank has called it, and runs `check`, which may raise, in between."""
        for wakes, waits in self._rounds:
            for other in wakes:
                _at_once.sem_post(other)
            for own in waits:
                while not (_spin(own) or _sleep(own, next_check())):
                    check()


def semaphores_nbytes(size: int) -> int:
    """Bytes of one rank's semaphores."""
    return sum(map(len, rounds_of(size))) * SEMAPHORE_NBYTES


def rounds_of(size: int) -> list[list[int]]:
    """By round, distances to the ranks that a rank wakes: [[1, 2, 3], [4, 8]] for 12 ranks."""
    rounds, step = [], 1
    while step < size:
        rounds.append(list(range(step, size, step))[: _WAYS - 1])
        step *= _WAYS
    return rounds


# For tensors that outlive a call: outside of inference mode, nobody may write to one made in it.
LASTING = torch.inference_mode(False)

# Bytes, more than a barrier needs. A group tries to map them before others would wait for it.
_TO_MEET = 2**20


class SharedMemory:
    """Shared memory with a segment for each rank of a node, which every rank of it can access.

        memory  | rank 0's segment | rank 1's segment | ...
                  nbytes             nbytes, from the next page on

    The constructor is collective; a failure raises NoSharedMemory on all ranks. The memory is freed
    with the last process that maps it, however that process ends.

    By rank, `addresses` is where its segment lies in this process, and `segments` a flat uint8
    tensor, empty for a segment that was taken. Their sizes may differ.
    """

    @LASTING
    def __init__(self, node: Transport, nbytes: int) -> None:
        sizes = node.allgather(nbytes)
        # Segments share no page, since a page lies near the processor that first writes to it.
        whole_pages = (-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes)
        *begins, end = accumulate(whole_pages, initial=0)
        memory = _map(node, max(end, mmap.PAGESIZE))
        places = zip(sizes, begins, strict=True)
        self._arrays = [np.frombuffer(memory, np.uint8, size, begin) for size, begin in places]
        self.addresses: list[int] = [array.ctypes.data for array in self._arrays]
        self._taken: weakref.ref[np.ndarray[Any, Any]] | None = None
        self.segments: list[torch.Tensor] = [torch.from_numpy(array) for array in self._arrays]

    @LASTING
    def take(self, rank: int) -> torch.Tensor:
        """Returns a rank's segment, which is in use while a tensor lies in it. Called once."""
        self._taken = weakref.ref(self._arrays[rank])
        taken, self.segments[rank] = (
            self.segments[rank],
            torch.empty(0, dtype=torch.uint8, device="cpu"),
        )
        self._arrays.clear()  # only the tensor and its views own the array from now on
        return taken

    @property
    def in_use(self) -> bool:
        return self._taken is not None and self._taken() is not None

    def free(self) -> None:
        """Unmaps the memory once no tensor lies in it any more."""
        self.segments = []
        self._arrays.clear()


def _map(node: Transport, nbytes: int) -> mmap.mmap:
    if node.size == 1:
        try:
            return mmap.mmap(-1, nbytes)
        except (OSError, OverflowError) as error:
            raise NoSharedMemory(f"this rank cannot have {nbytes} bytes: {error}") from error
    mapped, file, found, problem = None, -1, ("", (0, 0)), ""
    try:
        if node.rank == 0:
            file = _nameless_file(nbytes)
            found = (f"/proc/{os.getpid()}/fd/{file}", _identity(file))
    except OSError as error:
        problem = str(error)
    (path, identity), problem = node.allgather((found, problem))[0]
    try:
        if not problem:
            mapped = _map_file(path, identity, nbytes)
    except OSError as error:
        problem = str(error)
    # All ranks learn of any rank's problem. Until then the others open the file by its descriptor.
    problems = [text for text in node.allgather(problem) if text]
    if file >= 0:
        os.close(file)
    if mapped is None or problems:
        raise NoSharedMemory(
            f"the {node.size} ranks of this machine cannot share {nbytes} bytes: {problems[0]}"
        )
    return mapped


def _nameless_file(nbytes: int) -> int:
    # Linux would grant more memory than there is, and then kill a process that writes to it.
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
        if _identity(file) != identity:  # each container numbers its processes from 1
            raise OSError(f"{path} is another container's")
        return mmap.mmap(file, nbytes)
    finally:
        os.close(file)


def _identity(file: int) -> tuple[int, int]:
    status = os.fstat(file)
    return status.st_dev, status.st_ino


@dataclass(frozen=True)
class Topology:
    """A group's ranks by machine.

    machine 0   | rank 0 | rank 1 |    <- intra_node: a row
    machine 1   | rank 2 | rank 3 |
                    ^ inter_node: a column

    Attributes:
        world: all ranks of the group.
        intra_node: this machine's ranks, which share memory.
        inter_node: rank i of each machine with more than i ranks, if this is rank i of its own.
        count: the number of machines.
    """

    world: Transport
    intra_node: Transport
    inter_node: Transport
    count: int

    @classmethod
    def of(cls, world: Transport) -> Self:
        """Finds the ranks that share memory. Collective."""
        here, shared = world.split_by_machine(), SEMAPHORES_AVAILABLE
        try:
            if shared:
                SharedMemory(here, _TO_MEET // here.size).free()
        except NoSharedMemory as error:
            shared = False
            if here.rank == 0:
                warnings.warn(f"messages take the place of shared memory: {error}", stacklevel=2)
        node = here.split(0 if shared else here.rank)  # else each rank counts as a machine
        here.free()
        column = world.split(node.rank)
        # Every machine has a first rank, whose column has as many ranks as there are machines.
        return cls(world, node, column, count=node.allgather(column.size)[0])

    def free(self) -> None:
        """Frees `intra_node` and `inter_node`, but not `world`. Collective."""
        self.intra_node.free()
        self.inter_node.free()
