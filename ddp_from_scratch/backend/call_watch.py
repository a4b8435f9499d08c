"""A thread that ends a wait in which ranks have called different collectives.

gloo waits for a collective that another rank does not call until the group's timeout, by default
half an hour. So does an average in shared memory (`barrier.py`) while a rank is in gloo. If the
main thread has been in one place for `_STILL_S`, the thread publishes the rank's position
(`calls.py`) to the store that opened the group, and compares it with those of other ranks. A rank
that is merely late has called nothing that the others have not, so it never raises.

A rank that makes progress costs a look each second: two numbers and the main thread's stack.
"""

import atexit
import ctypes
import json
import os
import threading
import time
import weakref
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch.backend.calls import AVERAGES, BlockingCall, Position, blocked, find_mismatch
from ddp_from_scratch.backend.process_group import SharedMemoryGroup
from ddp_from_scratch.common.errors import CommunicationError
from ddp_from_scratch.common.group import cut_connections, may_be_in_flight
from ddp_from_scratch.common.log import logger

NAME = "ddp call watch"
_LOOK_EVERY_S = 1.0
_STILL_S = 4.0
_SURE_S = 1.5  # a mismatch counts if it lasts this long; also before connections are cut
_FOUND = "mismatch"

_CPU = torch.device("cpu")


def sequence_number(group: dist.ProcessGroup) -> int | None:
    """Counts the group's calls, messages too; None if torch does not count them."""
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except RuntimeError:  # of several backends
        return None


def watch(group: dist.ProcessGroup, averages: SharedMemoryGroup | None = None) -> None:
    """Watches a gloo group, and the node group beside it. Idempotent. All ranks call it."""
    # An elastic job would repeat the step, and call the same collectives again.
    elsewhere = isinstance(group, SharedMemoryGroup) or _CPU not in group._device_types
    if elsewhere or group.size() == 1 or may_be_in_flight():
        return
    if group._get_backend(_CPU).name() != "gloo" or sequence_number(group) is None:
        return
    if group not in _watched:
        _watched[group] = _Watched(group)
    if averages is not None:
        _watched[group].averages = weakref.ref(averages)
    _start()


class _Watched:
    """A group and this rank's position in it. Its references are weak, as gloo's threads stay."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = weakref.ref(group)
        self.averages: weakref.ref[SharedMemoryGroup] | None = None
        self.name = str(group.group_name)
        self.ranks = dist.get_process_group_ranks(group)
        self._rank = str(dist.get_rank())
        self._is_listed = group in dist.distributed_c10d._world.pg_names
        store = dist.distributed_c10d._get_process_group_store(group)
        # A program may close the groups and open others of the same names through one store.
        _opened[self.name] += 1
        self._store = dist.PrefixStore(f"ddp calls {_opened[self.name]}", store)
        self._before: tuple[object, ...] = ()
        self._since = 0.0
        self._published = False
        self._suspected, self._suspected_at = "", 0.0
        self.found, self._found_at = "", 0.0  # the mismatch

    def is_closed(self, group: dist.ProcessGroup) -> bool:
        """True if the program has destroyed the group, which something may still hold."""
        return self._is_listed and group not in dist.distributed_c10d._world.pg_names

    def look(self, group: dist.ProcessGroup, block: BlockingCall | None) -> None:
        """Notes progress; compares with the other ranks if there was none. Raises RuntimeError."""
        now = time.monotonic()
        beside = self.averages() if self.averages is not None else None
        under_way = "" if beside is None else beside.checked_barrier.under_way
        count = 0 if beside is None else beside.calls
        place = None if block is None else block.function  # not the block, which has a group
        state = (sequence_number(group), count, under_way, place)
        if state != self._before:
            self._before, self._since = state, now
            if self._published:
                self._store.set(self._rank, "")
                self._published = False
            return
        if now < self._since + _STILL_S:
            return
        if not self._published:
            names = dist.distributed_c10d._world.pg_names
            numbers = [*map(sequence_number, names)]
            averages = {} if beside is None else {AVERAGES + self.name: count}
            position = Position.of(block, [*map(str, names.values())], averages, under_way)
            # If this rank has called something meanwhile, what was read first is out of date.
            if [*map(sequence_number, names)] != numbers or blocked() != block:
                return
            if beside is not None and beside.calls != count:
                return
            self._store.set(self._rank, json.dumps(asdict(position)))
            self._published = True
        if not self._store.check([_FOUND]):
            self._compare(now)
        if self._store.check([_FOUND]):
            self.found, self._found_at = self._store.get(_FOUND).decode(), now

    def _compare(self, now: float) -> None:
        positions = {}
        for rank in self.ranks:
            if self._store.check([str(rank)]) and (text := self._store.get(str(rank))):
                positions[rank] = Position(**json.loads(text))
        found = find_mismatch(positions)
        if found != self._suspected:
            # A rank may have moved on since it published.
            self._suspected, self._suspected_at = found, now
        elif found and now > self._suspected_at + _SURE_S:
            self._store.set(_FOUND, found)

    def end(self, group: dist.ProcessGroup, block: BlockingCall | None) -> None:
        """Makes this rank's calls fail: those in shared memory, then those of gloo."""
        if (beside := self.averages() if self.averages is not None else None) is not None:
            beside.checked_barrier.end(self.found)
        in_gloo = block is not None and not block.ours
        if block is not None and block.raises:
            _raise_in_main_thread(self.found)
        elif in_gloo or beside is None or not beside.checked_barrier.under_way:
            logger.error(f"rank {self._rank}: {self.found}")
        time.sleep(_SURE_S)  # every rank learns of it before its gloo calls fail
        cut_connections(group)
        if block is not None and block.group is not None and block.group is not group:
            cut_connections(block.group)


def _raise_in_main_thread(text: str) -> None:
    """Raises a CommunicationError in the main thread once its call in gloo fails."""

    class Mismatch(CommunicationError):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*(arguments or (text,)))

    # Python takes a class. It is raised in torch's handler of gloo's own error, which names a
    # closed connection and follows as the context.
    Mismatch.__name__ = Mismatch.__qualname__ = CommunicationError.__name__
    Mismatch.__module__ = CommunicationError.__module__
    ident = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(Mismatch))


_watched = weakref.WeakKeyDictionary[dist.ProcessGroup, _Watched]()
_opened = Counter[str]()
_stop = threading.Event()
_threads: dict[int, threading.Thread] = {}  # by process: a forked child has none


def _start() -> None:
    thread = _threads.get(os.getpid())
    if thread is None or not thread.is_alive():
        _stop.clear()
        thread = threading.Thread(target=_run, name=NAME, daemon=True)
        _threads[os.getpid()] = thread
        thread.start()
        atexit.unregister(_end)
        atexit.register(_end)


def _end() -> None:
    """Ends the thread: one inside torch as Python exits would abort the process."""
    _stop.set()
    if (thread := _threads.get(os.getpid())) is not None:
        thread.join(1.0)


def _run() -> None:
    while not _stop.wait(_LOOK_EVERY_S):
        for one in list(_watched.values()):
            _look(one)


def _look(one: _Watched) -> None:
    group = one.group()
    if group is None:
        return
    if one.is_closed(group):
        _watched.pop(group, None)
        return
    with suppress(RuntimeError, ValueError):  # the group or its store has been closed
        block = blocked()
        one.look(group, block)
        if one.found:
            _watched.pop(group, None)
            one.end(group, block)
