"""A job that goes on, on several machines: machine 0 decides, the supervisors of others obey.

    machine 0                          through its store                    machine 1
                  <-- "arrival 1": who it is; "answer 1": "" or why not --> arrive
    GoingOnWatch  -- "job": orders, generation, words of all processes -->  Follower
                  <-- "report 1": exit codes, words of its processes -----

Each supervisor that comes has a ticket, which is in its keys: the second one of a machine gets none
of the orders for the first.

A machine that does not answer for `LOST_S` is lost with its ranks; so is machine 0 for the others,
which then end theirs. So never do two halves of a job go on side by side. No rank is started on a
lost machine. When it answers again, or its supervisor is started again, it gets as many as before.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddp_from_scratch.errors import UsageError
from ddp_from_scratch.launch.board import Board
from ddp_from_scratch.launch.watch import Child, Watch, kill_stopped, say

if TYPE_CHECKING:
    import torch.distributed as dist

LOST_S = 5.0
_EXCHANGE_S = 0.02
_SAY_AFTER_S = 1.0


class FarMachine:
    """Another machine, as its supervisor there reports of it.

    Attributes:
        ticket: its supervisor's; None until it has come.
        orders: for its supervisor.
        ranks: its processes, by number.
        beat: its supervisor's last sign of life.
        since: when that came.
        signals: how many its supervisor has got.
        lost: True while it does not answer.
        ended: True once it has noticed the job's end.
    """

    def __init__(self, now: float, ticket: int | None = None) -> None:
        self.ticket, self.since = ticket, now
        self.orders: list[tuple[str, int, int]] = []
        self.ranks: dict[int, FarRank] = {}
        self.beat = self.signals = 0
        self.lost = self.ended = False

    def is_heard(self, now: float) -> bool:
        """True while its supervisor answers."""
        return self.ticket is not None and now - self.since <= LOST_S

    def order(self, kind: str, member: int, argument: int) -> None:
        """Has something done there."""
        self.orders.append((kind, member, argument))


class FarRank:
    """A rank on another machine."""

    def __init__(self, machine: FarMachine, member: int, exchange: Callable[[], None]) -> None:
        self._machine, self._member, self._exchange = machine, member, exchange
        self.code: int | None = None
        # No process of this machine.
        self.pid = None

    def poll(self) -> int | None:
        """Returns its exit code; None while it runs."""
        self._exchange()
        return self.code

    def wait(self) -> int:
        """Waits for its end, or until its machine is lost; returns the exit code."""
        while (code := self.poll()) is None and not self._machine.lost:
            time.sleep(_EXCHANGE_S)
        return -signal.SIGKILL if code is None else code

    def send_signal(self, number: int) -> None:
        """Has the signal sent."""
        if self._machine.ticket is None:
            # Nobody has started it yet.
            self.code = -number
        self._machine.order("signal", self._member, number)


class OtherMachines:
    """Machine 0's view of the others.

    Args:
        store: that all reach.
        counts: ranks of each machine.
        asked: the options that must be alike on all, by name.
        board: machine 0's.
        on_signal: gets the number of each signal that stops a supervisor elsewhere.
        on_join: gets the number and the count of ranks of a machine that comes later, or again, and
            starts them; returns why not, or None.
        timeout: seconds that a machine may take to come.
    """

    def __init__(
        self,
        store: "dist.Store",
        counts: Sequence[int],
        asked: Mapping[str, str],
        board: Board,
        on_signal: Callable[[int], None],
        on_join: Callable[[int, int], str | None],
        timeout: float,
    ) -> None:
        self._store, self._board, self._on_signal = store, board, on_signal
        self._counts, self._asked, self._on_join = list(counts), asked, on_join
        self._timeout, self._at_start = timeout, len(counts)
        now = time.monotonic()
        self._machines = {node: FarMachine(now) for node in range(1, len(counts))}
        # Supervisors that were not answered, by ticket: what they say, and since when.
        self._waiting: dict[int, tuple[dict[str, Any], float]] = {}
        self._drawn, self._unread = 0, set[int]()
        self._end: int | None = None
        self._exchanged = 0.0

    @property
    def lost(self) -> set[int]:
        """The machines that do not answer."""
        return {node for node, machine in self._machines.items() if machine.lost}

    def start(self, node: int, member: int) -> FarRank:
        """Has a rank started."""
        machine = self._machines[node]
        machine.ranks[member] = FarRank(machine, member, self.exchange)
        machine.order("start", member, 0)
        return machine.ranks[member]

    def exchange(self) -> None:
        """Reads all reports and writes the job's state, fifty times a second at most."""
        now = time.monotonic()
        if now - self._exchanged < _EXCHANGE_S:
            return
        self._exchanged = now
        for node, machine in self._machines.items():
            key = f"report {machine.ticket}"
            if machine.ticket is not None and self._store.check([key]):
                self._read(machine, json.loads(self._store.get(key)), now)
            may_take = self._timeout if machine.ticket is None else LOST_S
            if not machine.lost and now - machine.since > may_take:
                self._lose(node, machine, now - machine.since)
        self._write()

    def admit(self, has_begun: bool) -> None:
        """Lets the machines in that have come, or says why not.

        Those that were not there at the start wait until the job has begun: it then knows how many
        ranks it can use.
        """
        now = time.monotonic()
        for node, machine in self._machines.items():
            if machine.lost and has_begun and machine.is_heard(now):
                machine.lost = False
                text = self._on_join(node, self._counts[node])
                say(f"machine {node} answers again{': ' if text else ''}{text or ''}")
        answers: dict[int, str] = {}
        for ticket, (arrival, since) in self._arrivals(now).items():
            is_late = now - since > LOST_S + 1
            text = self._answer(ticket, arrival, now, is_late, has_begun)
            if text is not None:
                del self._waiting[ticket]
                answers[ticket] = text
        if answers:
            # First: one that is let in looks there for its orders.
            self._write()
        for ticket, text in answers.items():
            self._store.set(f"answer {ticket}", text)

    def end(self, code: int) -> None:
        """Tells the machines that the job has ended, and waits until they have noticed."""
        self._end = code
        until = time.monotonic() + LOST_S
        while (now := time.monotonic()) <= until:
            if not any(m.is_heard(now) and not m.ended for m in self._machines.values()):
                return
            self.exchange()
            time.sleep(_EXCHANGE_S)

    def _arrivals(self, now: float) -> dict[int, tuple[dict[str, Any], float]]:
        """The supervisors that wait for an answer, by ticket; a copy."""
        drawn = self._store.add("tickets", 0)
        self._unread |= set(range(self._drawn + 1, drawn + 1))
        self._drawn = drawn
        for ticket in sorted(self._unread):
            # One that was stopped between the two calls of `arrive` has left a ticket alone.
            if self._store.check([f"arrival {ticket}"]):
                self._unread.remove(ticket)
                self._waiting[ticket] = json.loads(self._store.get(f"arrival {ticket}")), now
        return dict(self._waiting)

    def _answer(
        self, ticket: int, arrival: Mapping[str, Any], now: float, is_late: bool, has_begun: bool
    ) -> str | None:
        """Lets a supervisor in and returns "", or why it cannot come; None while it has to wait."""
        node, counts = arrival["node"], arrival["counts"]
        machine = self._machines.get(node)
        refusal = self._refusal(node, counts, arrival["asked"])
        if refusal is not None:
            return refusal
        if node > len(self._counts):
            # The one before it may be on its way.
            text = f"--node-rank is {node}, and the next machine that comes is {len(self._counts)}"
            return text if is_late else None
        if machine is None or machine.lost:
            return self._join(node, counts[node], ticket, now) if has_begun else None
        if machine.ticket is not None:
            # One that dies and comes back at once has not been missed yet.
            return f"--node-rank {node} was given on two machines" if is_late else None
        machine.ticket, machine.since = ticket, now
        return ""

    def _join(self, node: int, count: int, ticket: int, now: float) -> str:
        """Has ranks started on a machine that is new or was lost; returns why not, or ""."""
        before = self._machines.get(node)
        self._machines[node] = FarMachine(now, ticket)
        refusal = self._on_join(node, count)
        if refusal is not None:
            del self._machines[node]
            if before is not None:
                self._machines[node] = before
            return refusal
        if before is None:
            self._counts.append(count)
        again = before is not None and before.ticket is not None
        say(f"machine {node} {'rejoined' if again else 'joined'}")
        return ""

    def _refusal(self, node: int, counts: Sequence[int], asked: Mapping[str, str]) -> str | None:
        """Why a supervisor cannot come; None if it can."""
        machine, there = self._machines.get(node), len(self._counts)
        # A machine that is new has its own count behind the others'; one that comes again may not
        # know of those after it.
        expected = [*self._counts, *counts[there : node + 1]]
        if list(counts) != expected[: len(counts)] or len(counts) < self._at_start:
            texts = (",".join(map(str, some)) for some in (counts, self._counts))
            return "--nproc is {} here and {} on machine 0: it must be equal".format(*texts)
        if machine is None or machine.ticket is not None or machine.lost:
            # At the start ranks compare them, and end together.
            for name, value in self._asked.items():
                if asked.get(name) != value:
                    return f"{name} is {asked.get(name)} here and {value} on machine 0"
        return None

    def _read(self, machine: FarMachine, report: Mapping[str, Any], now: float) -> None:
        if report["beat"] == machine.beat:
            return
        machine.beat, machine.since = report["beat"], now
        for text, (code, words, failure) in report["ranks"].items():
            member = int(text)
            rank = machine.ranks[member]
            if rank.code is None:
                self._board.copy_words(member, words)
                if failure is not None and self._board.failure(member) is None:
                    self._board.note_failure(member, *failure)
                rank.code = code
        for number in report["signals"][machine.signals :]:
            machine.signals += 1
            self._on_signal(number)
        machine.ended |= report["ended"]

    def _lose(self, node: int, machine: FarMachine, silence: float) -> None:
        machine.lost = True
        say(f"machine {node} has not answered for {silence:.0f} s: its ranks are lost")
        for rank in machine.ranks.values():
            if rank.code is None:
                # Should only the way to it be gone.
                rank.send_signal(signal.SIGKILL)
                rank.code = -signal.SIGKILL

    def _write(self) -> None:
        generation = self._board.generation
        announced = None
        if generation:
            announced = self._board.members(generation), self._board.machines(generation)
        state = {
            "orders": {machine.ticket: machine.orders for machine in self._machines.values()},
            "generation": generation,
            "announced": announced,
            "words": self._board.all_words(),
            "end": self._end,
            "beat": self._exchanged,
        }
        self._store.set("job", json.dumps(state))


def arrive(
    store: "dist.Store", node_rank: int, counts: Sequence[int], asked: Mapping[str, str]
) -> int:
    """Asks machine 0 to let this machine in; returns the ticket of this supervisor.

    Raises:
        UsageError: machine 0's answer is no, or the job has ended.
    """
    arrival = {"node": node_rank, "counts": list(counts), "asked": dict(asked)}
    try:
        ticket: int = store.add("tickets", 1)
        store.set(f"arrival {ticket}", json.dumps(arrival))
        began, has_said = time.monotonic(), False
        while not store.check([f"answer {ticket}"]):
            if time.monotonic() - began > _SAY_AFTER_S and not has_said:
                say("waiting until machine 0 lets this machine in")
                has_said = True
            time.sleep(_EXCHANGE_S)
        text = store.get(f"answer {ticket}").decode()
    except RuntimeError:  # the store has gone
        text = "the job ended before machine 0 let this machine in"
    if text:
        raise UsageError(text)
    return ticket


class Follower(Watch):
    """The supervisor of a machine that is not machine 0.

    Args:
        command, preload: as for `Watch`.
        environment: makes a rank's environment, of its number in the job.
        board: this machine's.
        store: machine 0's.
        ticket: see `arrive`.
        timeout: seconds to wait for machine 0, should it not answer.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Callable[[int], dict[str, str]],
        board: Board,
        store: "dist.Store",
        ticket: int,
        timeout: float,
        preload: Sequence[str],
    ) -> None:
        super().__init__(command, [], preload)
        self._environment_of, self._board, self._timeout = environment, board, timeout
        self._ranks: dict[int, Child] = {}
        self._done = 0
        self._stopped_at: dict[int, float] = {}
        self._link = _Link(store, ticket)

    def _wait(self) -> int:
        """Obeys machine 0 until it ends the job; returns its exit code."""
        cut_off = False
        try:
            while True:
                report = self._report(ended=False)
                if self._server_is_gone() and not self._received:
                    # Machine 0 is not told of the ranks, which it would replace here: it misses
                    # this machine, as one that was switched off.
                    return self._failed(0, 1)
                self._link.report = report
                silence = time.monotonic() - self._link.heard
                if self._link.is_closed or silence > self._timeout:
                    say("machine 0 no longer answers: all ranks here were stopped")
                    return 1
                if silence > LOST_S and not cut_off:
                    say(f"machine 0 has not answered for {silence:.0f} s: ending the ranks here")
                    self._signal(signal.SIGKILL)
                cut_off = silence > LOST_S
                if self._ended_by:
                    return self._ended()
                # Machine 0 passes the first one on, to all.
                if len(self._received) > (0 if cut_off else 1):
                    return self._stopped()
                job = self._link.job
                if job is not None and not cut_off:
                    if job["end"] is not None:
                        return int(job["end"])
                    if str(self._link.ticket) not in job["orders"]:
                        say(
                            "another command has taken this machine's place: its ranks were stopped"
                        )
                        return 1
                    self._obey(job)
                kill_stopped(self._children, self._stopped_at)
                time.sleep(_EXCHANGE_S / 2)
        finally:
            self._end_all()
            lost = self._server_is_gone()
            self._link.close(self._link.report if lost else self._report(ended=True))

    def _obey(self, job: Mapping[str, Any]) -> None:
        """Does what is new in the orders, and copies the board."""
        for kind, member, argument in job["orders"][str(self._link.ticket)][self._done :]:
            self._done += 1
            if kind == "start":
                self._environments.append(self._environment_of(member))
                self._ranks[member] = self._start(os.environ | self._environments[-1])
                self._children.append(self._ranks[member])
            elif self._ranks[member].poll() is None:
                self._ranks[member].send_signal(signal.Signals(argument))
        for member, words in enumerate(job["words"]):
            if member not in self._ranks:
                self._board.copy_words(member, words)
        # Last: who sees the generation finds its members' words.
        if job["generation"] > self._board.generation:
            members, machines = job["announced"]
            self._board.announce(members, machines, job["generation"])

    def _report(self, ended: bool) -> dict[str, Any]:
        return {
            "ranks": {
                # The code first: what a process says of itself is whole when it has ended.
                member: [child.poll(), self._board.words(member), self._board.failure(member)]
                for member, child in self._ranks.items()
            },
            "signals": list(self._received),
            "ended": ended,
        }


class _Link:
    """The exchange with machine 0, in a thread: a call to a store that is gone does not return."""

    def __init__(self, store: "dist.Store", ticket: int) -> None:
        self.ticket, self._store = ticket, store
        self.job: dict[str, Any] | None = None
        self.report: dict[str, Any] = {"ranks": {}, "signals": [], "ended": False}
        self.heard = time.monotonic()
        self.is_closed = False
        self._thread = threading.Thread(target=self._talk, daemon=True)
        self._last = False
        self._thread.start()

    def close(self, report: dict[str, Any]) -> None:
        """Sends a last report; gives up in a moment."""
        self.report, self._last = report, True
        self._thread.join(1.0)

    def _talk(self) -> None:
        beat = 0
        while True:
            last = self._last
            try:
                beat += 1
                report = json.dumps(self.report | {"beat": beat})
                self._store.set(f"report {self.ticket}", report)
                if last:
                    # Machine 0 may be gone once it has read this.
                    return
                if self._store.check(["job"]):
                    job = json.loads(self._store.get("job"))
                    if self.job is None or job["beat"] != self.job["beat"]:
                        self.heard = time.monotonic()
                    self.job = job
            except RuntimeError:  # machine 0 has ended
                self.is_closed = True
                return
            time.sleep(_EXCHANGE_S)
