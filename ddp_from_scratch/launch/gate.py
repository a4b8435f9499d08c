"""Joins machines by connections whose two ends know the job's secret; no others get through.

Machine 0 keeps its store on loopback and opens a gate on the address that the others are given:

    rank -> loopback -> its machine's parent  ==>  gate -> loopback -> store
                                            proof

A connection begins with a challenge and a response in both directions (HMAC-SHA256). The rest of
it is neither encrypted nor signed.
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

_PATIENCE_S = 10.0  # for a visitor's proof
_PAUSE_S = 0.2  # from a failed `accept` to the next


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

    Args:
        listener: accepts visitors until it is closed.
        onward: opens the other connection, or raises OSError or StrangerError.
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
