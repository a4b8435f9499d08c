"""What the agents of several machines say to each other, on machine 0 and elsewhere."""

import json
import signal
import time
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from ddp_from_scratch import UsageError
from ddp_from_scratch.launch import nodes
from ddp_from_scratch.launch.nodes import Link, MachineRegistry
from ddp_from_scratch.launch.policy import LOST_S, Elastic, FailTogether


class MachineZero:
    def __init__(self, monkeypatch, counts, policy):
        self.now, self.beat = 100.0, 0
        monkeypatch.setattr(nodes.time, "monotonic", lambda: self.now)
        self.store = dist.HashStore()
        self.joined, self.most = [], 9
        job = nodes.Job(counts, policy.elastic, {"--lr": "0.1"})
        self.machines = MachineRegistry(self.store, job, policy, 60.0)

    def comes(self, node, *counts, lr="0.1", elastic=True):
        """An agent of this machine arrives; returns its answer, None if there is none yet."""
        self.ticket = self.store.add("tickets", 1)
        arrival = {"node": node, "counts": counts, "elastic": elastic, "asked": {"--lr": lr}}
        self.store.set(f"arrival {self.ticket}", json.dumps(arrival))
        self.after(0.1)
        return self.answer()

    def answer(self):
        key = f"answer {self.ticket}"
        return self.store.get(key).decode() if self.store.check([key]) else None

    def reports(self, codes=(), ticket=1, **more):
        self.beat += 1
        report = {"codes": dict(codes), "signals": [], "failure": None, "beat": self.beat}
        report |= {"abandoned": [], "ended": False, "left": False} | more
        self.store.set(f"report {ticket}", json.dumps(report))

    def hears_for_a_while(self):
        for _ in range(7):
            self.reports({1: None, 2: None})
            self.after(1)

    def after(self, seconds):
        self.now += seconds
        self.machines.exchange()
        self.joined += self.machines.admit(self.most, 3)
        return json.loads(self.store.get("job"))


WRONG_COUNTS = "--nproc is {} here and 1,2 on machine 0: it must be equal"
WRONG_RATE = "--lr is 0.2 here and 0.1 on machine 0"


@pytest.fixture
def unmet(monkeypatch):
    """An elastic job of two machines, with processes 0 here and 1 and 2 there."""
    job = MachineZero(monkeypatch, [1, 2], Elastic(3))
    job.ranks = {member: job.machines.start(1, member) for member in (1, 2)}
    return job


@pytest.fixture
def job(unmet):
    assert unmet.comes(1, 1, 2) == ""
    return unmet


def test_a_silent_machine_is_lost_with_its_ranks(job, capfd):
    job.reports(signals=[15])
    job.after(1)
    job.reports({1: 3, 2: None}, signals=[15, 2])
    job.after(1)
    assert job.machines.signals == [15, 2]
    job.after(LOST_S)
    assert not job.machines._nodes[1].lost
    state = job.after(1)
    assert job.machines._nodes[1].lost
    assert (job.ranks[1].wait(), job.ranks[2].wait()) == (3, -signal.SIGKILL)
    # Only the way to it may be gone: the one that still runs there must not continue.
    assert state["orders"]["1"][2:] == [["signal", 2, signal.SIGKILL]]
    job.most = 0
    job.reports({1: 3, 2: 0})
    job.after(1)
    assert (job.machines._nodes[1].lost, job.joined) == (True, [])
    # Others continue: it may join.
    job.most = 9
    job.after(1)
    assert (job.machines._nodes[1].lost, job.joined) == (False, [1, 1])
    assert job.ranks[2].poll() == -signal.SIGKILL
    job.machines.start(1, 3)
    assert job.after(1)["orders"]["1"][3:] == [["start", 3, 0]]
    assert capfd.readouterr().err == (
        "machine 1 has not answered for 6 s: its ranks are lost\nmachine 1 is reachable again\n"
    )


def test_a_machine_may_be_started_late(unmet, capfd):
    unmet.after(60)
    assert not unmet.machines._nodes[1].lost
    unmet.after(1)
    assert unmet.machines._nodes[1].lost
    assert unmet.ranks[1].poll() == -signal.SIGKILL
    assert unmet.comes(1, 1, 2, lr="0.2") == WRONG_RATE
    assert unmet.comes(1, 1, 2) == ""
    assert (unmet.machines._nodes[1].lost, unmet.joined) == (False, [1, 1])
    # It knows nothing of the ranks that it did not start.
    assert unmet.after(1)["orders"] == {"2": []}
    assert capfd.readouterr().err.splitlines()[1:] == ["machine 1 joined"]


def test_two_agents_of_one_machine(job):
    job.reports({1: None, 2: None})
    assert job.comes(1, 1, 2, lr="0.2") == WRONG_RATE
    assert job.comes(1, 1, 2) is None
    job.hears_for_a_while()
    assert job.answer() == "--node-rank 1 was given on two machines"
    assert not job.machines._nodes[1].lost


def test_a_machine_that_is_new(job, capfd):
    assert job.comes(3, 1, 2, 4, 4) is None
    job.hears_for_a_while()
    assert job.answer() == "--node-rank is 3, and the next machine to join is 2"
    assert job.comes(2, 1, 3, 4) == WRONG_COUNTS.format("1,3,4")
    told = "--elastic was not given here and given on machine 0: it must be the same on all"
    assert job.comes(2, 1, 2, 4, elastic=False) == told
    assert job.comes(2, 1, 2, 7) == "the job can use 9 ranks, and has 3"
    assert job.joined == []
    assert (job.comes(2, 1, 2, 4), job.joined) == ("", [2] * 4)
    assert capfd.readouterr().err == "machine 2 joined\n"


@pytest.fixture
def together(monkeypatch):
    return MachineZero(monkeypatch, [1, 1, 1], FailTogether())


@pytest.mark.parametrize(
    ("counts", "elastic", "here", "there"),
    [
        ((1, 1, 2), False, "--nproc is 1,1,2 {} and 1,1,1 on machine 0", "it must be equal"),
        ((1, 1, 1, 1), False, "--nproc is 1,1,1,1 {} and 1,1,1 on machine 0", "it must be equal"),
        ((1, 1, 1), True, "--elastic was given {} and not given on machine 0", "the same on all"),
    ],
)
def test_a_machine_that_does_not_fit_ends_all(counts, elastic, here, there, together):
    answer = together.comes(1, *counts, elastic=elastic)
    assert answer.startswith(here.format("here"))
    assert answer.endswith(there)
    # Else the others would wait for its ranks.
    assert together.machines.failure() == f"machine 1: {here.format('there')}"


def test_a_failure_is_passed_on(together):
    assert [together.comes(number, 1, 1, 1, elastic=False) for number in (1, 2)] == ["", ""]
    together.reports(failure="rank 1 ended with exit code 3", ended=True)
    together.reports(ticket=2, ended=True)
    assert not together.machines.may_leave()
    told = "machine 1: rank 1 ended with exit code 3"
    assert (together.after(1)["failure"], together.machines.failure()) == (told, told)


def test_a_machine_that_is_silent_and_one_that_has_ended(together):
    answers = [together.comes(1, 1, 1, 1, elastic=False) for _ in range(2)]
    assert answers == ["", "--node-rank 1 was given on two machines"]
    together.now += 59
    assert together.machines.failure() is None
    assert together.comes(2, 1, 1, 1, elastic=False) == ""  # it may be started late
    together.reports(ticket=2, ended=True)
    together.now += 1
    lost = "lost the other ranks: machine 1 has not answered for 60 s"
    assert together.machines.failure() == lost
    together.now += 100
    assert together.machines.failure() == lost


def test_machine_0_stands_still_as_the_job_ends(job, monkeypatch):
    pauses = [70.0, 0.1]

    def sleep(seconds):
        job.now += pauses.pop(0) if pauses else seconds
        if not pauses:  # until now the other agent could not hear of the end
            job.reports({1: 0, 2: 0}, left=True)

    monkeypatch.setattr(nodes.time, "sleep", sleep)
    job.machines.close(3)
    assert (pauses, json.loads(job.store.get("job"))["end"]) == ([], 3)


def test_ranks_that_end_because_machine_0_stood_still_are_lost_with_their_machine(job):
    job.reports({1: None, 2: None})
    job.after(1)
    job.reports({1: -signal.SIGKILL, 2: None})  # as its agent ends them
    job.now += 6
    job.machines.exchange()
    assert job.machines.lost == {1, 2}
    assert [rank.poll() for rank in job.ranks.values()] == [-signal.SIGKILL] * 2


def test_ranks_that_their_machine_ended_while_it_did_not_hear_machine_0_have_not_failed(job, capfd):
    job.reports({1: None, 2: 3})  # process 2 has failed by itself
    job.after(LOST_S - 0.1)
    job.reports({1: -signal.SIGKILL, 2: 3}, abandoned=[1])
    job.after(0.1)
    assert (job.machines.lost, job.joined) == ({1}, [1, 1])
    assert [rank.poll() for rank in job.ranks.values()] == [-signal.SIGKILL, 3]
    # New ranks are not lost by what the same report still says.
    job.machines.start(1, 3)
    job.reports({1: -signal.SIGKILL, 2: 3, 3: None}, abandoned=[1])
    job.after(0.1)
    assert (job.machines.lost, job.joined) == ({1}, [1, 1])
    told = "machine 1 has ended its ranks, because it did not hear machine 0"
    assert capfd.readouterr().err == f"{told}\nmachine 1 is reachable again\n"


def until(holds):
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_machine_0_has_gone():
    asks = 1, nodes.Job([1, 1], False, {}), 60.0
    gone = Mock(**{"get.return_value": b"", "set.side_effect": [None] + [RuntimeError] * 2})
    link = Link(gone, *asks)
    until(lambda: link.is_closed)
    assert link.failure() == "machine 0 no longer answers"
    gone.set.side_effect = [None, RuntimeError]
    link = Link(gone, *asks)
    until(link.may_leave)
    assert link.failure() is None  # its ranks have ended, and machine 0 has left as well
    with pytest.raises(UsageError, match="ended before machine 0 admitted this machine"):
        Link(Mock(**{"add.side_effect": RuntimeError}), *asks)


def test_a_failure_counts_that_comes_together_with_the_end():
    job = json.dumps({"orders": {}, "failure": "machine 0: rank 0 failed", "end": 1, "beat": 1})
    store = Mock(**{"get.side_effect": lambda key: b"" if key.startswith("answer") else job})
    link = Link(store, 1, nodes.Job([1, 1], False, {}), 60.0)
    until(lambda: link.job["end"] is not None)
    assert not link.may_leave()
    assert link.failure() == "machine 0: rank 0 failed"
    link.close(1)


def test_the_last_report_needs_no_answer_of_its_own():
    store = Mock(**{"get.return_value": b"", "check.side_effect": lambda keys: keys != ["job"]})
    Link(store, 1, nodes.Job([1, 1], False, {}), 60.0).close(0)
    until(lambda: store.compare_set.called)
    name, (_, _, report), _ = store.mock_calls[-1]  # then machine 0 may have closed the store
    assert name == "compare_set"
    assert json.loads(report)["left"]
