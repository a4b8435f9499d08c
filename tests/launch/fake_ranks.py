"""A supervisor whose ranks are fakes, on a fake clock: nothing is started, and nothing takes time.

    job = Job(monkeypatch)
    code = job.run(Watch(["true"], [{"RANK": "0"}]), [ends(0, 7)])

Before each poll of the supervisor the next event happens; a number lets so many seconds pass, and a
tuple holds events between which the supervisor does not look.
"""

import signal
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_from_scratch.launch import going_on, other_machines, supervisor, watch
from ddp_from_scratch.launch.board import Board

LIMIT_S = 10.0  # more than any time that a supervisor waits by itself

Event = Any  # Callable[[Job], object], seconds, or a tuple of both


class Rank:
    """In the place of a process. A signal ends it, unless it ignores that one."""

    def __init__(self, clock: "Clock", environ: dict[str, str]) -> None:
        self._clock, self.environ = clock, environ
        self.pid: int | None = None
        self.code: int | None = None
        self.ignored: set[int] = {0}
        self.is_stopped = False
        self.signals: list[tuple[int, float]] = []

    def poll(self) -> int | None:
        return self.code

    def wait(self) -> int:
        assert self.code is not None, "the supervisor would wait for ever"
        return self.code

    def send_signal(self, number: int) -> None:
        assert self.code is None
        self.signals.append((int(number), self._clock.now))
        if number not in self.ignored:
            self.code = -number


class StillRuns(Exception):
    """The supervisor has not ended long after the last event."""


class Clock:
    """In the place of the module `time`."""

    def __init__(self) -> None:
        self.now = self._until = 100.0
        self.events: Iterator[float] = iter(())

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now < self._until:
            return
        delay = next(self.events, None)
        if delay is None:
            self._until = float("inf")
            raise StillRuns
        self._until = self.now + delay


class Job:
    """The ranks, the clock, and what other machines say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        self.ranks: list[Rank] = []
        self.on_start: Callable[[Job], object] = lambda job: None
        self.board: Board
        # Machine 0's store, and the link to it.
        self.store: Any
        self.link: Any
        # The supervisors of other machines, for `Watch`.
        self.elsewhere: str | None = None
        self.told: list[str] = []
        self.may_all_leave = False
        popen = SimpleNamespace(Popen=self._start, DEVNULL=None)
        for module in (watch, supervisor):
            monkeypatch.setattr(module, "subprocess", popen)
        for module in (watch, going_on, other_machines):
            monkeypatch.setattr(module, "time", self.clock)
        monkeypatch.setattr(
            watch, "_is_stopped", lambda rank: isinstance(rank, Rank) and rank.is_stopped
        )

    def _start(self, command: Sequence[str], env: dict[str, str], **_: object) -> Rank:
        self.on_start(self)
        self.ranks.append(Rank(self.clock, env))
        return self.ranks[-1]

    def run(self, supervisor: watch.Watch, events: Sequence[Event]) -> int | None:
        """The supervisor's exit code; None where it still runs after the last event."""

        def all_events() -> Iterator[float]:
            for event in events:
                if isinstance(event, float | int):
                    yield event
                    continue
                for one in event if isinstance(event, tuple) else (event,):
                    one(self)
                yield 0.0
            yield LIMIT_S

        self.clock.events = all_events()
        try:
            return supervisor.run()
        except StillRuns:
            return None

    def signals(self) -> list[list[int]]:
        """Those that each rank has got."""
        return [[number for number, _ in rank.signals] for rank in self.ranks]

    # In the place of `multi_node.Machines`.

    def may_leave(self) -> bool:
        return self.may_all_leave

    def failure(self) -> str | None:
        return self.elsewhere

    def tell_failure(self, text: str) -> None:
        self.told.append(text)


# Events -------------------------------------------------------------------------------------------


def ends(rank: int, code: int) -> Event:
    """A rank ends with this code, or of the signal -`code`."""
    return lambda job: setattr(job.ranks[rank], "code", code)


def ignores(rank: int, *numbers: int) -> Event:
    return lambda job: job.ranks[rank].ignored.update(numbers)


def is_stopped(rank: int, stopped: bool = True) -> Event:
    return lambda job: setattr(job.ranks[rank], "is_stopped", stopped)


def gets(number: int) -> Event:
    """The supervisor's own process gets a signal."""
    return lambda job: signal.raise_signal(number)


def trains(*members: int) -> Event:
    """These have come to the present generation, and have a state that 8 ranks can use."""

    def event(job: Job) -> None:
        for member in members:
            job.board.arrive(member, job.board.generation, 0)
            job.board.note_state(member, 8)

    return event


def arrives(member: int) -> Event:
    return lambda job: job.board.arrive(member, job.board.generation, -1)


def asks(member: int) -> Event:
    """For the next generation."""
    return lambda job: job.board.ask(member, job.board.generation + 1)


def fails(member: int, step: int, text: str) -> Event:
    """With an exception."""

    def event(job: Job) -> None:
        job.board.arrive(member, job.board.generation, -1)
        job.board.note_failure(member, step, text)
        job.ranks[member].code = 1

    return event


def generation(number: int, *members: int) -> Event:
    """Holds that this is the present one."""

    def event(job: Job) -> None:
        now = job.board.generation
        assert (now, job.board.members(now)) == (number, list(members))

    return event
