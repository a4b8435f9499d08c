"""The Python stack of another thread."""

import gc
import sys
import threading
from collections.abc import Iterator
from types import FrameType

_looking = threading.Lock()  # one thread at a time may pause garbage collection


def stack_of(thread: int | None) -> list[FrameType]:
    """Returns the frames of the thread with this identifier, the innermost first.

    The list is empty if the thread has ended. Any thread may call it, while the other runs.
    """
    # Before Python 3.12, `_current_frames` holds the interpreter's lock on threads. A garbage
    # collection in it, whose finalizers wait for a thread, would deadlock the process
    # (https://github.com/python/cpython/issues/106883).
    with _looking:
        collects = gc.isenabled()
        gc.disable()
        try:
            frame = sys._current_frames().get(thread or 0)
        finally:
            if collects:
                gc.enable()
    return list(_with_callers(frame))


def _with_callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
