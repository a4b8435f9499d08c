"""A job that goes on, on several machines: machine 0 decides, the supervisors of others obey.

    machine 0                          through its store                    machine 1
    GoingOnWatch  -- "job": orders, generation, words of all processes -->  Follower
                  <-- "report 1": exit codes, words of its processes -----

A machine that does not answer for `LOST_S` is lost with its ranks; so is machine 0 for the others,
which then end theirs. So never do two halves of a job go on side by side. A machine that answers
again gets other ranks.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddp_from_scratch.launch.board import Board
from ddp_from_scratch.launch.watch import Child, Watch, kill_stopped, say

if TYPE_CHECKING:
    from ddp_from_scratch.launch.multi_node import Meeting

LOST_S = 5.0
_EXCHANGE_S = 0.02


class FarRank:
    """A rank on another machine, as its supervisor there reports of it."""

    def __init__(
        self,
        exchange: Callable[[], None],
        order: Callable[[str, int], None],
        is_lost: Callable[[], bool],
    ) -> None:
        self._exchange, self._order, self._is_lost = exchange, order, is_lost
        self.code: int | None = None
        # No process of this machine.
        self.pid = None

    def poll(self) -> int | None:
        """Returns its exit code; None while it runs."""
        self._exchange()
        return self.code

    def wait(self) -> int:
        """Waits for its end, or until its machine is lost; returns the exit code."""
        while (code := self.poll()) is None and not self._is_lost():
            time.sleep(_EXCHANGE_S)
        return -signal.SIGKILL if code is None else code

    def send_signal(self, number: int) -> None:
        """Has the signal sent."""
        self._order("signal", number)


class OtherMachines:
    """Machine 0's view of the others.

    Args:
        meeting: the store that all reach.
        nodes: the number of machines.
        board: machine 0's.
        on_signal: gets the number of each signal that stops a supervisor elsewhere.
        timeout: seconds that a machine may take to come.
    """

    def __init__(
        self,
        meeting: "Meeting",
        nodes: int,
        board: Board,
        on_signal: Callable[[int], None],
        timeout: float,
    ) -> None:
        self._store, self._board, self._on_signal = meeting.store, board, on_signal
        self._others = range(1, nodes)
        self._orders: dict[int, list[tuple[str, int, int]]] = {n: [] for n in self._others}
        self._ranks: dict[int, dict[int, FarRank]] = {n: {} for n in self._others}
        # Of each machine: its last sign of life, and when it came.
        self._beats = dict.fromkeys(self._others, (0, time.monotonic()))
        self._timeout = timeout
        self._signals = dict.fromkeys(self._others, 0)
        self.lost: set[int] = set()
        self._ended: set[int] = set()
        self._end: int | None = None
        self._exchanged = 0.0

    def start(self, machine: int, member: int) -> FarRank:
        """Has a rank started."""

        def order(kind: str, argument: int) -> None:
            self._orders[machine].append((kind, member, argument))

        def is_lost() -> bool:
            return machine in self.lost

        self._ranks[machine][member] = FarRank(self.exchange, order, is_lost)
        order("start", 0)
        return self._ranks[machine][member]

    def exchange(self) -> None:
        """Reads all reports and writes the job's state, fifty times a second at most."""
        now = time.monotonic()
        if now - self._exchanged < _EXCHANGE_S:
            return
        self._exchanged = now
        for machine in self._others:
            if self._store.check([f"report {machine}"]):
                self._read(machine, json.loads(self._store.get(f"report {machine}")), now)
            beat, since = self._beats[machine]
            if machine not in self.lost and now - since > (LOST_S if beat else self._timeout):
                self._lose(machine, now - since)
        self._store.set("job", json.dumps(self._state()))

    def end(self, code: int) -> None:
        """Tells the machines that the job has ended, and waits until they have noticed."""
        self._end = code
        until = time.monotonic() + LOST_S
        while set(self._others) - self.lost - self._ended and time.monotonic() < until:
            self.exchange()
            time.sleep(_EXCHANGE_S)

    def _read(self, machine: int, report: Mapping[str, Any], now: float) -> None:
        if report["beat"] == self._beats[machine][0]:
            return
        self._beats[machine] = report["beat"], now
        if machine in self.lost:
            self.lost.discard(machine)
            say(f"machine {machine} answers again")
        for text, (code, words, failure) in report["ranks"].items():
            member, rank = int(text), self._ranks[machine][int(text)]
            if rank.code is None:
                self._board.copy_words(member, words)
                if failure is not None and self._board.failure(member) is None:
                    self._board.note_failure(member, *failure)
                rank.code = code
        for number in report["signals"][self._signals[machine] :]:
            self._signals[machine] += 1
            self._on_signal(number)
        if report["ended"]:
            self._ended.add(machine)

    def _lose(self, machine: int, silence: float) -> None:
        self.lost.add(machine)
        say(f"machine {machine} has not answered for {silence:.0f} s: its ranks are lost")
        for rank in self._ranks[machine].values():
            if rank.code is None:
                # Should only the way to it be gone.
                rank.send_signal(signal.SIGKILL)
                rank.code = -signal.SIGKILL

    def _state(self) -> dict[str, Any]:
        generation = self._board.generation
        announced = None
        if generation:
            announced = self._board.members(generation), self._board.machines(generation)
        return {
            "orders": self._orders,
            "generation": generation,
            "announced": announced,
            "words": self._board.all_words(),
            "end": self._end,
            "beat": self._exchanged,
        }


class Follower(Watch):
    """The supervisor of a machine that is not machine 0.

    Args:
        command, preload: as for `Watch`.
        environment: makes a rank's environment, of its number in the job.
        board: this machine's.
        meeting: the store on machine 0.
        node_rank: this machine's position.
        timeout: seconds to wait for machine 0, should it not answer.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Callable[[int], dict[str, str]],
        board: Board,
        meeting: "Meeting",
        node_rank: int,
        timeout: float,
        preload: Sequence[str],
    ) -> None:
        super().__init__(command, [], preload)
        self._environment_of, self._board, self._timeout = environment, board, timeout
        self._ranks: dict[int, Child] = {}
        self._done = 0
        self._stopped_at: dict[int, float] = {}
        self._link = _Link(meeting, node_rank)

    def _wait(self) -> int:
        """Obeys machine 0 until it ends the job; returns its exit code."""
        cut_off = False
        try:
            while True:
                self._link.report = self._report(ended=False)
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
                    self._obey(job)
                kill_stopped(self._children, self._stopped_at)
                time.sleep(_EXCHANGE_S / 2)
        finally:
            self._end_all()
            self._link.close(self._report(ended=True))

    def _obey(self, job: Mapping[str, Any]) -> None:
        """Does what is new in the orders, and copies the board."""
        for kind, member, argument in job["orders"][str(self._link.node_rank)][self._done :]:
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

    def __init__(self, meeting: "Meeting", node_rank: int) -> None:
        self.node_rank, self._store = node_rank, meeting.store
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
                self._store.set(f"report {self.node_rank}", report)
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
