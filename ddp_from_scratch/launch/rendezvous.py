"""Lets several machines meet without a launcher: a store on machine 0, protected by a secret.

Machine 0 keeps its store on loopback and opens a gate on the address that the other machines use:

    rank -> loopback -> its machine's agent  ==>  gate -> loopback -> store
                                            proof

Each connection begins with a challenge and a response in both directions (HMAC-SHA256). The data
after that is neither encrypted nor signed.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from ddp_from_scratch.common.errors import UsageError
from ddp_from_scratch.launch.environment import MACHINE_0
from ddp_from_scratch.launch.rank_process import flush

SECRET = "DDP_SECRET"
_LEAST_SECRET = 16  # characters

_RETRY_S = 0.2  # between two attempts to reach machine 0, or to accept a connection
_ATTEMPT_S = 5.0  # for an address of machine 0 to answer, before the next one is tried
_PATIENCE_S = 10.0  # for a client's proof
_GREETING = b"ddp_from_scratch rendezvous 1\n"
_NONCE_BYTES = _PROOF_BYTES = 32


@contextmanager
def open_store(
    node_rank: int, addr: str, port: int, timeout: float
) -> Iterator[tuple[dist.Store, dict[str, str]]]:
    """Yields machine 0's store, for the agents and ranks of all, and variables for the ranks."""
    # May fail, so a new secret is printed only afterwards.
    outside = _listen(addr, port) if node_rank == 0 else None
    secret = _secret(node_rank, addr, port)
    if node_rank > 0:
        answers = _await_answer(addr, port, secret, timeout)
    # Where machine 0's store listens; on the others, what their agents forward to its gate.
    inside = socket.create_server(("127.0.0.1", 0))
    local: int = inside.getsockname()[1]

    def onward(visitor: socket.socket) -> socket.socket:
        if node_rank == 0:
            check(visitor, secret)
            return socket.create_connection(("127.0.0.1", local))
        connection = socket.create_connection(answers, timeout)
        prove(connection, secret, time.monotonic() + timeout)
        return connection

    listener = outside or inside
    _start(_forward, listener, onward)
    for_ranks = {  # which are clients of this store as of torchrun's agent
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(local),
        MACHINE_0: addr,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    try:
        store = dist.TCPStore(
            "127.0.0.1",
            local,
            is_master=node_rank == 0,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=inside.detach() if node_rank == 0 else None,
        )
        yield store, for_ranks
    finally:
        with suppress(OSError):  # wakes the thread in `accept`, which would keep the socket open
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def _secret(node_rank: int, addr: str, port: int) -> bytes:
    """Returns the user's secret. Without one, machine 0 makes one and prints it for the others."""
    secret = os.environ.get(SECRET)
    if secret is None:
        if node_rank > 0:
            raise UsageError(
                f"{SECRET} is not set: machine 0 printed one when it started; or set one of your "
                f"own on every machine"
            )
        secret = secrets.token_hex(16)
        # Printed and not logged, since a program may send its log elsewhere.
        flush(
            sys.stderr,
            f"machine 0 waits at {addr}:{port}; on the others, before the command: "
            f"export {SECRET}={secret}\n",
        )
    if len(secret) < _LEAST_SECRET:
        raise UsageError(
            f"{SECRET} must have {_LEAST_SECRET} characters or more, got {len(secret)}: unset it "
            f"on machine 0, which then makes one"
        )
    return secret.encode()


def _listen(addr: str, port: int) -> socket.socket:
    not_here = f"--master-addr must be an address of machine 0, which this is, got {addr}"
    try:
        found = socket.getaddrinfo(addr, port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        raise UsageError(f"{not_here}, an unknown name") from None
    # Debian maps a machine's own name to 127.0.1.1, which no other machine can reach.
    hosts = [str(address[0]) for *_, address in found]
    on_purpose = addr in hosts or "localhost" in addr
    if not on_purpose and all(ipaddress.ip_address(host).is_loopback for host in hosts):
        raise UsageError(
            f"--master-addr {addr} is {hosts[0]} on this machine: give the address that the other "
            f"machines use"
        )
    for family, *_, address in found:
        try:
            return socket.create_server(address, family=family)
        except OSError as error:
            # The address is another machine's, or its family is off here; the next may work.
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                continue
            problem = "is in use" if error.errno == errno.EADDRINUSE else "cannot be used"
            raise UsageError(
                f"port {port} {problem} on machine 0: choose another with --master-port, on every "
                f"machine"
            ) from error
    raise UsageError(not_here)


def _await_answer(addr: str, port: int, secret: bytes, timeout: float) -> tuple[str, int]:
    """Waits for machine 0, which may start last; returns the address that answers."""
    end, refusals = time.monotonic() + timeout, 0
    while True:
        # Looked at before the attempt, in which this machine may stand still.
        is_last = time.monotonic() > end
        try:
            with socket.create_connection((addr, port), min(_ATTEMPT_S, timeout)) as there:
                prove(there, secret, time.monotonic() + min(_PATIENCE_S, timeout))
                host, port, *_ = there.getpeername()
                return host, port
        except StrangerError as error:
            # Machine 0 also closes a connection when it ends, or when this machine stood still.
            refusals += 1
            if refusals == 2:
                raise UsageError(
                    f"{addr}:{port} does not answer as machine 0 does: {error}. Check {SECRET}, "
                    f"--master-addr and --master-port"
                ) from error
        except OSError as error:
            if is_last:
                raise UsageError(
                    f"machine 0 did not answer at {addr}:{port} within {timeout:g} s "
                    f"({error.strerror or error}): start the command with --node-rank 0 there, and "
                    f"check --master-addr, --master-port and the firewall"
                ) from error
        time.sleep(_RETRY_S)


# The gate -----------------------------------------------------------------------------------------


class StrangerError(Exception):
    """The other end is not a machine of this job, or does not know its secret."""


def prove(connection: socket.socket, secret: bytes, end: float) -> None:
    """Proves to machine 0 that this side knows the secret, and verifies that machine 0 does."""
    mine = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(_GREETING + mine)
    if _receive(connection, len(_GREETING), end) != _GREETING:
        raise StrangerError("something else listens there")
    both = mine + _receive(connection, _NONCE_BYTES, end)
    connection.sendall(_proof(secret, b"machine", both))
    proof = _receive(connection, _PROOF_BYTES, end)
    if not hmac.compare_digest(proof, _proof(secret, b"machine 0", both)):
        raise StrangerError("it does not have the same DDP_SECRET")
    connection.settimeout(None)


def check(connection: socket.socket, secret: bytes) -> None:
    """The counterpart of `prove`, on machine 0."""
    end = time.monotonic() + _PATIENCE_S
    if _receive(connection, len(_GREETING), end) != _GREETING:
        raise StrangerError("not one of us")
    mine = secrets.token_bytes(_NONCE_BYTES)
    both = _receive(connection, _NONCE_BYTES, end) + mine
    connection.sendall(_GREETING + mine)
    proof = _receive(connection, _PROOF_BYTES, end)
    if not hmac.compare_digest(proof, _proof(secret, b"machine", both)):
        raise StrangerError("it does not know the secret")
    connection.sendall(_proof(secret, b"machine 0", both))  # last: a stranger gets none
    connection.settimeout(None)


def _forward(listener: socket.socket, onward: Callable[[socket.socket], socket.socket]) -> None:
    """Forwards each connection to the one that `onward` opens, until `listener` is closed."""
    while listener.fileno() >= 0:
        try:
            connection, _ = listener.accept()
        except OSError:
            time.sleep(_RETRY_S)  # a closed listener ends the loop; other errors must not spin
            continue
        _start(_join, connection, onward)


def _join(connection: socket.socket, onward: Callable[[socket.socket], socket.socket]) -> None:
    with connection, suppress(OSError, StrangerError), onward(connection) as other:
        back = _start(_pump, other, connection)
        _pump(connection, other)
        back.join()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    # `shutdown`, not `close`: it wakes the other direction's thread, which waits in `recv`.
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _receive(connection: socket.socket, count: int, end: float) -> bytes:
    received = b""
    while len(received) < count:
        connection.settimeout(max(end - time.monotonic(), 0.01))  # 0 would be non-blocking
        data = connection.recv(count - len(received))
        if not data:
            break
        received += data
    return received


def _proof(secret: bytes, who: bytes, nonces: bytes) -> bytes:
    # Both ends' nonces, so that no proof can be replayed, and the side's name against reflection.
    return hmac.digest(secret, who + b"\0" + nonces, hashlib.sha256)


def _start(function: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread
