"""How a gloo group is closed whose collectives may never end."""

import atexit
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable

import torch.distributed as dist

from ddp_from_scratch.common.group import check_group, cut_connections
from ddp_from_scratch.node import abandon_beside

_LOOK_S = 0.25
_PATIENCE_S = 1.0


def abort_on_lost_rank(group: dist.ProcessGroup, is_broken: Callable[[], bool]) -> None:
    """Cuts a group's connections soon after a rank has left: no error tells of a lost machine."""
    known = weakref.ref(group)

    def look() -> None:
        while known() is not None and not is_broken():
            time.sleep(_LOOK_S)
        time.sleep(_PATIENCE_S)  # most ranks leave by themselves: after a step or an error
        if (left := known()) is not None and not _ends.is_set():
            cut_connections(left)

    _start(look)


def close_default_group() -> None:
    """Closes the default group and its connections, so that waiting peers fail.

    The caller drops its own references to the group first. The group's threads may live until its
    timeout: gloo does not cancel every collective (`common/group.py`), and its destructor waits.
    """
    last = [check_group(None)]
    abandon_beside(last[0])
    dist.destroy_process_group()
    if _is_used(last):
        gc.collect()

    def close() -> None:
        cut_connections(last[0])
        while _is_used(last):
            time.sleep(5e-3)
        last.clear()

    # The main thread must not drop the last reference: the destructor blocks.
    _closing[:] = [*(other for other in _closing if other.is_alive()), _start(close)]


def clear_tracebacks(error: BaseException | None) -> None:
    """Drops the frames of an error and its context, which hold references to groups."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


_closing: list[threading.Thread] = []  # threads that close groups
_ends = threading.Event()


def _start(function: Callable[[], None]) -> threading.Thread:
    atexit.unregister(_finish)  # the last that is registered runs first
    atexit.register(_finish)
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def _finish() -> None:
    """Waits briefly for these threads: one that returns from gloo as Python exits aborts it."""
    _ends.set()
    clear_tracebacks(getattr(sys, "last_value", None))
    sys.last_traceback = None
    until = time.monotonic() + _PATIENCE_S
    for thread in _closing:
        thread.join(max(0.0, until - time.monotonic()))


def _is_used(last: list[dist.ProcessGroup]) -> bool:
    return sys.getrefcount(last[0]) > 2  # the list holds one reference, the argument another
