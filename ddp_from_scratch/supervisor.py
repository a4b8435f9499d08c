"""The parent of the ranks on one machine: starts them, watches them, ends them together.

Used where no launcher is: `python run.py`, and one such command on each of several machines.
"""

import ctypes
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from .errors import UsageError
from .launch import STARTED_HERE, launcher, mpirun_command, rank_environments

RENDEZVOUS_FILE = "DDP_RENDEZVOUS_FILE"
_PARENT = "DDP_PARENT_PID"
_TERMINAL = "DDP_TERMINAL_"
_PR_SET_PDEATHSIG = 1

_POLL_S = 0.05
_GRACE_S = 5.0  # between asking the ranks to stop, after one failed, and killing them


def start_ranks(
    command: Sequence[str],
    counts: Sequence[int],
    node_rank: int = 0,
    master_addr: str = "127.0.0.1",
    master_port: int = 29500,
    timeout: float = 600.0,
) -> int:
    """Runs `command` once for each rank of this machine and waits for all of them.

    On one machine the ranks meet through a file that only this user can read, in a folder that is
    removed at the end: no port is opened. On several, machine 0 listens on `master_port`.

    The first rank that fails ends all others, on every machine. Ctrl-C and SIGTERM reach the ranks
    as SIGTERM (a Python that is still importing would answer SIGINT with a traceback), and they
    stop together; a second one kills them.

    Args:
        command: program and arguments; each rank gets torchrun's variables in its environment.
        counts: number of processes on each machine.
        node_rank: this machine's position in `counts`.
        master_addr: where machine 0 can be reached.
        master_port: the port that machine 0 listens on.
        timeout: seconds to wait for the other machines.

    Returns:
        0 when every rank ended with 0, 128 + N after signal N, else the exit code of the first rank
        that did not end well (128 + N when it was killed by signal N).

    Raises:
        UsageError: the port is taken, machine 0 does not answer, or the machines were given
            different counts.
    """
    ranks = rank_environments(counts, node_rank)
    common = {_PARENT: str(os.getpid()), STARTED_HERE: "1"}
    if len(counts) > 1:
        machines = _Machines(counts, node_rank, master_addr, master_port, timeout)
        return _Watch(command, [common | machines.environment | r for r in ranks], machines).run()
    with tempfile.TemporaryDirectory(prefix="ddp-") as folder:  # mode 0700
        common[RENDEZVOUS_FILE] = str(Path(folder) / "rendezvous")
        return _Watch(command, [common | rank for rank in ranks]).run()


def start_mpirun(nproc: int, command: Sequence[str]) -> int:
    """Runs `mpirun -n NPROC COMMAND` on this machine and waits for it.

    Ctrl-C and SIGTERM reach the ranks as SIGUSR1, which mpirun hands on and otherwise ignores.
    Told to stop by anything else, Open MPI kills its ranks after 0.2 s, too early for them to have
    written a checkpoint, and has no setting for that. A second one is such a SIGTERM.

    Returns:
        mpirun's exit code, which is that of the first rank that failed; 128 + N after signal N.

    Raises:
        UsageError: there is no mpirun.
    """
    full, defaults = mpirun_command(nproc, command)
    defaults[STARTED_HERE] = "1"
    for output in (1, 2):
        if os.isatty(output):
            defaults[f"{_TERMINAL}{output}"] = os.ttyname(output)
    _say(f"starting: {shlex.join(full)}")
    return _Mpirun(full, [defaults | os.environ]).run()


def die_with_parent() -> None:
    """In a rank: be killed when the process that started it is gone. Linux only.

    A no-op where no launcher waits for its ranks: one started by hand may outlive its shell.
    """
    parent = os.environ.get(_PARENT)
    launched = launcher() == "mpirun" or "TORCHELASTIC_RUN_ID" in os.environ
    if not sys.platform.startswith("linux") or (parent is None and not launched):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != int(parent):  # it was gone before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def write_to_terminal() -> None:
    """In a rank that `start_mpirun` started on a terminal: print there, not through mpirun.

    mpirun holds a line back until it is whole, and a progress bar never is. A no-op elsewhere.
    """
    for output in (1, 2):
        path = os.environ.get(f"{_TERMINAL}{output}")
        if path is not None:
            with suppress(OSError):
                terminal = os.open(path, os.O_WRONLY | os.O_NOCTTY)
                os.dup2(terminal, output)
                os.close(terminal)


class _Machines:
    """What the parents on several machines tell each other, through a store on machine 0."""

    def __init__(
        self, counts: Sequence[int], node_rank: int, addr: str, port: int, timeout: float
    ) -> None:
        self._node_rank, self._nodes = node_rank, len(counts)
        self._left = False
        if node_rank == 0:
            _check_ours(addr)
        else:
            _await_answer(addr, port, timeout)
        try:
            self._store = dist.TCPStore(
                addr,
                port,
                is_master=node_rank == 0,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=False,
            )
        except RuntimeError as error:
            problem = "is in use" if "EADDRINUSE" in str(error) else "cannot be used"
            raise UsageError(
                f"port {port} {problem} on machine 0: choose another with --master-port, on every "
                f"machine"
            ) from error
        # The ranks are clients of this store, as they are of torchrun's agent.
        self.environment = {
            "MASTER_ADDR": addr,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        self._agree(",".join(str(count) for count in counts))

    def _agree(self, counts: str) -> None:
        if self._store.add(f"machine {self._node_rank}", 1) > 1:
            raise UsageError(f"--node-rank {self._node_rank} was given on two machines")
        if self._node_rank == 0:
            self._store.set("counts", counts)
        first = self._store.get("counts").decode()
        if counts != first:
            self.tell_failure(f"--nproc is {counts} there and {first} on machine 0")
            raise UsageError(f"--nproc is {counts} here and {first} on machine 0: it must be equal")

    def tell_failure(self, text: str) -> None:
        with suppress(RuntimeError):  # machine 0 is gone: the others notice that by themselves
            self._store.set("failure", f"machine {self._node_rank}: {text}")

    def failure(self) -> str | None:
        """What another machine told, if anything."""
        try:
            return self._store.get("failure").decode() if self._store.check(["failure"]) else None
        except RuntimeError:
            return "machine 0 no longer answers"

    def may_leave(self) -> bool:
        """After this machine's last rank: machine 0 stays until no other needs its store."""
        try:
            if not self._left:
                self._store.add("left", 1)
                self._left = True
            return self._node_rank > 0 or self._store.add("left", 0) >= self._nodes
        except RuntimeError:
            return True  # machine 0 has gone first: after a failure, nobody waits


def _check_ours(addr: str) -> None:
    """On machine 0: torch would look for itself at a wrong address until its time is up."""
    try:
        found = socket.getaddrinfo(addr, 0, type=socket.SOCK_STREAM)
        for family, kind, *_, address in found:
            with suppress(OSError), socket.socket(family, kind) as ours:
                ours.bind(address)
                return
    except socket.gaierror:
        found = []
    raise UsageError(
        f"--master-addr must be an address of machine 0, which this is, got {addr}"
        + ("" if found else ", an unknown name")
    )


def _await_answer(addr: str, port: int, timeout: float) -> None:
    """On the other machines: here and not in torch, which would print its stack at each attempt."""
    end = time.monotonic() + timeout
    while True:
        try:
            with socket.create_connection((addr, port), max(0.1, end - time.monotonic())):
                return
        except OSError as error:
            if time.monotonic() > end:
                raise UsageError(
                    f"machine 0 did not answer at {addr}:{port} within {timeout:g} s "
                    f"({error.strerror or error}): start the command with --node-rank 0 there, and "
                    f"check --master-addr, --master-port and the firewall"
                ) from error
            time.sleep(4 * _POLL_S)


class _Watch:
    """The ranks of this machine as child processes that end together."""

    # What they are sent on the first Ctrl-C or SIGTERM, on the second, and so on.
    ladder: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGKILL)

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[dict[str, str]],
        machines: _Machines | None = None,
    ) -> None:
        self._command = list(command)
        self._environments = environments
        self._machines = machines
        self._children: list[subprocess.Popen[bytes]] = []
        self._received: list[int] = []
        self._passed_on = 0

    def run(self) -> int:
        handlers = {s: signal.signal(s, self._remember) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            for environment in self._environments:
                self._children.append(self._start(os.environ | environment))
            return self._wait()
        finally:
            self._end_all()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _start(self, environ: dict[str, str]) -> "subprocess.Popen[bytes]":
        # A session of its own: Ctrl-C reaches it once, through us.
        return subprocess.Popen(
            self._command, env=environ, stdin=subprocess.DEVNULL, start_new_session=True
        )

    def _remember(self, number: int, frame: FrameType | None) -> None:
        # Passed on by `_wait`, when all children are there: a signal may come between two starts.
        self._received.append(number)

    def _pass_on(self) -> None:
        """Acts on the signals that have come since the last call."""
        while self._passed_on < len(self._received):
            if self._passed_on == 0:
                _say("stopping all ranks; once more ends them at once")
            self._signal(self.ladder[min(self._passed_on, len(self.ladder) - 1)])
            self._passed_on += 1

    def _wait(self) -> int:
        """Until all children have ended well, or one has not; returns the exit code."""
        polls = 0
        while True:
            self._pass_on()
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
            polls += 1
            if self._machines is not None and polls % 10 == 0:
                elsewhere = self._machines.failure()
                if elsewhere is not None:
                    _say(f"stopped: {elsewhere}")
                    return 1
            time.sleep(_POLL_S)

    def _stopped(self) -> int:
        name = signal.Signals(self._received[0]).name
        if self._machines is not None:
            self._machines.tell_failure(f"stopped by {name}")
        return 128 + self._received[0]

    def _failed(self, index: int, code: int) -> int:
        rank = self._environments[index].get("RANK")
        who = Path(self._command[0]).name if rank is None else f"rank {rank}"
        text = f"{who} ended with exit code {code}"
        if code < 0:
            text = f"{who} was killed by {signal.Signals(-code).name}"
            _say(f"{text}; all other ranks were stopped")
        if self._machines is not None:
            self._machines.tell_failure(text)
        return 128 - code if code < 0 else code

    def _end_all(self) -> None:
        """Asks what still runs to stop, then kills it. Idempotent."""
        self._signal(signal.SIGTERM)
        self._await_end(_GRACE_S)
        self._signal(signal.SIGKILL)
        for child in self._children:
            child.wait()

    def _await_end(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while any(child.poll() is None for child in self._children) and time.monotonic() < end:
            self._pass_on()
            time.sleep(_POLL_S)

    def _signal(self, number: signal.Signals) -> None:
        for child in self._children:
            if child.poll() is None:
                child.send_signal(number)


class _Mpirun(_Watch):
    """One child, mpirun, which watches the ranks itself."""

    ladder = (signal.SIGUSR1, signal.SIGTERM, signal.SIGKILL)

    def _start(self, environ: dict[str, str]) -> "subprocess.Popen[bytes]":
        libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
        return subprocess.Popen(
            self._command,
            env=environ,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            # mpirun cannot ask for it by itself, as ranks do in `die_with_parent`.
            preexec_fn=lambda: libc and libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
