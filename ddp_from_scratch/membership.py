"""Membership of this process in the generations of an elastic job, each with its own group.

A group is closed without waiting for the collectives that may still run in it.
"""

import atexit
import gc
import io
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ddp_from_scratch.group import check_group, look_for_lost_ranks, wait
from ddp_from_scratch.launch.elastic import NO_STATE, FileStore, Generation, JobStore, Member
from ddp_from_scratch.launch.environment import MACHINE_0, MEMBER, RENDEZVOUS_FILE
from ddp_from_scratch.node import abandon_beside
from ddp_from_scratch.world import World, replace_group

# Seconds to connect once all have arrived; if one dies, gloo's retries take up to 5 times as long.
# Doubled after each failure, for slow machines.
_CONNECT_S = 0.5
_STORE_TIMEOUT = timedelta(seconds=10)
_POLL_S = 0.005


class Meeting(NamedTuple):
    """The state of the ranks that meet in a new generation."""

    source: int | None  # the first rank with the most finished steps; None if no rank has state
    same_state: bool  # True if all have finished the same number of steps


def _tcp_store() -> dist.TCPStore:
    # On machine 0; the agents of several machines share it.
    port = int(os.environ["MASTER_PORT"])
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_STORE_TIMEOUT)


def job_store() -> JobStore:
    """Returns the store for messages between this job's agent and its processes."""
    if MACHINE_0 in os.environ:
        return JobStore(_tcp_store())
    return JobStore(FileStore(Path(os.environ[RENDEZVOUS_FILE]).parent))


class Membership:
    """The place of this process in its job's generations (`launch/elastic.py`).

    Each process begins in a group of its own, so it can build its model without the others. At most
    `most_ranks` ranks can share a step; a collective may take `timeout` seconds.
    """

    def __init__(self, world: World, most_ranks: int, timeout: float) -> None:
        self.world, self._most_ranks = world, most_ranks
        self._timeout = timedelta(seconds=timeout)
        self.elastic = MEMBER in os.environ  # the agent replaces lost ranks; else one generation
        if self.elastic:
            self._store = job_store()
        self._number = int(os.environ.get(MEMBER, "0"))
        self._said = Member()
        self._generation = Generation()
        self._connect_s = _CONNECT_S
        self.took_over = False  # true on rank 0, but not in the first process's first group

    @property
    def in_group(self) -> bool:
        return not self.elastic or (self._generation.number > 0 and dist.is_initialized())

    @property
    def changed(self) -> bool:
        return self._generation.number > 1

    @property
    def is_over(self) -> bool:
        """True once a later generation is announced. Only rank 0 looks, and tells the others."""
        if not self.elastic or self.world.rank:
            return False
        return self._store.generation.number > self._generation.number

    def meet(self, step: int) -> Meeting:
        """Opens the group of the next generation, after `step` finished steps. Collective."""
        if dist.is_initialized():
            self.leave()
        while True:
            generation = self._arrive(step if self._said.most_ranks else NO_STATE)
            rank = generation.members.index(self._number)
            connect = timedelta(seconds=self._connect_s)
            try:
                store = self._group_store(generation)
                self.world = replace_group(self.world, store, rank, generation.machines, connect)
            except RuntimeError as error:  # a member has just died
                self._connect_s *= 2
                self.leave(error)
                self._ask_for_next(generation)
                continue
            self._connect_s = _CONNECT_S
            self._generation = generation
            assert dist.group.WORLD is not None, "it has just been opened"
            dist.group.WORLD.set_timeout(self._timeout)
            is_broken = partial(self._is_broken, generation)
            look_for_lost_ranks(is_broken)
            cut_when_broken(dist.group.WORLD, is_broken)
            steps, last = generation.steps, max(generation.steps)
            self.took_over = rank == 0 and (self._said.most_ranks > 0 or self._number > 0)
            source = None if last == NO_STATE else steps.index(last)
            return Meeting(source, same_state=source is not None and min(steps) == last)

    def note_state(self) -> None:
        """Tells the agent that this process has state with which others can continue."""
        self._say(most_ranks=self._most_ranks)

    def leave(self, error: BaseException | None = None) -> None:
        """Closes the group, so that peers that wait for this rank fail at once."""
        drop_tracebacks(error)  # the group closes with its last reference, and frames hold many
        if dist.is_initialized():
            close_default_group()

    def lose(self, error: BaseException) -> None:
        self.leave(error)
        self._ask_for_next(self._generation)

    def note_failure(self, step: int, error: BaseException) -> None:
        self._say(failure=[step, f"{type(error).__name__}: {error}"])
        if self.elastic:
            self.leave()

    def _say(self, **said: Any) -> None:
        self._said = self._said._replace(**said)
        if self.elastic:
            self._store.say(self._number, self._said)

    def _group_store(self, generation: Generation) -> dist.Store:
        number = generation.number
        if MACHINE_0 in os.environ:
            return dist.PrefixStore(f"generation {number}", _tcp_store())
        file = Path(os.environ[RENDEZVOUS_FILE]).with_name(f"store-{number}")
        return dist.FileStore(str(file), len(generation.members))

    def _is_broken(self, generation: Generation) -> bool:
        try:
            last = self._store.generation
            left = not {*generation.members} <= {*last.members}
            return last.number > generation.number and (last.begun or left)
        except (OSError, RuntimeError):  # the store is gone, and with it the job
            return True

    def _arrive(self, step: int) -> Generation:
        """Waits for all processes of the latest generation; returns it, with their steps."""
        while True:
            generation = self._store.generation
            is_new = generation.number > self._generation.number
            if not is_new or self._number not in generation.members:
                self._ask_for_next(generation)
                continue
            self._say(arrived=generation.number, step=step)
            while (last := self._store.generation).number == generation.number:
                if last.steps:
                    return last
                time.sleep(_POLL_S)

    def _ask_for_next(self, generation: Generation) -> None:
        self._say(asks=generation.number + 1)
        while self._store.generation.number <= generation.number:
            time.sleep(_POLL_S)


# How a group is closed ----------------------------------------------------------------------------

_TAG = 2**31 - 1  # no program uses this tag

_LOOK_S = 0.25
_PATIENCE_S = 1.0


def cut_when_broken(group: dist.ProcessGroup, is_broken: Callable[[], bool]) -> None:
    """Cuts a group's connections soon after a rank has left: no error tells of a lost machine."""
    known = weakref.ref(group)

    def look() -> None:
        while known() is not None and not is_broken():
            time.sleep(_LOOK_S)
        time.sleep(_PATIENCE_S)  # most ranks leave by themselves: after a step or an error
        if (left := known()) is not None and not _ends.is_set():
            _cut_connections(left)

    threading.Thread(target=look, daemon=True).start()


def close_default_group() -> None:
    """Closes the default group and its connections, so that waiting peers fail.

    The caller drops its own references to the group first. The group's threads may live until its
    timeout: gloo does not cancel every collective (`group.py`), and its destructor waits.
    """
    last = [check_group(None)]
    abandon_beside(last[0])
    dist.destroy_process_group()
    if _is_used(last):
        gc.collect()

    def close() -> None:
        _cut_connections(last[0])
        while _is_used(last):
            time.sleep(_POLL_S)
        last.clear()

    # The main thread must not drop the last reference: the destructor blocks.
    thread = threading.Thread(target=close, daemon=True)
    _closing[:] = [*(other for other in _closing if other.is_alive()), thread]
    thread.start()


def drop_tracebacks(error: BaseException | None) -> None:
    """Drops the frames of an error and its context, which hold references to groups."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


_closing: list[threading.Thread] = []  # threads that close groups
_ends = threading.Event()


@atexit.register
def _finish() -> None:
    """Waits briefly for these threads: one that returns from gloo as Python exits aborts it."""
    _ends.set()
    drop_tracebacks(getattr(sys, "last_value", None))
    sys.last_traceback = None
    until = time.monotonic() + _PATIENCE_S
    for thread in _closing:
        thread.join(max(0.0, until - time.monotonic()))


def _cut_connections(group: dist.ProcessGroup) -> None:
    """Closes all connections of a group, as a timeout in gloo does; `group.abort()` does not."""
    for peer in set(range(group.size())) - {group.rank()}:
        # No message arrives, so the timeout closes all connections; if closed, this raises at once.
        with suppress(RuntimeError):
            group.recv([torch.empty(0)], peer, _TAG).wait(timedelta(milliseconds=1))


def _is_used(last: list[dist.ProcessGroup]) -> bool:
    return sys.getrefcount(last[0]) > 2  # the list holds one reference, the argument another


def hand_on(state: Any, source: int) -> Any:
    """Returns rank `source`'s state on all ranks; ends when a rank is lost. Collective."""
    is_source = dist.get_rank() == source
    file = io.BytesIO()
    if is_source:
        torch.save(state, file)
    size = torch.tensor([file.tell()])
    wait(dist.broadcast(size, source, async_op=True))
    data = bytearray(file.getvalue()) if is_source else bytearray(int(size))
    wire = torch.frombuffer(data, dtype=torch.uint8)
    wait(dist.broadcast(wire, source, async_op=True))
    # Safe to unpickle: it comes from a rank of this run. It holds more than tensors.
    return state if is_source else torch.load(io.BytesIO(data), weights_only=False)
