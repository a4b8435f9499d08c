"""The proof that two machines know the same secret, on one end of a connection and on the other."""

import errno
import socket
import threading
import time
from contextlib import suppress

import pytest

from ddp_from_scratch.launch import gate
from ddp_from_scratch.launch.gate import StrangerError


@pytest.fixture
def pair():
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def in_a_thread(function, connection, *arguments):
    """What it raised, once it has ended and so closed the connection."""
    raised = []

    def run():
        try:
            function(connection, *arguments)
        except (StrangerError, OSError) as error:
            raised.append(error)
        finally:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)

    threading.Thread(target=run, daemon=True).start()
    return raised


def prove(connection):
    gate.prove(connection, b"secret", time.monotonic() + 5.0)


class Tapped:
    """A socket whose words somebody writes down."""

    def __init__(self, connection):
        self.connection, self.heard = connection, []

    def sendall(self, data):
        self.heard.append(data)
        self.connection.sendall(data)

    def recv(self, size):
        return self.connection.recv(size)

    def settimeout(self, seconds):
        self.connection.settimeout(seconds)


def test_both_know_the_secret_which_is_of_no_use_to_who_has_heard_it(pair):
    one, other = Tapped(pair[0]), pair[1]
    thread = threading.Thread(target=gate.check, args=(other, b"secret"))
    thread.start()
    prove(one)
    thread.join()
    pair[0].sendall(b"what follows")
    assert other.recv(100) == b"what follows"

    first, second = socket.socketpair()
    with first, second:
        raised = in_a_thread(gate.check, second, b"secret")
        for data in one.heard:
            first.sendall(data)
        assert len(first.recv(1000)) == len(gate._GREETING) + 32
        assert first.recv(1000) == b""
        assert isinstance(raised[0], StrangerError)


def test_a_machine_0_that_does_not_know_it_is_refused(pair):
    """It lets everybody in, and would be told addresses."""

    def pretend(connection):
        connection.recv(1000)
        connection.sendall(gate._GREETING + bytes(32))
        proof = connection.recv(1000)
        connection.sendall(proof)  # the other direction's is another

    in_a_thread(pretend, pair[1])
    with pytest.raises(StrangerError, match="DDP_SECRET"):
        prove(pair[0])


def test_an_error_that_passes_leaves_the_gate_open(pair):
    inside, store = pair
    store.settimeout(5.0)
    passing = [OSError(errno.EMFILE, "Too many open files"), ConnectionAbortedError()]

    class Listener(socket.socket):
        def accept(self):
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
