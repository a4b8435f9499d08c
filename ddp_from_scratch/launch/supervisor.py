"""Starts the ranks of one machine, watches them, and ends them together.

Used where no launcher is: `python run.py`, and one such command on each of several machines.

Event                                          Sent to the ranks
---------------------------------------------  -----------------------------------------------------
Ctrl-C, SIGTERM, SIGUSR1 or SIGHUP             SIGTERM: they finish a step, save, and end. Under
                                               mpirun SIGUSR1, all that it hands on in time
a second Ctrl-C or SIGTERM                     SIGKILL (mpirun: SIGTERM, then SIGKILL at a third)
SIGQUIT or SIGUSR2                             SIGTERM, and SIGKILL 5 s later
SIGKILL                                        SIGKILL, from the system (`rank_process.die_with`)
nothing, but one rank fails                    SIGTERM, and SIGKILL 5 s later

Ranks live in sessions of their own, so that the terminal's Ctrl-C reaches them once, through here.
"""

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

from ddp_from_scratch.errors import UsageError
from ddp_from_scratch.launch import output
from ddp_from_scratch.launch.environment import (
    PARENT,
    RENDEZVOUS_FILE,
    STARTED_HERE,
    TERMINAL,
    mpirun_command,
    rank_environments,
)
from ddp_from_scratch.launch.fork_server import OPTIMIZERS, ForkedRank, ForkServer, can_fork
from ddp_from_scratch.launch.interfaces import require_loopback
from ddp_from_scratch.launch.rank_function import command_of
from ddp_from_scratch.launch.rank_process import PR_SET_PDEATHSIG

if TYPE_CHECKING:
    from ddp_from_scratch.launch.multi_node import Machines

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_ENDS = (signal.SIGQUIT, signal.SIGUSR2)
_POLL_S = 0.05
_GRACE_S = 5.0  # between asking the ranks to stop, after one failed, and killing them

# What most programs of ranks import, beside torch.
_PRELOAD = ("ddp_from_scratch.world.process_group", "ddp_from_scratch.reducer.reducer", OPTIMIZERS)


def start_ranks(
    command: Sequence[str] | Callable[[], Any],
    counts: Sequence[int],
    node_rank: int = 0,
    master_addr: str = "127.0.0.1",
    master_port: int = 29500,
    timeout: float = 600.0,
    *,
    preload: Sequence[str] = _PRELOAD,
    max_failures: int | None = None,
) -> int:
    """Runs a command or a function once for each rank of this machine; waits for all of them.

    On one machine the ranks meet through a file that only this user can read, in a folder that is
    removed at the end: no port is opened. On several, machine 0 listens on `master_port` of
    `master_addr` and nowhere else, and talks to machines that know the job's secret: DDP_SECRET in
    the environment of all, or what machine 0 prints for the others where it has none.

    On Linux, ranks of `[sys.executable, "program.py", ...]`, or of -m or -c in its place, are
    forked from a process that has imported torch; any other command is executed.

    The first rank that fails ends all others, on every machine, unless `max_failures` is given: the
    others then go on (`ddp.elastic`), and another process is started for it. Ctrl-C, SIGTERM,
    SIGUSR1 and SIGHUP reach the ranks as SIGTERM, and they stop together; a second Ctrl-C or
    SIGTERM kills them. SIGQUIT and SIGUSR2 end all ranks. SIGHUP that was ignored before (nohup)
    stays so.

    Args:
        command: program and arguments; each rank gets torchrun's variables in its environment. Or a
            function without arguments (`functools.partial` binds some), also of a notebook: it runs
            in new processes on copies of what it uses, and what it returns is dropped.
        counts: number of processes on each machine.
        node_rank: this machine's position in `counts`.
        master_addr: where machine 0 can be reached.
        master_port: the port that machine 0 listens on.
        timeout: seconds to wait for the other machines, and for a sign of life from them later.
        preload: modules that are imported once, before ranks are forked.
        max_failures: processes that may be started in the place of failed ones (`going_on.py`). On
            one machine, for programs with `ddp.elastic`. None ends all ranks when one fails.

    Returns:
        0 when every rank ended with 0, 128 + N after signal N, else the exit code of the first rank
        that did not end well (128 + N when it was killed by signal N).

    Raises:
        UsageError: the port is taken, machine 0 does not answer, or the machines were given
            different counts or secrets; a function cannot be sent (`rank_function.command_of`);
            a machine has no process; `max_failures` is negative, or there are several machines.
    """
    if min(counts, default=0) < 1:
        raise UsageError(f"counts must be 1 or more for each machine, got {list(counts)}")
    if max_failures is not None and (len(counts) > 1 or max_failures < 0):
        raise UsageError(
            f"max_failures must be 0 or more, and is for one machine, got {max_failures} for "
            f"{len(counts)} machines"
        )
    if max_failures is not None and not sys.platform.startswith("linux"):
        raise UsageError("max_failures needs Linux, which alone shows a process its connections")
    ranks = rank_environments(counts, node_rank)
    common = {PARENT: str(os.getpid()), STARTED_HERE: "1"}
    machines: Machines | None = None
    with ExitStack() as stack:
        if callable(command):
            sent = stack.enter_context(tempfile.TemporaryDirectory(prefix="ddp-"))
            command = command_of(command, Path(sent))
        if len(counts) > 1:
            # Here and not above: it imports torch, which a parent on one machine does without.
            from ddp_from_scratch.launch import multi_node

            machines = multi_node.Machines(counts, node_rank, master_addr, master_port, timeout)
            stack.callback(machines.close)
            common |= machines.environment
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ddp-"))  # mode 0700
            common[RENDEZVOUS_FILE] = str(Path(folder) / "rendezvous")
            if max_failures is not None:
                # Here and not above: it builds on this file.
                from ddp_from_scratch.launch.going_on import GoingOnWatch

                return GoingOnWatch(
                    command, common, counts[0], max_failures, Path(folder), preload
                ).run()
        return Watch(command, [common | rank for rank in ranks], preload, machines).run()


def start_mpirun(nproc: int, command: Sequence[str]) -> int:
    """Runs `mpirun -n NPROC COMMAND` on this machine and waits for it.

    Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP reach the ranks as SIGUSR1; a second Ctrl-C ends them, and
    so do SIGQUIT and SIGUSR2.

    Returns:
        mpirun's exit code, which is that of the first rank that failed; 128 + N after signal N.

    Raises:
        UsageError: there is no mpirun, or no interface that it could use.
    """
    require_loopback()
    full, defaults = mpirun_command(nproc, command)
    defaults[STARTED_HERE] = "1"
    for stream in (1, 2):
        if os.isatty(stream):
            defaults[f"{TERMINAL}{stream}"] = os.ttyname(stream)
    say(f"starting: {shlex.join(full)}")
    return _MpirunWatch(full, [defaults | os.environ]).run()


# Both have `poll`, `wait` and `send_signal`.
Child: TypeAlias = "subprocess.Popen[bytes] | ForkedRank"


class Watch:
    """The ranks of this machine as child processes that end together.

    1. Start one for each environment, with signals handled already.
    2. Watch: until all have ended well, one has failed, or a signal asks for the end.
    3. End what still runs.
    """

    # Sent to the ranks at the first signal that stops them, at the second, and so on. Not SIGINT: a
    # Python that is still importing would answer it with a traceback.
    ladder: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGKILL)

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[dict[str, str]],
        preload: Sequence[str] = (),
        machines: "Machines | None" = None,
    ) -> None:
        self._command = list(command)
        self._environments = list(environments)
        self._preload = preload
        self._machines = machines
        self._server: ForkServer | None = None
        self._children: list[Child] = []
        # Handlers append to it, and `_pass_on` alone reads: a signal may come between two starts.
        self._received: list[int] = []
        self._passed_on = 0
        self._ended_by = 0

    def run(self) -> int:
        """Starts the ranks, and returns the exit code when all have ended."""
        numbers = [*_STOPS, *_ENDS]
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            numbers.remove(signal.SIGHUP)
        # Before the first rank, which no signal may leave behind.
        handlers = {number: signal.signal(number, self._remember) for number in numbers}
        try:
            # 1. Start
            if can_fork(self._command):
                self._server = ForkServer(self._preload)
            for environment in self._environments:
                self._children.append(self._start(os.environ | environment))
            # 2. Watch
            return self._wait()
        finally:
            # 3. End
            self._end_all()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _start(self, environ: dict[str, str]) -> Child:
        if self._server is not None:
            return self._server.start(self._command, environ)
        return subprocess.Popen(
            self._command, env=environ, stdin=subprocess.DEVNULL, start_new_session=True
        )

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if number in _ENDS:
            self._ended_by = number
        # A session that ends sends SIGHUP beside SIGTERM: that does not count as a second one.
        elif number in (signal.SIGINT, signal.SIGTERM) or not self._received:
            self._received.append(number)

    def _pass_on(self) -> None:
        """Acts on the signals that have come since the last call."""
        while self._passed_on < len(self._received):
            if self._passed_on == 0:
                say("stopping all ranks; once more ends them at once")
            self._signal(self.ladder[min(self._passed_on, len(self.ladder) - 1)])
            self._passed_on += 1

    def _wait(self) -> int:
        """Until all children have ended well, or one has not; returns the exit code."""
        polls = 0
        while True:
            self._pass_on()
            if self._ended_by:
                return self._ended()
            codes = [child.poll() for child in self._children]
            if all(code == 0 for code in codes):
                if self._machines is None or self._machines.may_leave() or self._received:
                    return 0
            elif self._received:
                # Asked to stop, they end one after another with the signal's code. But where one
                # has died of it, the others wait for that one in vain.
                if None not in codes or any(code and code < 0 for code in codes):
                    return self._stopped()
            elif any(codes):
                return self._failed(*next((i, code) for i, code in enumerate(codes) if code))
            # Twice a second, as often as the machines send signs of life.
            polls += 1
            if self._machines is not None and polls % 10 == 0:
                elsewhere = self._machines.failure()
                if elsewhere is not None:
                    return self._stopped_elsewhere(elsewhere)
            time.sleep(_POLL_S)

    def _stopped(self) -> int:
        self._tell_machines(f"stopped by {signal.Signals(self._received[0]).name}")
        return 128 + self._received[0]

    def _stopped_elsewhere(self, reason: str) -> int:
        # A rank here that all ranks agreed with has the same code, and some rank has said why.
        self._await_end(1.0)
        codes = [child.poll() for child in self._children]
        code = next((code for code in codes if code is not None and code > 1), None)
        if code is None:
            say(f"stopped: {reason}")
        return code or 1

    def _ended(self) -> int:
        name = signal.Signals(self._ended_by).name
        say(f"ending all ranks ({name})")
        self._tell_machines(f"ended by {name}")
        return 128 + self._ended_by

    def _failed(self, index: int, code: int) -> int:
        name = self._name(index)
        text = f"{name} ended with exit code {code}"
        if code < 0:
            text = f"{name} was killed by {signal.Signals(-code).name}"
            say(f"{text}; all other ranks were stopped")
        self._tell_machines(text)
        return 128 - code if code < 0 else code

    def _name(self, index: int) -> str:
        rank = self._environments[index].get("RANK")
        return Path(self._command[0]).name if rank is None else f"rank {rank}"

    def _tell_machines(self, reason: str) -> None:
        if self._machines is not None:
            self._machines.tell_failure(reason)

    def _end_all(self) -> None:
        """Asks all running children to stop, then kills them. Idempotent."""
        self._signal(signal.SIGTERM)
        self._await_end(_GRACE_S)
        self._signal(signal.SIGKILL)
        for child in self._children:
            child.wait()
        if self._server is not None:
            self._server.close()

    def _await_end(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while any(child.poll() is None for child in self._children) and time.monotonic() < end:
            self._pass_on()
            time.sleep(_POLL_S)

    def _signal(self, number: signal.Signals) -> None:
        for child in self._children:
            if child.poll() is None:
                child.send_signal(number)


class _MpirunWatch(Watch):
    """One child, mpirun, which watches the ranks itself."""

    # mpirun hands SIGUSR1 on and otherwise ignores it. At any other signal Open MPI kills its ranks
    # after 0.2 s, too early for them to have written a checkpoint, and has no setting for that.
    ladder = (signal.SIGUSR1, signal.SIGTERM, signal.SIGKILL)

    def _start(self, environ: dict[str, str]) -> Child:
        libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
        return subprocess.Popen(
            self._command,
            env=environ,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            # mpirun cannot ask for it by itself, as ranks do in `die_with_parent`.
            preexec_fn=lambda: libc and libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
        )


def say(text: str) -> None:
    """Prints a line to standard error."""
    output.write(text, sys.stderr)
