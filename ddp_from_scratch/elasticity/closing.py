"""Closes a gloo group in which collectives may be under way, and waits for none of them."""

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from ddp_from_scratch.group import check_group

# No program's own message has this one.
_TAG = 2**31 - 1

_LOOK_S = 0.25
_PATIENCE_S = 1.0


def cut_when_broken(group: dist.ProcessGroup, is_broken: Callable[[], bool]) -> None:
    """Cuts a group's connections in a while, once `is_broken` says that a rank has left it.

    For a rank that waits for one whose machine is gone: nothing tells it that the connection is.
    """
    known = weakref.ref(group)

    def look() -> None:
        while known() is not None and not is_broken():
            time.sleep(_LOOK_S)
        # Most ranks leave by themselves: at the end of a step, or by an error.
        time.sleep(_PATIENCE_S)
        if (left := known()) is not None:
            _cut_connections(left)

    threading.Thread(target=look, daemon=True).start()


def close_default_group() -> None:
    """Closes the default group and its connections, so that peers which wait for it notice.

    The caller drops its own references to the group before. Its threads may live until its timeout:
    gloo does not break all collectives off (`waiting.py`), and its destructor waits for them.
    """
    last = [check_group(None)]
    dist.destroy_process_group()
    if _is_used(last):
        gc.collect()
    # The main thread must not be the one that drops the last reference.
    threading.Thread(target=_close, args=[last], daemon=True).start()


def _close(last: list[dist.ProcessGroup]) -> None:
    _cut_connections(last[0])
    while _is_used(last):
        time.sleep(0.1)
    last.clear()


def _cut_connections(group: dist.ProcessGroup) -> None:
    """Closes all connections of a group, as gloo does when a collective takes longer than it may.

    `group.abort()` leaves them open.
    """
    for peer in set(range(group.size())) - {group.rank()}:
        # Nothing comes, so this closes them all, also those of other peers. It raises at once where
        # the peer's is closed.
        with suppress(RuntimeError):
            group.recv([torch.empty(0)], peer, _TAG).wait(timedelta(milliseconds=1))


def _is_used(last: list[dist.ProcessGroup]) -> bool:
    # One is the list's, one the argument's.
    return sys.getrefcount(last[0]) > 2
