"""The parent of the ranks on one machine: starts them, watches them, ends them together.

Used where no launcher is: `python run.py`, and one such command on each of several machines.
"""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from .errors import UsageError
from .launch import STARTED_HERE, rank_environments

RENDEZVOUS_FILE = "DDP_RENDEZVOUS_FILE"
_PARENT = "DDP_PARENT_PID"

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

    The first rank that fails ends all others, on every machine. Ctrl-C and SIGTERM are passed on
    to the ranks once, which then stop together; a second one kills them.

    Args:
        command: program and arguments; each rank gets torchrun's variables in its environment.
        counts: number of processes on each machine.
        node_rank: this machine's position in `counts`.
        master_addr: where machine 0 can be reached.
        master_port: the port that machine 0 listens on.
        timeout: seconds to wait for the other machines.

    Returns:
        0 when every rank ended with 0, else the exit code of the first that did not (128 + N when
        it was ended by signal N).

    Raises:
        UsageError: the port is taken, machine 0 does not answer, or the machines were given
            different counts.
    """
    ranks = rank_environments(counts, node_rank)
    common = {_PARENT: str(os.getpid()), STARTED_HERE: "1"}
    with tempfile.TemporaryDirectory(prefix="ddp-") as folder:  # mode 0700
        if len(counts) == 1:
            common[RENDEZVOUS_FILE] = str(Path(folder) / "rendezvous")
            return _Watch(command, [common | rank for rank in ranks], None).run()
        machines = _Machines(counts, node_rank, master_addr, master_port, timeout)
        common |= machines.environment
        return _Watch(command, [common | rank for rank in ranks], machines).run()


def die_with_parent() -> None:
    """In a rank: be killed when the process that started the ranks is gone. Linux only.

    A no-op where `start_ranks` did not start this process.
    """
    parent = os.environ.get(_PARENT)
    if parent is None or not sys.platform.startswith("linux"):
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != int(parent):  # it was gone before we asked
        os.kill(os.getpid(), signal.SIGKILL)


class _Machines:
    """What the parents on several machines tell each other, through a store on machine 0."""

    def __init__(
        self, counts: Sequence[int], node_rank: int, addr: str, port: int, timeout: float
    ) -> None:
        self._node_rank, self._nodes = node_rank, len(counts)
        try:
            self._store = dist.TCPStore(
                addr,
                port,
                is_master=node_rank == 0,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=False,
            )
        except (dist.DistNetworkError, dist.DistStoreError, RuntimeError) as error:
            raise UsageError(_store_error(addr, port, node_rank, timeout, error)) from error
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
            raise UsageError(f"--nproc is {counts} here and {first} on machine 0: it must be equal")

    def tell_failure(self, text: str) -> None:
        try:
            self._store.set("failure", text)
        except RuntimeError:
            pass  # machine 0 is gone; the others notice that by themselves

    def failure(self) -> str | None:
        """What another machine told, if anything."""
        try:
            return self._store.get("failure").decode() if self._store.check(["failure"]) else None
        except RuntimeError:
            return "machine 0 no longer answers"

    def leave(self) -> None:
        """After the last rank: machine 0 stays until no other needs its store."""
        try:
            self._store.add("left", 1)
            while self._node_rank == 0 and self._store.add("left", 0) < self._nodes:
                if self.failure():
                    return
                time.sleep(_POLL_S)
        except RuntimeError:
            pass  # machine 0 has gone first: after a failure, nobody waits


def _store_error(addr: str, port: int, node_rank: int, timeout: float, error: Exception) -> str:
    if node_rank == 0 and ("EADDRINUSE" in str(error) or "already in use" in str(error)):
        return f"port {port} is in use on this machine: choose another with --master-port"
    if node_rank == 0:
        return f"cannot listen on {addr}:{port}: --master-addr must be an address of this machine"
    return (
        f"machine 0 did not answer at {addr}:{port} within {timeout:g} s: start the command with "
        f"--node-rank 0 there, and check --master-addr, --master-port and the firewall"
    )


class _Watch:
    """The ranks of this machine as child processes."""

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[dict[str, str]],
        machines: _Machines | None,
    ) -> None:
        self._command = list(command)
        self._environments = environments
        self._machines = machines
        self._children: list[subprocess.Popen[bytes]] = []
        self._signals = 0

    def run(self) -> int:
        handlers = {s: signal.signal(s, self._pass_on) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            for environment in self._environments:
                # A session of its own: Ctrl-C reaches the ranks once, through us.
                self._children.append(
                    subprocess.Popen(
                        self._command,
                        env=os.environ | environment,
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,
                    )
                )
            return self._wait()
        finally:
            self._end_all()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        again = self._signals > 1
        if not again:
            print("stopping all ranks; once more ends them at once", file=sys.stderr, flush=True)
        self._signal(signal.SIGKILL if again else signal.Signals(number))

    def _wait(self) -> int:
        polls = 0
        while True:
            codes = [child.poll() for child in self._children]
            failed = next((i for i, code in enumerate(codes) if code), None)
            if failed is not None:
                return self._failed(failed, codes[failed] or 0)
            if all(code == 0 for code in codes):
                if self._machines is not None:
                    self._machines.leave()
                return 0
            polls += 1
            if self._machines is not None and polls % 10 == 0:
                elsewhere = self._machines.failure()
                if elsewhere is not None:
                    print(f"stopped: {elsewhere}", file=sys.stderr, flush=True)
                    return 1
            time.sleep(_POLL_S)

    def _failed(self, index: int, code: int) -> int:
        rank = self._environments[index]["RANK"]
        text = f"rank {rank} ended with exit code {code}"
        if code < 0:
            text = f"rank {rank} was killed by {signal.Signals(-code).name}"
        if self._signals:
            # Asked to stop, they end one after another with the signal's code: not a failure.
            self._await_end(float("inf"))
        elif code < 0:
            print(f"{text}; the other ranks were stopped", file=sys.stderr, flush=True)
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
            time.sleep(_POLL_S)

    def _signal(self, number: signal.Signals) -> None:
        for child in self._children:
            if child.poll() is None:
                child.send_signal(number)
