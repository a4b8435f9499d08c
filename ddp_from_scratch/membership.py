"""This process among others that come and go: each generation of ranks has a group of its own.

A group is closed while collectives may be under way in it, and waits for none of them.
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

from ddp_from_scratch.group import check_group, of_member
from ddp_from_scratch.launch.elastic import NO_STATE, FileStore, Generation, JobStore, Member
from ddp_from_scratch.launch.environment import MACHINE_0, MEMBER, RENDEZVOUS_FILE
from ddp_from_scratch.node import abandon_beside
from ddp_from_scratch.waiting import look_for_lost_ranks, wait
from ddp_from_scratch.world import World, replace_group

# Seconds that ranks which have all arrived may take to connect. One that dies meanwhile costs the
# others up to 5 times as much: gloo tries so often. Doubled after each failure, for slow machines.
_CONNECT_S = 0.5
_STORE_TIMEOUT = timedelta(seconds=10)
_POLL_S = 0.005


class Meeting(NamedTuple):
    """What the ranks of a new generation bring."""

    source: int | None  # the first rank that has finished the most steps; None if none has a state
    alike: bool  # all have finished as many, and so have the same state


def tcp_store() -> dist.TCPStore:
    """A connection to the store of several machines' agents, on machine 0."""
    port = int(os.environ["MASTER_PORT"])
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_STORE_TIMEOUT)


def job_store() -> JobStore:
    """Where agent and processes of this process's job leave word for each other."""
    if MACHINE_0 in os.environ:
        return JobStore(tcp_store())
    return JobStore(FileStore(Path(os.environ[RENDEZVOUS_FILE]).parent))


class Membership:
    """The place of this process in its job's generations (`launch/elastic.py`).

    Each process begins in a group of its own, so that it can build its model without the others.
    At most `most_ranks` can share a step, and a collective may take `timeout` seconds.

    Attributes:
        world: the present one.
        elastic: True if the job's agent replaces lost ranks; else there is one generation, which
            has been there from the start.
        took_over: True if this rank 0 came after another one.
    """

    def __init__(self, world: World, most_ranks: int, timeout: float) -> None:
        self.world, self._most_ranks = world, most_ranks
        self._timeout = timedelta(seconds=timeout)
        self.elastic = MEMBER in os.environ
        if self.elastic:
            self._store = job_store()
        self._number = int(os.environ.get(MEMBER, "0"))
        self._said = Member()
        self._generation = Generation()
        self._connect_s = _CONNECT_S
        self.took_over = False

    @property
    def in_group(self) -> bool:
        """True while this process is in a generation's group."""
        return not self.elastic or (self._generation.number > 0 and dist.is_initialized())

    @property
    def changed(self) -> bool:
        """True once a generation has followed upon another."""
        return self._generation.number > 1

    @property
    def is_over(self) -> bool:
        """True once a later generation was announced: somebody was lost, or wants to join.

        Rank 0 alone looks: in each step it tells the others.
        """
        if not self.elastic or self.world.rank:
            return False
        return self._store.generation.number > self._generation.number

    def meet(self, step: int) -> Meeting:
        """Opens the next generation's group, with `step` steps behind this process. Collective.

        Processes keep their order: rank 0 stays rank 0 as long as it lives.
        """
        if dist.is_initialized():
            self.leave()
        while True:
            generation, steps = self._arrive(step if self._said.most_ranks else NO_STATE)
            rank = generation.members.index(self._number)
            connect = timedelta(seconds=self._connect_s)
            try:
                store = self._group_store(generation)
                self.world = replace_group(self.world, store, rank, generation.machines, connect)
            except RuntimeError as error:  # one of them died just now
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
            last = max(steps)
            self.took_over = rank == 0 and (self._said.most_ranks > 0 or self._number > 0)
            source = None if last == NO_STATE else steps.index(last)
            return Meeting(source, alike=source is not None and min(steps) == last)

    def note_state(self) -> None:
        """Notes that this process has the state of its step, with which others may continue."""
        self._say(most_ranks=self._most_ranks)

    def leave(self, error: BaseException | None = None) -> None:
        """Closes the group, so that peers that wait for this rank notice at once."""
        # The group ends with the last reference to it, and the frames of an error have many.
        drop_tracebacks(error)
        if dist.is_initialized():
            close_default_group()

    def lose(self, error: BaseException) -> None:
        """Leaves the group after a communication error, and asks for another one."""
        self.leave(error)
        self._ask_for_next(self._generation)

    def note_failure(self, step: int, error: BaseException) -> None:
        """Leaves the group, and a note of the exception that ends this process."""
        self._say(failure=[step, f"{type(error).__name__}: {error}"])
        if self.elastic:
            self.leave()

    def _say(self, **said: Any) -> None:
        self._said = self._said._replace(**said)
        if self.elastic:
            self._store.say(self._number, self._said)

    def _group_store(self, generation: Generation) -> dist.Store:
        """A new store, of a generation's members alone."""
        number = generation.number
        if MACHINE_0 in os.environ:
            return dist.PrefixStore(f"generation {number}", tcp_store())
        file = Path(os.environ[RENDEZVOUS_FILE]).with_name(f"store-{number}")
        return dist.FileStore(str(file), len(generation.members))

    def _is_broken(self, generation: Generation) -> bool:
        """True once a rank of a generation has left its group."""
        try:
            last = self._store.generation
            return last.number > generation.number and any(
                member not in last.members or self._store.member(member).arrived > generation.number
                for member in generation.members
            )
        except (OSError, RuntimeError):  # the store has gone, and with it the job
            return True

    def _arrive(self, step: int) -> tuple[Generation, list[int]]:
        """Waits for all processes of the last generation; returns it and their steps."""
        while True:
            generation = self._store.generation
            is_new = generation.number > self._generation.number
            if not is_new or self._number not in generation.members:
                self._ask_for_next(generation)
                continue
            self._say(arrived=generation.number, step=step)
            while self._store.generation.number == generation.number:
                said = [self._store.member(member) for member in generation.members]
                if all(member.arrived == generation.number for member in said):
                    # Equal on all, since no step changes after its process has arrived.
                    return generation, [member.step for member in said]
                time.sleep(_POLL_S)

    def _ask_for_next(self, generation: Generation) -> None:
        """Waits for a generation after this one, and has it announced where needed."""
        self._say(asks=generation.number + 1)
        while self._store.generation.number <= generation.number:
            time.sleep(_POLL_S)


# How a group is closed ----------------------------------------------------------------------------

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

    def close() -> None:
        _cut_connections(last[0])
        while _is_used(last):
            time.sleep(_POLL_S)
        last.clear()

    # The main thread must not be the one that drops the last reference.
    thread = threading.Thread(target=close, daemon=True)
    _closing[:] = [*(other for other in _closing if other.is_alive()), thread]
    thread.start()


def drop_tracebacks(error: BaseException | None) -> None:
    """Drops the frames of an error and of those before it, with the groups that they know."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


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
