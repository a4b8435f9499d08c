"""`run.py --go-on` on several machines: each may lose ranks, or be lost."""

import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from benchmarks.harness.network import missing, two_hosts
from tests.training.going_on_runs import finish, last, start

SOON_S = 40.0


class Machine:
    """A supervisor, whose output is read while it runs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.lines = process, list[str]()
        self._readers = [
            threading.Thread(target=self.lines.extend, args=[stream])
            for stream in (process.stdout, process.stderr)
        ]
        for reader in self._readers:
            reader.start()

    def said(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    def wait_for(self, text: str) -> None:
        end = time.monotonic() + SOON_S
        while not self.said(text):
            assert time.monotonic() < end, f"{text!r} is not in {self.lines}"
            assert self.process.poll() is None, f"{text!r} is not in {self.lines}"
            time.sleep(0.02)

    def end(self) -> int:
        code = self.process.wait(SOON_S)
        for reader in self._readers:
            reader.join(SOON_S)
        return code


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The checkpoint of a run on 2 ranks of one machine without --go-on."""
    folder = tmp_path_factory.mktemp("quiet")
    finish(start(folder, "", "--epochs", "3", nproc=2))
    return last(folder)


@contextmanager
def machines(
    tmp_path: Path,
    fault: str,
    *options: str,
    address: str = "127.0.0.1",
    on: Callable[[int], list[str]] = lambda node: [],
    own: Sequence[Sequence[str]] = ((), ()),
) -> Iterator[tuple[Machine, Machine, Callable[..., Machine]]]:
    """Two machines with 2 ranks each, and what starts one more, or one of them again."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    every = ["--go-on", "--master-addr", address, "--master-port", port, *options]
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("DDP_SECRET", "a" * 16)

        def begin(node: int, *more: str, nproc: str = "2,2") -> Machine:
            mine = [*every, "--node-rank", str(node), *more]
            process = start(tmp_path, fault, *mine, nproc=nproc, on=on(node))
            stack.enter_context(process)
            stack.callback(process.kill)
            return Machine(process)

        yield begin(0, *own[0]), begin(1, *own[1]), begin


@pytest.mark.parametrize("member", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_costs_no_bit(
    member: int, quiet: dict[str, bytes], tmp_path: Path
) -> None:
    fault = f"before('_backward', lambda t: me == '{member}' and t.global_step == 7 and die())"
    with machines(tmp_path, fault, "--epochs", "3") as (first, second, _):
        assert (first.end(), second.end()) == (0, 0)
    assert first.said(f"process {member} was killed by SIGKILL: going on with 3 ranks")
    # With 3 ranks, or 4 where the other one has come meanwhile.
    assert first.said(" in epoch 2, step 3: another group after ")
    assert second.lines == []
    assert last(tmp_path) == quiet


def test_an_option_that_differs_is_named_once(tmp_path: Path) -> None:
    options = ["--lr", "0.1"], ["--lr", "0.2"]
    with machines(tmp_path, "", own=options) as (first, second, _):
        assert (first.end(), second.end()) == (2, 2), first.lines + second.lines
    assert [*first.lines, *second.lines] == [
        "error: --lr is 0.1 on rank 0 and 0.2 on rank 2: it must be the same on all ranks\n"
    ]


SLOWLY = "import time; before('_step', lambda t: time.sleep(0.25))"


# Until it has been asked to stop: from then on the signal has its default handler.
HOLD_UNTIL_ASKED = """
import time
def hold(trainer):
    while trainer.global_step == 7 and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        time.sleep(0.01)
before("_step", hold)
"""


@pytest.mark.slow
def test_a_signal_on_one_machine_stops_all(quiet: dict[str, bytes], tmp_path: Path) -> None:
    with machines(tmp_path, HOLD_UNTIL_ASKED, "--epochs", "3") as (first, second, _):
        first.wait_for("epoch   1/3")
        second.process.send_signal(signal.SIGINT)
        assert (first.end(), second.end()) == (130, 130)
    assert first.said("stopped in epoch 2, step ")
    finish(start(tmp_path, "", "--epochs", "3", "--go-on", "--resume", "auto"))
    assert last(tmp_path) == quiet


@pytest.mark.slow
def test_a_signal_stops_all_while_a_machine_is_lost(tmp_path: Path) -> None:
    with machines(tmp_path, SLOWLY, "--epochs", "30") as (first, second, _):
        first.wait_for("epoch   1/30")
        second.process.kill()
        first.wait_for("process 3 was on machine 1: going on with 2 ranks")
        first.process.send_signal(signal.SIGTERM)
        assert first.end() == 143
    assert first.said("stopped in epoch ")


# Steps in which the ranks wait, so that the run cannot end before the machines have come: until a
# process of such a number trains with the others, or until the test has left a file.
HOLD = """
import pathlib, time
from ddp_from_scratch.launch.board import Board
board = Board(pathlib.Path(os.environ["DDP_BOARD"]))
enough = pathlib.Path(sys.argv[0]).parent / "enough"
def has_come(member):
    return max(board.members(board.generation)) >= member
until = {10: lambda: has_come(4), 15: lambda: has_come(6), 20: enough.exists}
def hold(trainer):
    while not until.get(trainer.global_step, lambda: True)():
        time.sleep(0.01)
before("_step", hold)
"""


@pytest.mark.slow
def test_a_machine_that_is_lost_comes_again_and_another_one_joins(tmp_path: Path) -> None:
    epochs = ["--epochs", "5"]
    quiet = tmp_path / "quiet"
    quiet.mkdir()
    finish(start(quiet, "", *epochs, nproc=2))
    with machines(tmp_path, HOLD, *epochs) as (first, second, begin):
        first.wait_for("epoch   1/5")
        second.process.kill()
        again = begin(1)
        # Not the command that the job was started with.
        wrong = begin(1, "--lr", "0.2")
        first.wait_for("going on with 4 ranks in epoch ")
        third = begin(2, nproc="2,2,2")
        first.wait_for("going on with 6 ranks in epoch ")
        # 6 ranks and 3 more are more than 8 shards.
        fourth = begin(3, nproc="2,2,2,3")
        assert (wrong.end(), fourth.end()) == (2, 2)
        (tmp_path / "enough").touch()
        assert [one.end() for one in (first, again, third)] == [0, 0, 0], first.lines
    assert first.said("machine 1 has not answered for 5 s: its ranks are lost")
    assert first.said("process 3 was on machine 1: going on with 2 ranks")
    assert first.said("machine 1 has come again")
    assert first.said("machine 2 has come")
    assert wrong.lines == ["error: --lr is 0.2 here and 0.05 on machine 0\n"]
    assert last(tmp_path) == last(quiet)


@pytest.mark.slow
def test_without_machine_0_the_run_ends(tmp_path: Path) -> None:
    with machines(tmp_path, HOLD, "--epochs", "3") as (first, second, _):
        first.wait_for("epoch   1/3")
        first.process.kill()
        assert second.end() == 1
    assert second.said("machine 0 no longer answers: all ranks here were stopped")
    assert not _ranks_of(tmp_path)


@pytest.mark.slow
def test_a_cable_is_pulled_and_put_back(tmp_path: Path) -> None:
    why = missing()
    if why is not None:
        pytest.skip(why)
    epochs = ["--epochs", "13"]
    quiet = tmp_path / "quiet"
    quiet.mkdir()
    finish(start(quiet, "", *epochs, nproc=2))
    with two_hosts() as hosts:

        def cable(state: str) -> None:
            at = ["ip", "-n", hosts[1].name, "link", "set", "wire", state]
            subprocess.run(at, check=True)

        options = {"address": hosts[0].address, "on": lambda node: hosts[node].command()}
        # The ranks that are lost with their machine are none of these failures.
        allowed = [*epochs, "--max-failures", "0"]
        with machines(tmp_path, SLOWLY, *allowed, **options) as (first, second, _):
            first.wait_for("epoch   1/13")
            cable("down")
            first.wait_for("going on with 2 ranks in epoch ")
            second.wait_for("machine 0 has not answered for 5 s: ending the ranks here")
            cable("up")
            first.wait_for("going on with 4 ranks in epoch ")
            assert (first.end(), second.end()) == (0, 0)
    assert first.said("machine 1 answers again")
    assert last(tmp_path) == last(quiet)


def _ranks_of(tmp_path: Path) -> list[str]:
    """The processes that run the program in this folder, once those that end have had a moment."""
    end = time.monotonic() + 10
    while found := [
        name
        for name in os.listdir("/proc")
        if re.fullmatch(r"\d+", name) and str(tmp_path) in _command(name)
    ]:
        if time.monotonic() > end:
            break
        time.sleep(0.1)
    return found


def _command(process: str) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return ""
