"""Several machines meet: who reaches the store of machine 0, and what is printed otherwise."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from unittest.mock import Mock

import pytest

from ddp_from_scratch.launch import rendezvous
from ddp_from_scratch.launch.rendezvous import StrangerError, open_store
from tests.support.ranks import listening
from tests.support.refusal import refusal

HERE = "127.0.0.1"


@pytest.fixture
def port(monkeypatch):
    """A free one. All machines have the same secret."""
    monkeypatch.setenv("DDP_SECRET", "known to all machines")
    with socket.create_server((HERE, 0)) as free:
        return int(free.getsockname()[1])


@pytest.fixture
def machine(port):
    with ExitStack() as stack:
        yield lambda node_rank, timeout=30.0: stack.enter_context(
            open_store(node_rank, HERE, port, timeout)
        )


def test_a_port_that_is_taken(machine, port):
    machine(0)
    assert refusal(machine, 0) == (
        f"port {port} is in use on machine 0: choose another with --master-port, on every machine"
    )


def test_machine_0_listens_on_its_address_alone_and_lets_no_stranger_in(machine, port, monkeypatch):
    machine(0)
    assert [address for address, at, _ in listening() if at == port] == ["0100007F"]
    with socket.create_connection((HERE, port)) as stranger, suppress(ConnectionError):
        stranger.sendall(b"x" * 30)  # as many bytes as a greeting has
        assert stranger.recv(1) == b""
    monkeypatch.setenv("DDP_SECRET", "not the secret of this job")
    assert refusal(machine, 1) == (
        f"127.0.0.1:{port} does not answer as machine 0 does: it does not have the same "
        f"DDP_SECRET. Check DDP_SECRET, --master-addr and --master-port"
    )


def test_machine_0_prints_a_secret_where_it_has_none(machine, monkeypatch, capfd):
    monkeypatch.setenv("DDP_SECRET", "short")
    told = "DDP_SECRET must have 16 characters or more, got 5: "
    assert refusal(machine, 1).startswith(told)
    monkeypatch.delenv("DDP_SECRET")
    machine(0)
    secret = capfd.readouterr().err.strip().rpartition("export DDP_SECRET=")[2]
    assert len(secret) == 32
    assert refusal(machine, 1).startswith("DDP_SECRET is not set: machine 0 printed one")
    monkeypatch.setenv("DDP_SECRET", secret)
    machine(1)


def test_a_machine_0_that_does_not_answer_is_one_line_in_time(machine, port, monkeypatch):
    monkeypatch.setattr(rendezvous, "_RETRY_S", 0.01)
    absent = (
        "machine 0 did not answer at 127.0.0.1:{} within 0.2 s ({}): start the command with "
        "--node-rank 0 there, and check --master-addr, --master-port and the firewall"
    )
    told = refusal(machine, 1, timeout=0.2)
    assert told == absent.format(port, "Connection refused")
    with socket.create_server((HERE, port)):
        told = refusal(machine, 1, timeout=0.2)
        assert told == absent.format(port, "timed out")


def test_a_proof_that_comes_too_late_is_no_wrong_secret(machine, port):
    def closes_the_first(gate):
        with gate, gate.accept()[0] as connection:
            connection.sendall(rendezvous._GREETING + bytes(32))
            # Then it has waited for a proof for long enough.
            rendezvous._receive(connection, len(rendezvous._GREETING) + 64, time.monotonic() + 30)

    with ThreadPoolExecutor(1) as pool:
        closed = pool.submit(closes_the_first, socket.create_server((HERE, port)))
        began = pool.submit(lambda: closed.result() or machine(0))
        machine(1)
        began.result(10)


def test_a_machine_that_stood_still_while_it_waited_tries_once_more(machine, port, monkeypatch):
    clock = Mock(wraps=time)
    monkeypatch.setattr(rendezvous, "time", clock)

    def stands_still(_):
        clock.monotonic, clock.sleep = (lambda: time.monotonic() + 100), time.sleep
        machine(0)

    clock.sleep = stands_still
    machine(1)  # with a timeout of 30 s


# The proof that two machines know the same secret, on one end of a connection and on the other ----


@pytest.fixture
def pair():
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def prove(connection):
    rendezvous.prove(connection, b"secret", time.monotonic() + 5.0)


def test_both_know_the_secret_which_is_of_no_use_to_who_has_heard_it(pair):
    heard = []

    def sendall(data):
        heard.append(data)
        pair[0].sendall(data)

    one = Mock(wraps=pair[0], sendall=sendall)
    thread = threading.Thread(target=rendezvous.check, args=(pair[1], b"secret"))
    thread.start()
    prove(one)
    thread.join()
    pair[0].sendall(b"what follows")
    assert pair[1].recv(100) == b"what follows"

    first, second = socket.socketpair()
    with first, second, ThreadPoolExecutor(1) as pool:
        checked = pool.submit(rendezvous.check, second, b"secret")
        for data in heard:
            first.sendall(data)
        assert len(first.recv(1000)) == len(rendezvous._GREETING) + 32
        assert isinstance(checked.exception(10), StrangerError)
        assert second.send(b"nothing more") == 12
        assert first.recv(1000) == b"nothing more"


def test_a_machine_0_that_does_not_know_it_is_refused(pair):
    def pretend(connection):
        connection.recv(1000)
        connection.sendall(rendezvous._GREETING + bytes(32))
        proof = connection.recv(1000)
        connection.sendall(proof)  # the other direction's is another

    with ThreadPoolExecutor(1) as pool:
        pool.submit(pretend, pair[1])
        with pytest.raises(StrangerError, match="DDP_SECRET"):
            prove(pair[0])
