"""Several machines without a launcher: their supervisors agree, fail and leave together."""

import errno
import ipaddress
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from ddp_from_scratch.errors import UsageError
from ddp_from_scratch.launch import gate
from ddp_from_scratch.launch.environment import MACHINE_0
from ddp_from_scratch.launch.gate import StrangerError
from ddp_from_scratch.launch.rank_process import write_line

SECRET = "DDP_SECRET"
_LEAST_SECRET = 16  # characters

# Seconds between two attempts to reach machine 0, and between two signs of life.
_RETRY_S = 0.2
_BEAT_S = 0.5

# Seconds for each address of machine 0 to answer before the next is tried, and all of them again.
_ATTEMPT_S = 5.0

# Seconds to get a last word through, where the network may be gone.
_LAST_WORD_S = 2.0


class Meeting:
    """A store on machine 0 that the supervisors of several machines, and their ranks, all reach.

    Takes the arguments of `start_ranks`; `goes_on` is True where `max_restarts` was given.

    Attributes:
        store: the store.
        environment: for the ranks.

    Raises:
        UsageError: the port is taken, `addr` is not machine 0's, is loopback there by another name
            or does not answer as machine 0 does, the secrets differ, or only some go on.
    """

    def __init__(self, node_rank: int, addr: str, port: int, timeout: float, goes_on: bool) -> None:
        self._node_rank, self._timeout = node_rank, timeout
        self._listeners: list[socket.socket] = []
        local = self._open(addr, port) if node_rank == 0 else self._reach(addr, port)
        # The ranks are clients of this store, as they are of torchrun's agent.
        self.environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(local),
            MACHINE_0: addr,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        mode = "given" if goes_on else "not given"
        if node_rank == 0:
            self.store.set("--elastic", mode)
        elif (there := self.store.get("--elastic").decode()) != mode:
            self._set_failure(f"--elastic was {mode} there and {there} on machine 0")
            raise UsageError(
                f"--elastic was {mode} here and {there} on machine 0: it must be the same on all"
            )

    # Opening the store, or a way to it: both return its port on this machine's loopback -----------

    def _open(self, addr: str, port: int) -> int:
        # First, since it may fail: only then is a new secret printed.
        self._listeners = _listen(addr, port)
        secret = _secret_or_new(addr, port)
        # On loopback: from outside the store is reached through the gate alone.
        inside = socket.create_server(("127.0.0.1", 0))
        local: int = inside.getsockname()[1]
        self._open_store(local, inside.detach())

        def to_the_store(visitor: socket.socket) -> socket.socket:
            gate.check(visitor, secret)
            return socket.create_connection(("127.0.0.1", local))

        for listener in self._listeners:
            gate.forward(listener, to_the_store)
        return local

    def _reach(self, addr: str, port: int) -> int:
        secret = _secret()
        if secret is None:
            raise UsageError(
                f"{SECRET} is not set: machine 0 printed one when it started; or set one of your "
                f"own on every machine"
            )
        answers = _await_answer(addr, port, secret, self._timeout)

        def to_machine_0(rank: socket.socket) -> socket.socket:
            connection = socket.create_connection(answers, self._timeout)
            gate.prove(connection, secret, time.monotonic() + self._timeout)
            return connection

        listener = socket.create_server(("127.0.0.1", 0))
        self._listeners = [listener]
        gate.forward(listener, to_machine_0)
        local: int = listener.getsockname()[1]
        self._open_store(local)
        return local

    def _open_store(self, port: int, listening: int | None = None) -> None:
        """Opens the store itself on a socket that listens already, or else a connection to it."""
        self.store = dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=listening is not None,
            timeout=timedelta(seconds=self._timeout),
            wait_for_workers=False,
            master_listen_fd=listening,
        )

    def _set_failure(self, text: str) -> None:
        self.store.set("failure", f"machine {self._node_rank}: {text}")
        # Its answer says that the word before it has arrived: this process, through which both go,
        # may end at once.
        self.store.check(["failure"])

    def close(self) -> None:
        """Ends the connections. Idempotent."""
        for listener in self._listeners:
            # A thread that waits in `accept` would keep it open.
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()


class Machines(Meeting):
    """Messages between the supervisors of machines that all end when a rank fails.

    Raises:
        UsageError: the machines were given different counts or the same position; see `Meeting`.
    """

    def __init__(
        self, counts: Sequence[int], node_rank: int, addr: str, port: int, timeout: float
    ) -> None:
        super().__init__(node_rank, addr, port, timeout, goes_on=False)
        self._nodes = len(counts)
        self._agree(",".join(str(count) for count in counts))
        # No lock: the supervisor alone sets `_last_word` and `_leaving`, the thread the others.
        self._failure: str | None = None  # of another machine, or the end of machine 0
        self._last_word: str | None = None  # of this one
        self._leaving = self._may_leave = False
        self._answered = time.monotonic()
        # Of each machine: how many, and when the last came by this machine's clock.
        self._beats: dict[int, tuple[int, float]] = {}
        self._wake, self._delivered, self._closed = (threading.Event() for _ in range(3))
        # A thread does the talking: a call to a store on a machine that is gone does not return,
        # and the main thread, waiting in it, would hear no signal.
        self._thread = threading.Thread(target=self._talk, daemon=True)
        self._thread.start()

    def _agree(self, counts: str) -> None:
        if self.store.add(f"machine {self._node_rank}", 1) > 1:
            raise UsageError(f"--node-rank {self._node_rank} was given on two machines")
        if self._node_rank == 0:
            self.store.set("counts", counts)
        first = self.store.get("counts").decode()
        if counts != first:
            # Else the others would wait for this machine's ranks until their timeout.
            self._set_failure(f"--nproc is {counts} there and {first} on machine 0")
            raise UsageError(f"--nproc is {counts} here and {first} on machine 0: it must be equal")

    # The supervisor's questions and messages; none waits for another machine ----------------------

    def tell_failure(self, text: str) -> None:
        """Sends the other machines the reason why this one has stopped; gives up in a moment."""
        self._last_word = text
        self._wake.set()
        self._delivered.wait(_LAST_WORD_S)

    def failure(self) -> str | None:
        """The reason why another machine has stopped or is gone; None while all is well."""
        # Here and not in the thread, which may be waiting for machine 0 itself.
        silence = time.monotonic() - self._answered
        if self._failure is None and silence > self._timeout:
            return _lost(0, silence)
        return self._failure

    def may_leave(self) -> bool:
        """Announces that this machine's ranks have ended; True once its supervisor may, too."""
        if not self._leaving:
            self._leaving = True
            self._wake.set()
        return self._may_leave

    def close(self) -> None:
        """Ends the thread and the connections. Idempotent."""
        self._closed.set()
        self._wake.set()
        self._thread.join(_LAST_WORD_S)
        super().close()

    # The thread -----------------------------------------------------------------------------------

    def _talk(self) -> None:
        left = False
        while not self._closed.is_set():
            try:
                if self._last_word is not None:
                    self._set_failure(self._last_word)
                    self._delivered.set()
                if self._leaving and not left:
                    # The sum keeps machine 0's store open, the other excuses this one's silence.
                    self.store.add("left", 1)
                    self.store.add(f"left {self._node_rank}", 1)
                    left = True
                self._listen_to_others()
            except RuntimeError:  # machine 0 has gone: after a failure, or once all may leave
                self._failure, self._may_leave = "machine 0 no longer answers", self._leaving
                self._delivered.set()
                return
            self._answered = time.monotonic()
            # Machine 0 stays until no other needs its store.
            self._may_leave = left and (
                self._node_rank > 0 or self.store.add("left", 0) >= self._nodes
            )
            self._wake.wait(_BEAT_S)
            self._wake.clear()

    def _listen_to_others(self) -> None:
        self.store.add(f"alive {self._node_rank}", 1)
        if self.store.check(["failure"]):
            self._failure = self.store.get("failure").decode()
        # Machine 0 watches the others; they notice its own end by a store that does not answer.
        for other in range(1, self._nodes) if self._node_rank == 0 else ():
            count, now = self.store.add(f"alive {other}", 0), time.monotonic()
            before, since = self._beats.get(other, (0, now))
            self._beats[other] = (before, since) if count == before else (count, now)
            # A count of 0 is a machine that has not come yet, and whose silence means nothing.
            silence = now - self._beats[other][1]
            if count and silence > self._timeout and not self.store.add(f"left {other}", 0):
                self._failure = _lost(other, silence)


def _lost(machine: int, silence: float) -> str:
    return f"lost the other ranks: machine {machine} has not answered for {silence:.0f} s"


def _secret() -> bytes | None:
    """Reads the user's secret; None without one."""
    secret = os.environ.get(SECRET)
    if secret is not None and len(secret) < _LEAST_SECRET:
        raise UsageError(
            f"{SECRET} must have {_LEAST_SECRET} characters or more, got {len(secret)}: unset it "
            f"on machine 0, which then makes one"
        )
    return None if secret is None else secret.encode()


def _secret_or_new(addr: str, port: int) -> bytes:
    """The user's secret, or a new one, which machine 0 prints for the others."""
    secret = _secret()
    if secret is None:
        made = secrets.token_hex(16)
        write_line(
            f"machine 0 waits at {addr}:{port}; on the others, before the command: "
            f"export {SECRET}={made}",
            sys.stderr,
        )
        secret = made.encode()
    return secret


def _listen(addr: str, port: int) -> list[socket.socket]:
    """Listens on machine 0, at this address and no other."""
    not_here = f"--master-addr must be an address of machine 0, which this is, got {addr}"
    try:
        found = socket.getaddrinfo(addr, port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        raise UsageError(f"{not_here}, an unknown name") from None
    _require_reachable(addr, [str(address[0]) for *_, address in found])
    listeners = []
    for family, address in dict.fromkeys((family, address) for family, *_, address in found):
        try:
            listeners.append(socket.create_server(address, family=family))
        except OSError as error:
            # Another machine's address, or one of a family that is off here: another may do.
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                continue
            problem = "is in use" if error.errno == errno.EADDRINUSE else "cannot be used"
            raise UsageError(
                f"port {port} {problem} on machine 0: choose another with --master-port, on every "
                f"machine"
            ) from error
    if not listeners:
        raise UsageError(not_here)
    return listeners


def _require_reachable(addr: str, found: Sequence[str]) -> None:
    """Refuses a name that means loopback here without saying so."""
    # Debian gives a machine's own name the address 127.0.1.1, which no other machine reaches.
    on_purpose = addr in found or "localhost" in addr
    if not on_purpose and all(ipaddress.ip_address(one).is_loopback for one in found):
        raise UsageError(
            f"--master-addr {addr} is {found[0]} on this machine: give the address that the other "
            f"machines use"
        )


def _await_answer(addr: str, port: int, secret: bytes, timeout: float) -> tuple[str, int]:
    """Waits for machine 0, which may be started last; returns the address that answers."""
    end = time.monotonic() + timeout
    while True:
        try:
            patience = min(_ATTEMPT_S, max(0.1, end - time.monotonic()))
            with socket.create_connection((addr, port), patience) as there:
                gate.prove(there, secret, end)
                host, port, *_ = there.getpeername()
                return host, port
        except StrangerError as error:
            # Something is there already, so waiting does not help.
            raise UsageError(
                f"{addr}:{port} does not answer as machine 0 does: {error}. Check {SECRET}, "
                f"--master-addr and --master-port"
            ) from error
        except OSError as error:
            if time.monotonic() > end:
                raise UsageError(
                    f"machine 0 did not answer at {addr}:{port} within {timeout:g} s "
                    f"({error.strerror or error}): start the command with --node-rank 0 there, and "
                    f"check --master-addr, --master-port and the firewall"
                ) from error
            time.sleep(_RETRY_S)
