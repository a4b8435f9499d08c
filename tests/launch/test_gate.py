"""The proof that two machines know the same secret, on one end of a connection and on the other."""

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from ddp_from_scratch.launch import gate
from ddp_from_scratch.launch.gate import StrangerError

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def in_a_thread(function: Callable[..., None], *arguments: object) -> list[BaseException]:
    """What it raised, once it has ended; at once an empty list."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function(*arguments)
        except (StrangerError, OSError) as error:
            raised.append(error)
        finally:
            with suppress(OSError):
                arguments[0].shutdown(socket.SHUT_WR)  # type: ignore[attr-defined]

    threading.Thread(target=run, daemon=True).start()
    return raised


def soon() -> float:
    return time.monotonic() + 5.0


def test_both_know_the_secret(pair: Pair) -> None:
    one, other = pair
    thread = threading.Thread(target=gate.check, args=(other, b"secret"))
    thread.start()
    gate.prove(one, b"secret", soon())
    thread.join()
    one.sendall(b"what follows")
    assert other.recv(100) == b"what follows"


def test_who_does_not_know_it_is_refused(pair: Pair) -> None:
    one, other = pair
    raised = in_a_thread(gate.check, other, b"secret")
    with pytest.raises(StrangerError, match="it does not have the same DDP_SECRET"):
        gate.prove(one, b"another", soon())
    assert [str(error) for error in raised] == ["it does not know the secret"]


def test_a_machine_0_that_does_not_know_it_is_refused(pair: Pair) -> None:
    """It lets everybody in, and would be told addresses."""
    one, other = pair

    def pretend(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(gate._GREETING + bytes(32))
        proof = connection.recv(1000)
        connection.sendall(proof)  # the other direction's is another

    in_a_thread(pretend, other)
    with pytest.raises(StrangerError, match="DDP_SECRET"):
        gate.prove(one, b"secret", soon())


def test_what_was_heard_once_cannot_be_used_again(pair: Pair) -> None:
    one, other = pair
    heard: list[bytes] = []

    class Tapped:
        """A socket whose words somebody writes down."""

        def sendall(self, data: bytes) -> None:
            heard.append(data)
            one.sendall(data)

        def __getattr__(self, name: str) -> object:
            return getattr(one, name)

    in_a_thread(gate.check, other, b"secret")
    gate.prove(Tapped(), b"secret", soon())  # type: ignore[arg-type]

    first, second = socket.socketpair()
    with first, second:
        raised = in_a_thread(gate.check, second, b"secret")
        for data in heard:
            first.sendall(data)
        assert len(first.recv(1000)) == len(gate._GREETING) + 32
        assert first.recv(1000) == b""
        assert isinstance(raised[0], StrangerError)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (b"HTTP/1.1 400 Bad Request\r\nServer: x\r\n\r\n", r"it said 'HTTP/1.1 400 Bad Request'"),
        (b"\xff\xfe binary", r"it said '\\\\xff\\\\xfe binary'"),
        (b"", r"it hung up"),
    ],
)
def test_what_answers_in_its_place_is_told(pair: Pair, said: bytes, told: str) -> None:
    one, other = pair
    other.sendall(said)
    other.shutdown(socket.SHUT_WR)
    with pytest.raises(StrangerError, match=told):
        gate.prove(one, b"secret", soon())


def test_an_error_that_passes_leaves_the_gate_open(pair: Pair) -> None:
    inside, store = pair
    store.settimeout(5.0)
    passing = [OSError(errno.EMFILE, "Too many open files"), ConnectionAbortedError()]

    class Listener(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            if passing:
                raise passing.pop()
            return super().accept()

    with Listener() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        gate.forward(listener, lambda visitor: inside)
        with socket.create_connection(listener.getsockname()) as visitor:
            visitor.sendall(b"in")
            assert store.recv(100) == b"in"
        listener.shutdown(socket.SHUT_RDWR)


def test_silence_ends_in_time(pair: Pair) -> None:
    with pytest.raises(TimeoutError):
        gate.prove(pair[0], b"secret", time.monotonic() + 0.05)
