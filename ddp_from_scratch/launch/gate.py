"""Connections between machines whose two ends know the job's secret, or nothing gets through.

Machine 0 keeps its store on loopback and opens a gate on the address that the others are given:

    rank -> loopback -> its machine's parent  ==>  gate -> loopback -> store
                                            proof

A connection begins with a challenge and a response in both directions (HMAC-SHA256 over two random
numbers, so that what was heard once cannot be used again). What follows is neither encrypted nor
signed.
"""

import hashlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

_GREETING = b"ddp_from_scratch rendezvous 1\n"
_NONCE_BYTES = 32
_PROOF_BYTES = 32

# Seconds for somebody who has connected to prove that he may.
_PATIENCE_S = 10.0

# Seconds until the next are let in, after one could not be.
_PAUSE_S = 0.2


class StrangerError(Exception):
    """The other end does not speak as a machine of this job, or does not know its secret."""


def prove(connection: socket.socket, secret: bytes, end: float) -> None:
    """On the side that has connected: shows machine 0 that it knows the secret, and has it shown.

    Args:
        connection: to the gate.
        secret: of the job.
        end: on `time.monotonic`'s clock.

    Raises:
        StrangerError: something else answered, or it refused.
        OSError: nothing answered in time.
    """
    mine = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(_GREETING + mine)
    greeting = _receive(connection, len(_GREETING), end)
    if greeting != _GREETING:
        said = greeting.decode("ascii", "backslashreplace").splitlines()
        raise StrangerError(
            f"something else listens there (it said {said[0]!r})"
            if said
            else "something else listens there (it hung up)"
        )
    both = mine + _receive(connection, _NONCE_BYTES, end)
    connection.sendall(_proof(secret, b"machine", both))
    if not hmac.compare_digest(
        _receive(connection, _PROOF_BYTES, end), _proof(secret, b"machine 0", both)
    ):
        raise StrangerError("it does not have the same DDP_SECRET")
    connection.settimeout(None)


def check(connection: socket.socket, secret: bytes) -> None:
    """On machine 0's side: as `prove`.

    Raises:
        StrangerError: whoever has connected does not know the secret.
        OSError: he has hung up, or takes too long.
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
    connection.sendall(_proof(secret, b"machine 0", both))
    connection.settimeout(None)


def forward(listener: socket.socket, onward: Callable[[socket.socket], socket.socket]) -> None:
    """From now on, in threads: joins each connection that comes with the one that `onward` opens.

    Args:
        listener: where they come; until it is closed.
        onward: given the one that has come, opens the other, or raises OSError or StrangerError.
    """

    def accept() -> None:
        while listener.fileno() >= 0:
            try:
                connection, _ = listener.accept()
            except OSError:  # it was closed; or too many files are open, a visitor has gone again
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
    """Until one of them ends; then both."""
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _receive(connection: socket.socket, count: int, end: float) -> bytes:
    """So many bytes, or fewer where the other end hung up."""
    received = b""
    while len(received) < count:
        connection.settimeout(max(end - time.monotonic(), 0.01))
        data = connection.recv(count - len(received))
        if not data:
            break
        received += data
    return received


def _proof(secret: bytes, who: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, who + b"\0" + nonces, hashlib.sha256)


def _start(function: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread
