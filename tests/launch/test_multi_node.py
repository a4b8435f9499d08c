"""Supervisors of several machines meet: whom machine 0 lets in, and what each says where not."""

import socket
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest

from ddp_from_scratch import UsageError
from ddp_from_scratch.launch import multi_node
from ddp_from_scratch.launch.multi_node import Machines, Meeting

HERE = "127.0.0.1"


@pytest.fixture
def port(monkeypatch):
    """A free one. All machines have the same secret."""
    monkeypatch.setenv("DDP_SECRET", "known to all machines")
    with socket.create_server((HERE, 0)) as free:
        return int(free.getsockname()[1])


@pytest.fixture
def machine(port):
    """Opens machine `node_rank` of a job that ends when one fails, in this process."""
    opened = []

    def open_one(node_rank, *counts, timeout=30.0):
        opened.append(Machines(counts, node_rank, HERE, port, timeout))
        return opened[-1]

    yield open_one
    for one in reversed(opened):
        one.close()


def refusal(open_one, *arguments, **named):
    with pytest.raises(UsageError) as error:
        open_one(*arguments, **named)
    return str(error.value)


def test_machines_that_do_not_fit(machine, port):
    first = machine(0, 1, 1)
    assert refusal(machine, 1, 1, 2) == (
        "--nproc is 1,2 here and 1,1 on machine 0: it must be equal"
    )
    # Else it would wait for ranks that cannot come.
    told = first.store.get("failure").decode()
    assert told == "machine 1: --nproc is 1,2 there and 1,1 on machine 0"
    assert refusal(machine, 1, 1, 1) == "--node-rank 1 was given on two machines"
    assert refusal(machine, 0, 1, 1) == (
        f"port {port} is in use on machine 0: choose another with --master-port, on every machine"
    )


@pytest.mark.parametrize(("there", "here"), [("given", "not given"), ("not given", "given")])
def test_machines_that_go_on_and_others_do_not_meet(there, here, port):
    first = Meeting(0, HERE, port, 30.0, goes_on=there == "given")
    assert refusal(Meeting, 1, HERE, port, 30.0, goes_on=here == "given") == (
        f"--elastic was {here} here and {there} on machine 0: it must be the same on all"
    )
    told = first.store.get("failure").decode()
    assert told == f"machine 1: --elastic was {here} there and {there} on machine 0"
    first.close()


def test_what_one_says_the_others_hear_and_the_end_of_machine_0(machine):
    first, second = machine(0, 1, 1), machine(1, 1, 1)
    assert (second.failure(), second.may_leave()) == (None, False)
    second.tell_failure("rank 1 ended with exit code 3")
    heard = first.store.get("failure").decode()
    assert heard == "machine 1: rank 1 ended with exit code 3"
    kept = first.store
    gone = dict.fromkeys(("add.side_effect", "check.side_effect", "set.side_effect"), RuntimeError)
    first.store = Mock(**gone)
    first.tell_failure("")
    assert (first.failure(), first.may_leave()) == ("machine 0 no longer answers", False)
    first.store = kept  # lives until both are closed


def listening_at(port):
    """The addresses at which somebody listens on it."""
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, _, number = local.partition(":")
            if state == "0A" and int(number, 16) == port:
                found.append(address)
    return found


def test_machine_0_listens_on_its_address_alone_and_lets_no_stranger_in(machine, port, monkeypatch):
    machine(0, 1, 1)
    assert listening_at(port) == ["0100007F"]
    with socket.create_connection((HERE, port)) as stranger, suppress(ConnectionError):
        stranger.sendall(b"x" * 30)  # as many bytes as a greeting has
        assert stranger.recv(1) == b""
    monkeypatch.setenv("DDP_SECRET", "not the secret of this job")
    assert refusal(machine, 1, 1, 1) == (
        f"127.0.0.1:{port} does not answer as machine 0 does: it does not have the same "
        f"DDP_SECRET. Check DDP_SECRET, --master-addr and --master-port"
    )


def test_machine_0_prints_a_secret_where_it_has_none(machine, monkeypatch, capfd):
    monkeypatch.setenv("DDP_SECRET", "short")
    told = "DDP_SECRET must have 16 characters or more, got 5: "
    assert refusal(machine, 1, 1, 1).startswith(told)
    monkeypatch.delenv("DDP_SECRET")
    machine(0, 1, 1)
    secret = capfd.readouterr().err.strip().rpartition("export DDP_SECRET=")[2]
    assert len(secret) == 32
    assert refusal(machine, 1, 1, 1).startswith("DDP_SECRET is not set: machine 0 printed one")
    monkeypatch.setenv("DDP_SECRET", secret)
    machine(1, 1, 1)


def test_a_machine_0_that_does_not_answer_is_one_line_in_time(machine, port, monkeypatch):
    monkeypatch.setattr(multi_node, "_RETRY_S", 0.01)
    absent = (
        "machine 0 did not answer at 127.0.0.1:{} within 0.2 s ({}): start the command with "
        "--node-rank 0 there, and check --master-addr, --master-port and the firewall"
    )
    told = refusal(machine, 1, 1, 1, timeout=0.2)
    assert told == absent.format(port, "Connection refused")
    with socket.create_server((HERE, port)):
        told = refusal(machine, 1, 1, 1, timeout=0.2)
        assert told == absent.format(port, "timed out")
