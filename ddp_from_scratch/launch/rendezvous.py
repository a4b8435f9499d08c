"""How several machines meet without a launcher: a store on machine 0 for those with a secret.

Machine 0 keeps its store on loopback and opens a gate on the address that the others are given:

    rank -> loopback -> its machine's agent  ==>  gate -> loopback -> store
                                            proof

A connection begins with a challenge and a response in both directions (HMAC-SHA256). The rest of
it is neither encrypted nor signed.
"""

import errno
import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from ddp_from_scratch.errors import UsageError
from ddp_from_scratch.launch.environment import MACHINE_0
from ddp_from_scratch.launch.rank_process import write_line

SECRET = "DDP_SECRET"
_LEAST_SECRET = 16  # characters

_RETRY_S = 0.2  # between two attempts to reach machine 0
# For each address of machine 0 to answer before the next is tried, and all of them again.
_ATTEMPT_S = 5.0

_GREETING = b"ddp_from_scratch rendezvous 1\n"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_PATIENCE_S = 10.0  # for a visitor's proof
_PAUSE_S = 0.2  # from a failed `accept` to the next


class Rendezvous:
    """A store on machine 0 that the agents of several machines, and their ranks, all reach.

    Takes the arguments of `start_ranks`.

    Attributes:
        store: the store.
        environment: for the ranks.

    Raises:
        UsageError: the port is taken, `addr` is not machine 0's, is loopback there by another name
            or does not answer as machine 0 does, or the secrets differ.
    """

    def __init__(self, node_rank: int, addr: str, port: int, timeout: float) -> None:
        self._timeout = timeout
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

    def _open(self, addr: str, port: int) -> int:
        """Opens the store; returns its port on loopback."""
        # First, since it may fail: only then is a new secret printed.
        self._listeners = _listen(addr, port)
        secret = _secret_or_new(addr, port)
        # On loopback: from outside the store is reached through the gate alone.
        inside = socket.create_server(("127.0.0.1", 0))
        local: int = inside.getsockname()[1]
        self._open_store(local, inside.detach())

        def to_the_store(visitor: socket.socket) -> socket.socket:
            check(visitor, secret)
            return socket.create_connection(("127.0.0.1", local))

        for listener in self._listeners:
            forward(listener, to_the_store)
        return local

    def _reach(self, addr: str, port: int) -> int:
        """Opens a way to machine 0's store; returns its port on loopback."""
        secret = _secret()
        if secret is None:
            raise UsageError(
                f"{SECRET} is not set: machine 0 printed one when it started; or set one of your "
                f"own on every machine"
            )
        answers = _await_answer(addr, port, secret, self._timeout)

        def to_machine_0(rank: socket.socket) -> socket.socket:
            connection = socket.create_connection(answers, self._timeout)
            prove(connection, secret, time.monotonic() + self._timeout)
            return connection

        listener = socket.create_server(("127.0.0.1", 0))
        self._listeners = [listener]
        forward(listener, to_machine_0)
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

    def close(self) -> None:
        """Ends the connections. Idempotent."""
        for listener in self._listeners:
            # A thread that waits in `accept` would keep it open.
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()


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
                prove(there, secret, end)
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


# The gate -----------------------------------------------------------------------------------------


class StrangerError(Exception):
    """The other end does not speak as a machine of this job, or does not know its secret."""


def prove(connection: socket.socket, secret: bytes, end: float) -> None:
    """Proves to machine 0 that this side knows the secret, and has machine 0 prove it, too.

    Takes until `end`, on `time.monotonic`'s clock, at most.

    Raises:
        StrangerError: something else answered, or it refused.
        OSError: nothing answered in time.
    """
    mine = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(_GREETING + mine)
    greeting = _receive(connection, len(_GREETING), end)
    if greeting != _GREETING:
        lines = greeting.decode("ascii", "backslashreplace").splitlines()
        answer = f"said {lines[0]!r}" if lines else "hung up"
        raise StrangerError(f"something else listens there (it {answer})")
    both = mine + _receive(connection, _NONCE_BYTES, end)
    connection.sendall(_proof(secret, b"machine", both))
    proof = _receive(connection, _PROOF_BYTES, end)
    if not hmac.compare_digest(proof, _proof(secret, b"machine 0", both)):
        raise StrangerError("it does not have the same DDP_SECRET")
    connection.settimeout(None)


def check(connection: socket.socket, secret: bytes) -> None:
    """The counterpart of `prove`, on machine 0.

    Raises:
        StrangerError: the visitor does not know the secret.
        OSError: the visitor has hung up, or takes too long.
    """
    end = time.monotonic() + _PATIENCE_S
    if _receive(connection, len(_GREETING), end) != _GREETING:
        raise StrangerError("not one of us")
    mine = secrets.token_bytes(_NONCE_BYTES)
    both = _receive(connection, _NONCE_BYTES, end) + mine
    connection.sendall(_GREETING + mine)
    proof = _receive(connection, _PROOF_BYTES, end)
    if not hmac.compare_digest(proof, _proof(secret, b"machine", both)):
        raise StrangerError("it does not know the secret")
    # Only now: a stranger gets no proof to work on.
    connection.sendall(_proof(secret, b"machine 0", both))
    connection.settimeout(None)


def forward(listener: socket.socket, onward: Callable[[socket.socket], socket.socket]) -> None:
    """Joins each visitor's connection, in threads, with the one that `onward` opens for it.

    Until `listener` is closed. `onward` may raise OSError or StrangerError.
    """

    def accept() -> None:
        while listener.fileno() >= 0:
            try:
                connection, _ = listener.accept()
            except OSError:
                # Closed, which the loop notices. Or too many files are open, or the visitor has
                # gone again: the pause keeps such errors from taking a core.
                time.sleep(_PAUSE_S)
                continue
            _start(_join, connection, onward)

    _start(accept)


def _join(connection: socket.socket, onward: Callable[[socket.socket], socket.socket]) -> None:
    with connection, suppress(OSError, StrangerError), onward(connection) as other:
        back = _start(_pump, other, connection)
        _pump(connection, other)
        back.join()


def _pump(source: socket.socket, target: socket.socket) -> None:
    """Copies bytes until one end closes, then closes both."""
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    # Not `close`: the other direction's thread waits in `recv` on one of them, and this wakes it.
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _receive(connection: socket.socket, count: int, end: float) -> bytes:
    """Receives `count` bytes, or fewer where the other end hung up."""
    received = b""
    while len(received) < count:
        # A timeout of 0 would mean not to wait at all, and a negative one is refused.
        connection.settimeout(max(end - time.monotonic(), 0.01))
        data = connection.recv(count - len(received))
        if not data:
            break
        received += data
    return received


def _proof(secret: bytes, who: bytes, nonces: bytes) -> bytes:
    # Over both ends' random numbers: a proof that was heard once is of no use later. With the name
    # of its side: one that is sent back is not the other side's.
    return hmac.digest(secret, who + b"\0" + nonces, hashlib.sha256)


def _start(function: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread
