"""Machine 0's view of the other machines of a job that goes on, by the reports that it gets."""

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from ddp_from_scratch.launch import other_machines
from ddp_from_scratch.launch.board import NO_STATE, Board
from ddp_from_scratch.launch.other_machines import OtherMachines


class Job:
    """Machine 0 of two, with processes 0 here and 1 and 2 there, by a clock of the test's."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.beat = 100.0, 0
        monkeypatch.setattr(other_machines.time, "monotonic", lambda: self.now)
        self.store, self.board = dist.HashStore(), Board(folder, capacity=4)
        self.signals: list[int] = []
        meeting: Any = SimpleNamespace(store=self.store)
        self.machines = OtherMachines(meeting, 2, self.board, self.signals.append, 60.0)
        self.ranks = {member: self.machines.start(1, member) for member in (1, 2)}

    def reports(self, codes: dict[int, int | None], **more: Any) -> None:
        """Machine 1 reports these processes' exit codes."""
        self.beat += 1
        ranks = {member: [code, [0, 0, 0, 0], None] for member, code in codes.items()}
        report = {"ranks": ranks, "signals": [], "ended": False, "beat": self.beat} | more
        self.store.set("report 1", json.dumps(report))

    def after(self, seconds: float) -> dict[str, Any]:
        """The job's state when so many seconds have passed."""
        self.now += seconds
        self.machines.exchange()
        state: dict[str, Any] = json.loads(self.store.get("job"))
        return state


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(tmp_path, monkeypatch)


def test_orders_are_kept_in_order(job: Job) -> None:
    job.ranks[2].send_signal(signal.SIGTERM)
    assert job.after(1)["orders"] == {"1": [["start", 1, 0], ["start", 2, 0], ["signal", 2, 15]]}


def test_an_exit_code_comes_with_a_report(job: Job) -> None:
    assert job.ranks[1].poll() is None
    job.reports({1: None, 2: 3})
    job.after(1)
    assert (job.ranks[1].poll(), job.ranks[2].poll(), job.ranks[2].wait()) == (None, 3, 3)


def test_what_a_process_says_of_itself_is_on_both_boards(job: Job) -> None:
    job.board.note_state(0)
    failed = [None, [2, 1, 7, 1], None], [1, [0, 0, 0, 0], [7, "ValueError: no"]]
    job.reports({}, ranks=dict(zip((1, 2), failed, strict=True)))
    state = job.after(1)
    assert job.board.asks(1)
    assert job.board.has_arrived(1, 1)
    assert not job.board.has_arrived(1, 2)
    assert (job.board.step(1), job.board.has_state(1)) == (7, True)
    assert job.board.failure(2) == (7, "ValueError: no")
    assert state["words"] == [[0, 0, 0, 1], [2, 1, 7, 1], [0, 0, 0, 0], [0, 0, 0, 0]]


def test_a_generation_is_announced_with_its_members_and_machines(job: Job) -> None:
    assert (job.after(1)["generation"], job.after(1)["announced"]) == (0, None)
    job.board.announce([0, 2], [0, 1])
    state = job.after(1)
    assert (state["generation"], state["announced"]) == (1, [[0, 2], [0, 1]])


def test_a_silent_machine_is_lost_with_its_ranks(
    job: Job, capfd: pytest.CaptureFixture[str]
) -> None:
    job.reports({1: 0, 2: None})
    job.after(1)
    job.after(other_machines.LOST_S)
    assert not job.machines.lost
    state = job.after(1)
    assert job.machines.lost == {1}
    assert (job.ranks[1].poll(), job.ranks[2].poll()) == (0, -signal.SIGKILL)
    # Only the way to it may be gone: the one that still runs there must not go on.
    assert state["orders"]["1"][2:] == [["signal", 2, signal.SIGKILL]]
    job.reports({1: 0, 2: 0})
    job.after(1)
    assert not job.machines.lost
    assert job.ranks[2].poll() == -signal.SIGKILL
    assert capfd.readouterr().err == (
        "machine 1 has not answered for 6 s: its ranks are lost\nmachine 1 answers again\n"
    )


def test_a_machine_may_be_started_late(job: Job) -> None:
    job.after(60)
    assert not job.machines.lost
    job.after(1)
    assert job.machines.lost == {1}
    # One that is to be started there when it comes.
    assert job.machines.start(1, 3).wait() == -signal.SIGKILL


def test_a_signal_there_is_passed_on_once(job: Job) -> None:
    job.reports({}, signals=[15])
    job.after(1)
    job.reports({}, signals=[15, 2])
    job.after(1)
    job.after(1)
    assert job.signals == [15, 2]


def test_the_end_waits_until_it_was_noticed(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(seconds: float) -> None:
        job.now += seconds
        job.reports({}, ended=json.loads(job.store.get("job"))["end"] == 3)

    monkeypatch.setattr(other_machines.time, "sleep", sleep)
    began = job.now
    job.machines.end(3)
    assert job.now - began < 1


def test_words_are_copied_whole(tmp_path: Path) -> None:
    board = Board(tmp_path, capacity=2)
    board.copy_words(1, [3, 2, 5, 1])
    assert board.all_words() == [[0, 0, 0, 0], [3, 2, 5, 1]]
    board.arrive(1, 3, NO_STATE)
    assert board.words(1) == [3, 3, NO_STATE, 1]
