"""Machine 0's view of the other machines of a job that goes on, by the reports that it gets."""

import json
import signal

import pytest
import torch.distributed as dist

from ddp_from_scratch.launch import other_machines
from ddp_from_scratch.launch.board import Board
from ddp_from_scratch.launch.other_machines import OtherMachines


class Job:
    """Machine 0 of two, with processes 0 here and 1 and 2 there, by a clock of the test's."""

    def __init__(self, folder, monkeypatch):
        self.now, self.beat = 100.0, 0
        monkeypatch.setattr(other_machines.time, "monotonic", lambda: self.now)
        self.store, self.board = dist.HashStore(), Board(folder, capacity=4)
        self.board.processes = 3
        self.signals = []
        self.joined = []
        self.has_begun = True
        called = self.signals.append, self.join
        asked = {"--lr": "0.1"}
        self.machines = OtherMachines(self.store, [1, 2], asked, self.board, *called, 60.0)
        self.ticket = 0
        self.ranks = {member: self.machines.start(1, member) for member in (1, 2)}

    def join(self, node, count):
        self.joined.append((node, count))
        return "too many" if count > 4 else None

    def comes(self, node, *counts, lr="0.1"):
        """A supervisor of this machine comes; its answer, None where there is none yet."""
        self.ticket = self.store.add("tickets", 1)
        arrival = {"node": node, "counts": counts, "asked": {"--lr": lr}}
        self.store.set(f"arrival {self.ticket}", json.dumps(arrival))
        self.after(0.1)
        return self.answer()

    def answer(self):
        key = f"answer {self.ticket}"
        return self.store.get(key).decode() if self.store.check([key]) else None

    def reports(self, codes, ticket=1, **more):
        """A supervisor reports these processes' exit codes."""
        self.beat += 1
        ranks = {member: [code, [0, 0, 0, 0], None] for member, code in codes.items()}
        report = {"ranks": ranks, "signals": [], "ended": False, "beat": self.beat} | more
        self.store.set(f"report {ticket}", json.dumps(report))

    def hears_for_a_while(self):
        for _ in range(7):
            self.reports({1: None, 2: None})
            self.after(1)

    def after(self, seconds):
        """The job's state when so many seconds have passed."""
        self.now += seconds
        self.machines.exchange()
        self.machines.admit(self.has_begun)
        state = json.loads(self.store.get("job"))
        return state


WRONG_COUNTS = "--nproc is {} here and 1,2 on machine 0: it must be equal"
WRONG_RATE = "--lr is 0.2 here and 0.1 on machine 0"


@pytest.fixture
def unmet(tmp_path, monkeypatch):
    return Job(tmp_path, monkeypatch)


@pytest.fixture
def job(unmet):
    """Machine 1 has joined."""
    assert unmet.comes(1, 1, 2) == ""
    return unmet


def test_orders_go_there_and_words_of_ranks_come_back(job):
    state = job.after(1)
    assert (state["generation"], state["announced"]) == (0, None)
    job.board.announce([0, 2], [0, 1])
    job.board.note_state(0, 8)
    job.ranks[2].send_signal(signal.SIGTERM)
    assert job.ranks[1].poll() is None
    said = [None, [2, 1, 7, 1], None], [3, [0, 0, 0, 0], [7, "ValueError: no"]]
    job.reports({}, ranks=dict(zip((1, 2), said, strict=True)))
    state = job.after(1)
    assert (state["generation"], state["announced"]) == (1, [[0, 2], [0, 1]])
    assert state["orders"] == {"1": [["start", 1, 0], ["start", 2, 0], ["signal", 2, 15]]}
    assert state["words"] == [[0, 0, 0, 8], [2, 1, 7, 1], [0, 0, 0, 0]]
    assert (job.ranks[1].poll(), job.ranks[2].poll(), job.ranks[2].wait()) == (None, 3, 3)
    assert job.board.words(1) == [2, 1, 7, 1]
    assert job.board.failure(2) == (7, "ValueError: no")


def test_a_silent_machine_is_lost_with_its_ranks(job, capfd):
    job.reports({1: 0, 2: None})
    job.after(1)
    job.after(other_machines.LOST_S)
    assert not job.machines.lost
    state = job.after(1)
    assert job.machines.lost == {1}
    assert (job.ranks[1].poll(), job.ranks[2].poll()) == (0, -signal.SIGKILL)
    # Only the way to it may be gone: the one that still runs there must not go on.
    assert state["orders"]["1"][2:] == [["signal", 2, signal.SIGKILL]]
    job.has_begun = False
    job.reports({1: 0, 2: 0})
    job.after(1)
    assert (job.machines.lost, job.joined) == ({1}, [])
    # Others go on: it may join.
    job.has_begun = True
    job.after(1)
    assert (job.machines.lost, job.joined) == (set(), [(1, 2)])
    assert job.ranks[2].poll() == -signal.SIGKILL
    job.machines.start(1, 3)
    assert job.after(1)["orders"]["1"][3:] == [["start", 3, 0]]
    assert capfd.readouterr().err == (
        "machine 1 has not answered for 6 s: its ranks are lost\nmachine 1 answers again\n"
    )


def test_a_machine_may_be_started_late(unmet, capfd):
    unmet.after(60)
    assert not unmet.machines.lost
    unmet.after(1)
    assert unmet.machines.lost == {1}
    assert unmet.ranks[1].poll() == -signal.SIGKILL
    # The others compared theirs without it.
    assert unmet.comes(1, 1, 2, lr="0.2") == WRONG_RATE
    assert unmet.comes(1, 1, 2) == ""
    assert (unmet.machines.lost, unmet.joined) == (set(), [(1, 2)])
    # It knows nothing of the ranks that it did not start.
    assert unmet.after(1)["orders"] == {"2": []}
    assert capfd.readouterr().err.splitlines()[1:] == ["machine 1 joined"]


def test_two_supervisors_of_one_machine(job):
    job.reports({1: None, 2: None})
    assert job.comes(1, 1, 2, lr="0.2") == WRONG_RATE
    assert job.comes(1, 1, 2) is None
    job.hears_for_a_while()
    assert job.answer() == "--node-rank 1 was given on two machines"
    assert not job.machines.lost


def test_a_machine_that_is_new(job, capfd):
    assert job.comes(3, 1, 2, 4, 4) is None
    job.hears_for_a_while()
    assert job.answer() == "--node-rank is 3, and the next machine that comes is 2"
    assert job.comes(2, 1, 3, 4) == WRONG_COUNTS.format("1,3,4")
    assert job.comes(2, 1, 2, 5) == "too many"
    assert job.joined == [(2, 5)]
    assert (job.comes(2, 1, 2, 4), job.joined) == ("", [(2, 5), (2, 4)])
    rank = job.machines.start(2, 3)
    state = job.after(1)
    assert state["orders"][str(job.ticket)] == [["start", 3, 0]]
    job.reports({3: 5}, ticket=job.ticket)
    job.after(1)
    assert rank.code == 5
    assert capfd.readouterr().err == "machine 2 joined\n"


def test_a_signal_there_is_passed_on_once(job):
    job.reports({}, signals=[15])
    job.after(1)
    job.reports({}, signals=[15, 2])
    job.after(1)
    job.after(1)
    assert job.signals == [15, 2]


def test_the_end_waits_until_it_was_noticed(job, monkeypatch):
    def sleep(seconds):
        job.now += seconds
        job.reports({}, ended=json.loads(job.store.get("job"))["end"] == 3)

    monkeypatch.setattr(other_machines.time, "sleep", sleep)
    began = job.now
    job.machines.end(3)
    assert job.now - began < 1
