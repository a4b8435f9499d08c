"""The Python stack of another thread."""

import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


def stack_of(thread: int | None) -> list[FrameType]:
    """Returns the frames of the thread with this identifier, the innermost first.

    The list is empty if the thread has ended. Any thread may call it, while the other runs.
    """
    frames = []
    with _no_collection():
        frame = sys._current_frames().get(thread or 0)
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
    return frames


def local_of(frame: FrameType, name: str) -> Any:
    """Returns a local variable of a frame of another thread, or None."""
    with _no_collection():
        return frame.f_locals.get(name)


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

    There any allocation may collect, and finalizers let other threads run. Their frames may end
    while `f_back` or `f_locals` reads them, and the process crashes. `_current_frames` also holds
    the interpreter's lock on threads, so a finalizer that waits for a thread deadlocks
    (https://github.com/python/cpython/issues/106883). Later Pythons collect between instructions.
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
