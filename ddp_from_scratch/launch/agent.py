"""Runs the ranks of one machine as child processes and ends them together.

Event                                          Signal sent to the ranks
---------------------------------------------  -----------------------------------------------------
Ctrl-C, SIGTERM, SIGUSR1 or SIGHUP             SIGTERM: they finish a step, save and exit. Under
                                               mpirun SIGUSR1, the only signal it forwards in time
a second Ctrl-C or SIGTERM                     SIGKILL (mpirun: SIGTERM, then SIGKILL at a third)
SIGQUIT or SIGUSR2                             SIGTERM, then SIGKILL 5 s later
SIGKILL                                        SIGKILL, from the kernel (`rank_process.py`)
none, but one rank fails                       SIGTERM, then SIGKILL 5 s later

Each rank has its own session, so the terminal's Ctrl-C reaches it once, through the agent.
"""

import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import FrameType
from typing import BinaryIO, TypeAlias

from ddp_from_scratch.common.process import stat_fields
from ddp_from_scratch.launch.claim import environment_without_rank
from ddp_from_scratch.launch.cores import as_if_bound_to
from ddp_from_scratch.launch.debugging import has_stdin
from ddp_from_scratch.launch.environment import CPUS
from ddp_from_scratch.launch.fork_server import ForkServer, RemoteRank, can_fork
from ddp_from_scratch.launch.nodes import Link, MachineRegistry
from ddp_from_scratch.launch.output import OUTPUT, Output
from ddp_from_scratch.launch.policy import (
    STOPS,
    FailTogether,
    JobState,
    Loss,
    Policy,
    Verdict,
    ended,
    stopped,
)
from ddp_from_scratch.launch.rank_process import say

_ENDS = (signal.SIGQUIT, signal.SIGUSR2)
_STOPPED_S = 5.0  # a rank of an elastic job counts as lost after SIGSTOP for this long
_GRACE_S = 5.0  # between SIGTERM and SIGKILL

Child: TypeAlias = subprocess.Popen[bytes] | RemoteRank  # a rank, or mpirun


@dataclass(eq=False)
class Agent:
    """Runs the ranks of this machine.

    1. Start: one rank for each number in `members`, with signal handlers already installed.
    2. Watch: until all ranks exit with 0, a loss or a signal ends the job.
    3. End: stop the ranks that still run.

    `policy` decides what follows when a rank is lost.
    """

    command: Sequence[str]
    environment: Callable[[int], dict[str, str]]
    members: Iterable[int]
    preload: Sequence[str] = ()
    peers: MachineRegistry | Link | None = None
    policy: Policy = field(default_factory=FailTogether)
    # Sent at the first stop signal, the second, and so on. SIGINT would print a traceback.
    ladder: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGKILL)
    set_up: Callable[[], object] | None = None  # runs in a child that is not forked
    name: str = "rank {}"  # of a member
    debugs: bool = False  # whether one rank reads this process's standard input
    output: Output | None = None  # None: ranks write to this process's own output
    variables: dict[str, str] = field(default_factory=dict)  # of all ranks and their server
    cpus: Sequence[str] = ()  # for a process each; more than these are not bound

    _pause = 0.05  # seconds between two looks at the ranks

    def __post_init__(self) -> None:
        self._server: ForkServer | None = None
        self._children: dict[int, Child] = {}
        self._living: set[int] = set()  # those that have not ended, as far as is known
        self._seats: dict[int, int] = {}  # the index in `cpus` of those that are bound
        # Handlers only append and `_pass_on` reads, because a signal may arrive between two starts.
        self._received: list[int] = []
        self._passed_on = 0
        self._ended_by = 0
        self._stopped_at: dict[int, float] = {}  # when SIGSTOP was first seen
        self._looked = self._woke = time.monotonic()  # see `_note_pause`

    def run(self) -> int:
        numbers = [*STOPS, *_ENDS]
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            numbers.remove(signal.SIGHUP)
        # Installed before the first rank starts, so that no signal can orphan one.
        handlers = {number: signal.signal(number, self._remember) for number in numbers}
        code: int | None = None
        try:
            if can_fork(self.command):
                self._server = ForkServer(self.preload, self.debugs, self.variables)
            for member in self.members:
                self._start(member)
            while (code := self._look()) is None:
                time.sleep(self._pause)
        finally:
            self._end_all()
            if self.output is not None:
                self.output.close()
            if self.peers is not None:
                self.peers.close(1 if code is None else code)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return code

    @property
    def is_stopping(self) -> bool:
        """True once a stop signal has been received."""
        return bool(self._received)

    def _start(self, member: int) -> None:
        self._living.add(member)
        self._children[member] = self._launch(member)

    def _launch(self, member: int) -> Child:
        # This process may be a rank of another job itself.
        environ = environment_without_rank() | self.variables | self.environment(member)
        cpus = self._cpus_for(member)
        environ |= {CPUS: cpus} if cpus else {}
        path = None if self.output is None else self.output.open(member)
        if self._server is not None:
            environ |= {} if path is None else {OUTPUT: path}
            return self._server.start(self.command, environ)
        with ExitStack() as files:
            pipes: list[BinaryIO | None] = [None, None]
            if path is not None:
                pipes = [files.enter_context(open(f"{path}{n}", "wb", 0)) for n in (1, 2)]
                environ.setdefault("PYTHONUNBUFFERED", "1")  # a killed rank has no time to flush
            files.enter_context(as_if_bound_to(cpus))
            return subprocess.Popen(
                self.command,
                env=environ,
                stdin=None if has_stdin(environ) else subprocess.DEVNULL,
                stdout=pipes[0],
                stderr=pipes[1],
                start_new_session=True,
                preexec_fn=self.set_up,
            )

    def _cpus_for(self, member: int) -> str:
        """Returns CPUs that no running process has: a new one gets those of the one it replaces."""
        taken = {self._seats[other] for other in self._running() if other in self._seats}
        free = [seat for seat in range(len(self.cpus)) if seat not in taken]
        if not free:
            return ""
        self._seats[member] = free[0]
        return self.cpus[free[0]]

    def _remember(self, number: int, frame: FrameType | None = None) -> None:
        if number in _ENDS:
            self._ended_by = number
        # A closing session sends SIGHUP with SIGTERM; the SIGHUP does not count as a second signal.
        elif number in (signal.SIGINT, signal.SIGTERM) or not self._received:
            self._received.append(number)

    def _pass_on(self) -> None:
        while self._passed_on < len(self._received):
            if self._passed_on == 0:
                say("stopping all ranks; once more ends them at once")
            self._signal(self.ladder[min(self._passed_on, len(self.ladder) - 1)])
            self._passed_on += 1

    def _look(self) -> int | None:
        """Returns the exit code once the job is over on this machine."""
        self._note_pause()
        self._pass_on()
        self._exchange()
        if self._ended_by:
            return self._carry_out(ended(self._ended_by))
        for member, code in self._poll().items():
            if code is None:
                continue
            self._living.discard(member)
            if (end := self._carry_out(self._judge(member, code))) is not None:
                return end
        return self._continue()

    def _exchange(self) -> None:
        """On machine 0: exchanges messages with the others, and takes the signals they received."""
        if isinstance(self.peers, MachineRegistry):
            self.peers.exchange()
            while self.peers.signals:
                self._remember(self.peers.signals.pop(0))

    def _poll(self) -> dict[int, int | None]:
        return {member: self._children[member].poll() for member in sorted(self._living)}

    def _judge(self, member: int, code: int) -> Verdict:
        """Returns what follows from the end of a process."""
        if code == 0:
            return Verdict()
        stop = self._received[0] if self._received else 0
        job = JobState(len(self._living), stop, self._server_code())
        return self.policy.verdict(Loss(self.name.format(member), code), job)

    def _carry_out(self, verdict: Verdict) -> int | None:
        """Prints the verdict and tells it the other machines; returns the exit code at the end."""
        if verdict.stopped_by and not self._received:
            self._received.append(verdict.stopped_by)
        if verdict.text:
            say(verdict.text)
        if verdict.reason and self.peers is not None:
            self.peers.tell_failure(verdict.reason)
        return verdict.exit_code

    def _continue(self) -> int | None:
        """Returns the exit code once all ranks have ended, or another machine ends the job."""
        if not self._living:
            if any(child.poll() for child in self._children.values()):
                return self._carry_out(stopped(self._received[0]))
            if self.peers is None or self._received or self.peers.may_leave():
                return 0
        if self.peers is None or (reason := self.peers.failure()) is None:
            return None
        # A rank that agreed with its peers to stop has their exit code, and a peer says why.
        self._await_end(1.0)
        for child in self._children.values():
            if (known := child.poll() or 0) > 1:
                return known
        say(f"stopped: {reason}")
        return 1

    def _server_code(self) -> int | None:
        """Returns the fork server's exit code; None until a poll has found that it has ended."""
        return None if self._server is None else self._server.returncode

    def _end_all(self) -> None:
        """Sends SIGTERM to all running children, then SIGKILL. Idempotent."""
        self._signal(signal.SIGTERM)
        self._await_end(_GRACE_S)
        self._signal(signal.SIGKILL)
        for child in self._children.values():
            child.wait()
        if self._server is not None:
            self._server.kill()

    def _await_end(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self._running() and time.monotonic() < end:
            self._pass_on()
            if isinstance(self.peers, MachineRegistry):
                self.peers.exchange()  # the others must not take machine 0 for lost
            time.sleep(self._pause)

    def _signal(self, number: signal.Signals) -> None:
        for child in self._running().values():
            child.send_signal(number)

    def _running(self) -> dict[int, Child]:
        return {member: child for member, child in self._children.items() if child.poll() is None}

    def _note_pause(self) -> None:
        """Notes when this process last woke, if it stood still (with its machine or by SIGSTOP).

        Nobody else failed in that time: the ranks may have stood still with it, and machine 0 may
        have answered.
        """
        now = time.monotonic()
        if now - self._looked > _STOPPED_S:
            self._woke = now
            self._stopped_at.clear()
        self._looked = now

    def _kill_stopped(self) -> None:
        now = time.monotonic()
        for member, child in self._running().items():
            if not _is_stopped(child):
                self._stopped_at.pop(member, None)
            elif now - self._stopped_at.setdefault(member, now) > _STOPPED_S:
                child.send_signal(signal.SIGKILL)


def _is_stopped(child: Child) -> bool:
    return child.pid is not None and stat_fields(child.pid)[:1] == ["T"]
