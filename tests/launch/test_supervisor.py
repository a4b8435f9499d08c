"""The parent of ranks: what it gives them, what it returns, and that they end together."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from ddp_from_scratch import start_ranks
from ddp_from_scratch.launch import watch
from tests.support.failing_run import Run

SOON_S = 10.0


def shell(script: str, *arguments: str | Path) -> list[str]:
    """A rank that is a shell: `$RANK` is its number, `$PPID` its parent, `$1` an argument."""
    return ["sh", "-c", script, "rank", *map(str, arguments)]


def wait_until_there(path: str) -> str:
    return f'while [ ! -e "{path}" ]; do sleep 0.02; done'


def test_each_rank_is_told_its_place_and_meets_in_a_private_folder(tmp_path: Path) -> None:
    told = (
        'echo "$RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK"; '
        'folder=$(dirname "$DDP_RENDEZVOUS_FILE"); echo "$folder"; stat -c %a "$folder"; '
        "readlink /proc/self/fd/0"
    )
    assert start_ranks(shell(f'({told}) > "$1/$RANK"', tmp_path), [3]) == 0
    folders = set()
    for rank in range(3):
        place, folder, mode, stdin = (tmp_path / str(rank)).read_text().splitlines()
        assert place == f"{rank} 3 {rank} 3 0"
        assert (mode, stdin) == ("700", "/dev/null")
        folders.add(folder)
    assert len(folders) == 1
    assert not Path(folders.pop()).exists()


def test_the_first_failure_ends_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    assert start_ranks(shell('[ "$RANK" = 1 ] && exit 7; exec sleep 60'), [3]) == 7
    assert capfd.readouterr().err == ""  # it has said why by itself

    assert start_ranks(shell('[ "$RANK" = 1 ] && kill -KILL $$; exec sleep 60'), [3]) == 137
    assert capfd.readouterr().err == "rank 1 was killed by SIGKILL; all other ranks were stopped\n"
    assert time.monotonic() - began < 2 * SOON_S


def test_ranks_may_clean_up_before_they_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean = 'trap "touch $1/clean$RANK; exit 1" TERM; touch $1/ready$RANK; sleep 60 & wait'
    stubborn = 'trap "" TERM; touch $1/ready$RANK; while :; do sleep 0.1; done'
    fail = f"{wait_until_there('$1/ready1')}; {wait_until_there('$1/ready2')}; exit 3"
    monkeypatch.setattr(watch, "_GRACE_S", 0.5)
    began = time.monotonic()
    script = f"case $RANK in 0) {fail};; 1) {clean};; 2) {stubborn};; esac"
    assert start_ranks(shell(script, tmp_path), [3]) == 3
    assert (tmp_path / "clean1").exists()
    assert time.monotonic() - began < SOON_S


STOPS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP]
ENDS = [signal.SIGQUIT, signal.SIGUSR2]


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_is_passed_on_once_and_the_ranks_take_their_time(
    number: signal.Signals, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    handlers = [signal.getsignal(s) for s in STOPS + ENDS]
    save = 'trap "sleep 0.3; echo >> $1/saved$RANK; exit 143" TERM; touch $1/ready$RANK'
    tell = f"{wait_until_there('$1/ready1')}; kill -{int(number)} $PPID"
    script = f'{save}; if [ "$RANK" = 0 ]; then {tell}; fi; sleep 60 & wait'
    assert start_ranks(shell(script, tmp_path), [2]) == 128 + number
    assert [(tmp_path / f"saved{rank}").read_text() for rank in range(2)] == ["\n", "\n"]
    assert capfd.readouterr().err == "stopping all ranks; once more ends them at once\n"
    assert [signal.getsignal(s) for s in STOPS + ENDS] == handlers


@pytest.mark.parametrize("number", ENDS)
def test_other_signals_end_all_ranks_and_leave_nothing(
    number: signal.Signals, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = f'echo "$DDP_RENDEZVOUS_FILE" > $1/$RANK; {wait_until_there("$1/1")}; '
    script += f'[ "$RANK" = 0 ] && kill -{int(number)} $PPID; exec sleep 60'
    assert start_ranks(shell(script, tmp_path), [2]) == 128 + number
    assert capfd.readouterr().err == f"ending all ranks ({number.name})\n"
    assert not Path((tmp_path / "0").read_text().strip()).parent.exists()


def test_the_end_of_a_session_is_one_signal(tmp_path: Path) -> None:
    """SIGTERM and SIGHUP come together: the ranks still have their time."""
    save = 'trap "sleep 0.6; touch $1/saved; exit 143" TERM; touch $1/ready$RANK'
    tell = f"{wait_until_there('$1/ready1')}; kill -TERM $PPID; sleep 0.3; kill -HUP $PPID"
    script = f'{save}; if [ "$RANK" = 0 ]; then {tell}; fi; sleep 60 & wait'
    assert start_ranks(shell(script, tmp_path), [2]) == 143
    assert (tmp_path / "saved").exists()


def test_nohup_stays_in_force(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert start_ranks(shell("kill -HUP $PPID; sleep 0.3"), [2]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_signal_ends_them_at_once(tmp_path: Path) -> None:
    began = time.monotonic()
    ready = f"touch $1/$RANK; {wait_until_there('$1/1')}"
    twice = "kill -INT $PPID; sleep 0.3; kill -INT $PPID"
    script = f'trap "" TERM; {ready}; [ $RANK = 0 ] && {{ {twice}; }}; while :; do sleep 0.1; done'
    assert start_ranks(shell(script, tmp_path), [2]) == 130
    # Also where the first has ended one of them, and the other is given time.
    script = f'[ $RANK = 0 ] && {{ trap "" TERM; {twice}; sleep 60; }}; exec sleep 60'
    assert start_ranks(shell(script), [2]) == 130
    assert time.monotonic() - began < watch._GRACE_S


def test_a_rank_that_dies_of_the_signal_does_not_keep_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Rank 0 would save first, but waits for rank 1 to agree, which has not got so far.
    monkeypatch.setattr(watch, "_GRACE_S", 0.5)
    began = time.monotonic()
    wait = 'trap "" TERM; kill -TERM $PPID; while :; do sleep 0.1; done'
    assert start_ranks(shell(f'[ "$RANK" = 0 ] && {{ {wait}; }}; exec sleep 60'), [2]) == 143
    assert time.monotonic() - began < SOON_S


def test_a_signal_between_two_starts_reaches_the_later_rank_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Any] = []

    def start(*arguments: Any, **named: Any) -> "subprocess.Popen[bytes]":
        if started:
            os.kill(os.getpid(), signal.SIGINT)
        started.append(popen(*arguments, **named))
        return started[-1]

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    began = time.monotonic()
    assert start_ranks(["sleep", "60"], [2]) == 130
    assert len(started) == 2
    assert time.monotonic() - began < SOON_S


SECRET = "known to all machines"

# Several machines: each a parent of its own, on loopback ------------------------------------------

PARENT = """
import sys
from ddp_from_scratch import start_ranks
from ddp_from_scratch.launch.rank_process import run_to_exit
*place, port, timeout, failures = eval(sys.argv[1])
at = *place, "127.0.0.1", port, timeout
run_to_exit(lambda: start_ranks(sys.argv[2:], *at, max_failures=failures))
"""


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def machine(
    counts: list[int],
    node_rank: int,
    port: int,
    command: list[str],
    timeout: float = 60.0,
    secret: str | None = SECRET,
    max_failures: int | None = None,
) -> Run:
    arguments = repr((counts, node_rank, port, timeout, max_failures))
    program = (sys.executable, "-c", PARENT, arguments, *command)
    return Run(*program, **({} if secret is None else {"DDP_SECRET": secret}))


def test_two_machines_of_unequal_size(port: int) -> None:
    """The first stays until the last has left."""
    place = "$RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE on $GROUP_RANK"
    told = shell(f'echo "{place}"; [ "$GROUP_RANK" = 1 ] && sleep 1; exit 0')
    with machine([1, 2], 0, port, told) as first, machine([1, 2], 1, port, told) as second:
        assert [second.wait(), first.wait()] == [0, 0]
        assert first.text == "0 of 3, 0 of 1 on 0\n\n--- standard error:\n"
        assert sorted(second.out.splitlines()) == ["1 of 3, 0 of 2 on 1", "2 of 3, 1 of 2 on 1"]
        assert second.err == ""


def test_a_failure_on_one_machine_ends_the_others(port: int) -> None:
    fail = shell('[ "$RANK" = 2 ] && kill -KILL $$; exec sleep 60')
    with machine([1, 2], 0, port, fail) as first, machine([1, 2], 1, port, fail) as second:
        second.wait()
        first.wait(SOON_S)
        first.assert_nobody_left()
        second.assert_nobody_left()
        told = "rank 2 was killed by SIGKILL"
        assert (second.wait(), second.err) == (137, f"{told}; all other ranks were stopped\n")
        assert (first.wait(), first.err) == (1, f"stopped: machine 1: {told}\n")


@pytest.mark.slow
def test_ctrl_c_on_one_machine_ends_the_others(port: int) -> None:
    wait = shell("echo here; exec sleep 60")
    with machine([1, 1], 0, port, wait) as first, machine([1, 1], 1, port, wait) as second:
        first.wait_for("here")
        second.wait_for("here")
        second.signal(signal.SIGINT)
        assert second.wait(SOON_S) == 130
        assert first.wait(SOON_S) == 1
        assert first.err == "stopped: machine 1: stopped by SIGINT\n"


def test_the_end_of_machine_0_ends_the_others(port: int) -> None:
    wait = shell("echo here; exec sleep 60")
    with machine([1, 1], 0, port, wait) as first, machine([1, 1], 1, port, wait) as second:
        second.wait_for("here")
        first.signal(signal.SIGKILL)
        assert second.wait(SOON_S) == 1
        assert second.err.endswith("\nstopped: machine 0 no longer answers\n")  # after torch's word


@pytest.mark.slow
def test_machines_that_do_not_fit_say_so_in_one_line(port: int) -> None:
    wait = shell("echo here; exec sleep 60")
    with machine([1, 1], 0, port, wait) as first, machine([1, 2], 1, port, wait) as second:
        assert second.wait() == 2
        told = "error: --nproc is 1,2 here and 1,1 on machine 0: it must be equal\n"
        assert second.err == told
        assert first.wait(SOON_S) == 1  # does not wait for ranks that cannot come
        assert first.err == "stopped: machine 1: --nproc is 1,2 there and 1,1 on machine 0\n"

    with machine([1, 1], 0, port, wait) as first:
        first.wait_for("here")
        with machine([1, 1], 1, port, wait) as second:
            second.wait_for("here")
            with (
                machine([1, 1], 1, port, wait) as again,
                machine([1, 1], 0, port, wait) as busy,
            ):
                assert (again.wait(), busy.wait()) == (2, 2)
                assert again.err == "error: --node-rank 1 was given on two machines\n"
                assert busy.err == (
                    f"error: port {port} is in use on machine 0: choose another with "
                    f"--master-port, on every machine\n"
                )
            # Those that run already go on.
            assert first.process.poll() is None
            assert second.process.poll() is None


def test_machines_that_go_on_and_others_do_not_meet(port: int) -> None:
    differs = "--go-on was {} here and {} on machine 0: it must be the same on all"
    wait = shell("exec sleep 60")
    with (
        machine([1, 1], 0, port, wait) as first,
        machine([1, 1], 1, port, wait, max_failures=0) as second,
    ):
        assert (second.wait(), first.wait(SOON_S)) == (2, 1)
        assert second.err == f"error: {differs.format('given', 'not given')}\n"
        told = "stopped: machine 1: --go-on was given there and not given on machine 0\n"
        assert first.err == told
    with (
        machine([1, 1], 0, port, wait, max_failures=0) as first,
        machine([1, 1], 1, port, wait) as second,
    ):
        assert second.wait() == 2
        assert second.err == f"error: {differs.format('not given', 'given')}\n"
        # The ranks of machine 1, which has not come, need no time to stop.
        first.signal(signal.SIGTERM)
        assert first.wait(SOON_S) == 143
        assert first.err == "stopping all ranks; once more ends them at once\n"


def test_a_machine_that_waits_ends_with_machine_0(port: int) -> None:
    wait = shell("echo here; exec sleep 60")
    with (
        machine([1, 1], 0, port, wait, max_failures=0) as first,
        machine([1, 1], 1, port, wait, max_failures=0) as second,
    ):
        second.wait_for("here")
        with machine([1, 1], 1, port, wait, max_failures=0) as again:
            again.wait_for("waiting until machine 0 lets this machine in\n")
            first.signal(signal.SIGKILL)
            assert (again.wait(SOON_S), second.wait(SOON_S)) == (2, 1)
            assert again.err.endswith("error: the job ended before machine 0 let this machine in\n")


def test_an_absent_machine_0_is_one_line_in_time(port: int) -> None:
    began = time.monotonic()
    with (
        machine([1, 1], 1, port, ["true"], timeout=1.0) as late,
        machine([1, 1], 1, port, ["true"]) as stopped,
    ):
        assert late.wait() == 2
        assert late.err == (
            f"error: machine 0 did not answer at 127.0.0.1:{port} within 1 s (Connection refused): "
            f"start the command with --node-rank 0 there, and check --master-addr, --master-port "
            f"and the firewall\n"
        )
        stopped.signal(signal.SIGTERM)
        assert stopped.wait(SOON_S) == 143
        assert time.monotonic() - began < 60.0


# What machine 0 lets in, and what the others take for machine 0 ----------------------------------


def listening_at(port: int) -> list[str]:
    """The addresses at which somebody listens on it."""
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, _, number = local.partition(":")
            if state == "0A" and int(number, 16) == port:
                found.append(address)
    return found


def test_machine_0_listens_on_its_address_alone_and_lets_no_stranger_in(port: int) -> None:
    wait = shell("echo here; exec sleep 60")
    with machine([1, 1], 0, port, wait) as first:
        first.wait_for("here")
        assert listening_at(port) == ["0100007F"]
        with socket.create_connection(("127.0.0.1", port)) as stranger, suppress(ConnectionError):
            stranger.sendall(b"x" * 30)  # as many bytes as a greeting has
            assert stranger.recv(1) == b""
        with machine([1, 1], 1, port, wait, secret="not the secret of this job") as other:
            assert other.wait() == 2
            assert other.err == (
                f"error: 127.0.0.1:{port} does not answer as machine 0 does: it does not have the "
                f"same DDP_SECRET. Check DDP_SECRET, --master-addr and --master-port\n"
            )
        with machine([1, 1], 1, port, wait) as second:
            second.wait_for("here")
            second.signal(signal.SIGTERM)
            assert [second.wait(), first.wait()] == [143, 1]


def test_machine_0_prints_a_secret_where_it_has_none(port: int) -> None:
    told = shell('echo "$RANK of $WORLD_SIZE"')
    with machine([1, 1], 0, port, told, secret=None) as first:
        with machine([1, 1], 1, port, told, secret=None) as second:
            assert second.wait() == 2
            assert second.err.startswith("error: DDP_SECRET is not set: machine 0 printed one")
        first.wait_for("export DDP_SECRET=")
        secret = first.err.strip().rpartition("=")[2]
        assert len(secret) == 32
        with machine([1, 1], 1, port, told, secret=secret) as second:
            assert [second.wait(), first.wait()] == [0, 0]
    with machine([1, 1], 0, port, told, secret="short") as first:
        assert first.wait() == 2
        assert first.err.startswith("error: DDP_SECRET must have 16 characters or more, got 5: ")


@pytest.mark.slow
def test_what_is_not_machine_0_is_one_line_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with machine([1, 1], 1, port, ["true"], timeout=1.0) as run:
            assert run.wait() == 2
            assert run.err == (
                f"error: machine 0 did not answer at 127.0.0.1:{port} within 1 s (timed out): "
                f"start the command with --node-rank 0 there, and check --master-addr, "
                f"--master-port and the firewall\n"
            )
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.handle_request).start()
        with machine([1, 1], 1, server.server_port, ["true"]) as run:
            assert run.wait() == 2
            assert re.fullmatch(
                rf"error: 127.0.0.1:{server.server_port} does not answer as machine 0 does: "
                r"something else listens there \(it said '.*'\)\. Check DDP_SECRET, .*\n",
                run.err,
            )
