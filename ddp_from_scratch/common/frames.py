"""The Python stack of another thread."""

import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def stack_of(thread: int | None) -> list[FrameType]:
    """Returns the frames of the thread with this identifier, the innermost first.

    The list is empty if the thread has ended. Any thread may call it, while the other runs.
    """
    with _no_collection():
        frame = sys._current_frames().get(thread or 0)
    return list(_with_callers(frame))


# Held while garbage collection is off. A fork takes it, too, so that no child starts with it off.
_paused = threading.Lock()
os.register_at_fork(
    before=_paused.acquire,
    after_in_parent=_paused.release,
    after_in_child=_paused.release,
)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Turns garbage collection off in the block, on Python 3.11.

    There `_current_frames` holds the interpreter's lock on threads. A collection in it, whose
    finalizers wait for a thread, would deadlock the process
    (https://github.com/python/cpython/issues/106883).
    """
    with _paused:
        collects = gc.isenabled() and sys.version_info < (3, 12)
        if collects:
            gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


def _with_callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
