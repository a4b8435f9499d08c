"""Closes a gloo group in which collectives may be under way, and waits for none of them."""

import atexit
import gc
import io
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch.group import check_group, of_member
from ddp_from_scratch.node import abandon_beside
from ddp_from_scratch.waiting import wait

# No program's own message has this one.
_TAG = 2**31 - 1

_LOOK_S = 0.25
_PATIENCE_S = 1.0
_POLL_S = 0.02


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
        if (left := known()) is not None and not _ends.is_set():
            _cut_connections(left)

    threading.Thread(target=look, daemon=True).start()


def close_default_group() -> None:
    """Closes the default group and its connections, so that peers which wait for it notice.

    The caller drops its own references to the group before. Its threads may live until its timeout:
    gloo does not break all collectives off (`waiting.py`), and its destructor waits for them.
    """
    last = [check_group(None)]
    abandon_beside(last[0])
    dist.destroy_process_group()
    if _is_used(last):
        gc.collect()
    # The main thread must not be the one that drops the last reference.
    thread = threading.Thread(target=_close, args=[last], daemon=True)
    _closing[:] = [*(other for other in _closing if other.is_alive()), thread]
    thread.start()


def drop_tracebacks(error: BaseException | None) -> None:
    """Drops the frames of an error and of those before it, with the groups that they know."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


def _close(last: list[dist.ProcessGroup]) -> None:
    _cut_connections(last[0])
    while _is_used(last):
        time.sleep(_POLL_S)
    last.clear()


# Threads that close groups.
_closing: list[threading.Thread] = []
_ends = threading.Event()


@atexit.register
def _finish() -> None:
    """Gives the threads a moment: one that comes back from gloo in a Python that ends aborts it."""
    _ends.set()
    drop_tracebacks(getattr(sys, "last_value", None))
    sys.last_traceback = None
    until = time.monotonic() + _PATIENCE_S
    for thread in _closing:
        thread.join(max(0.0, until - time.monotonic()))


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


def hand_on(state: Any, source: int) -> Any:
    """Returns the state of rank `source` of the default group; the others' is ignored. Collective.

    As `broadcast_object_list`, but its waits end when a rank is lost.
    """
    is_source = dist.get_rank() == source
    file = io.BytesIO()
    if is_source:
        torch.save(state, file)
    size = torch.tensor([file.tell()])
    wait(of_member(dist.broadcast(size, source, async_op=True)))
    data = bytearray(file.getvalue()) if is_source else bytearray(int(size))
    # Shares the memory of `data`.
    wire = torch.frombuffer(data, dtype=torch.uint8)
    wait(of_member(dist.broadcast(wire, source, async_op=True)))
    # It comes from a rank of this run, and holds more than tensors.
    return state if is_source else torch.load(io.BytesIO(data), weights_only=False)
