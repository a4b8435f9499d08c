"""POSIX semaphores in shared memory: a rank sleeps on one until another rank wakes it."""

import ctypes
import os
import sys
import time

AVAILABLE = sys.platform.startswith("linux")  # macOS has none that live in shared memory
NBYTES = 64  # at least sizeof(sem_t), and a cache line: no two ranks write to the same one

# Seconds of spinning before a rank sleeps. It yields the core in between. Ranks that come together
# then meet in about a microsecond, where falling asleep and waking up takes ten to fifty; a rank
# that computes was slowed by no more than these. Where others want the core, the first yield takes
# longer than that, and a sleeper gets it back sooner than one that yields.
_SPIN = 50e-6

# Without the interpreter's lock where a call may sleep, with it where it returns at once.
if AVAILABLE:  # the module is imported everywhere, and Windows has no library without a name
    _sleeping = ctypes.CDLL(None, use_errno=True)
    _at_once = ctypes.PyDLL(None)


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class Semaphore:
    """A counter in `NBYTES` of shared memory, which one rank raises and another one waits for.

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
