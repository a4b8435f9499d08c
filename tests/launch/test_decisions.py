"""What agents decide: tables of events (`fake_ranks.FakeJob`), and whole jobs in a simulation."""

import signal
from typing import NamedTuple
from unittest.mock import Mock

import pytest

from ddp_from_scratch.launch import start
from ddp_from_scratch.launch.agent import Agent
from ddp_from_scratch.launch.elastic_agent import ElasticAgent, NodeAgent
from ddp_from_scratch.launch.policy import Elastic
from tests.launch.fake_ranks import FakeJob
from tests.support.simulation import Simulation, Together
from tests.support.tiers import slow

NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT")
ALL = [signal.Signals[name] for name in NAMES]
ASKED = "stopping all ranks; once more ends them at once"


@pytest.fixture
def job(monkeypatch):
    """Whatever signals this process ignores (nohup), and is left with the handlers it had."""
    before = [signal.signal(number, signal.SIG_DFL) for number in ALL]
    yield FakeJob(monkeypatch)
    now = [signal.signal(number, handler) for number, handler in zip(ALL, before, strict=True)]
    assert {handler for handler in now if handler is not signal.SIG_IGN} <= {signal.SIG_DFL}


class Case(NamedTuple):
    events: str
    code: int | None  # None: the job still runs
    signals: str = ""  # that each rank has got
    said: tuple[str, ...] = ()
    told: str = ""  # to other machines
    max_restarts: int = 3
    nproc: int = 3


def check(case, job, capfd, agent):
    assert job.run(agent, case.events) == case.code
    assert capfd.readouterr().err.splitlines() == [*case.said]
    assert job.signals() == case.signals or not case.signals


OTHERS = "all other ranks were stopped"
KILLED = "rank 1 was killed by SIGKILL"
SLOWLY = "ignore 012 TERM"
THEIR_TIME = "wait 30 | ends 0 143 | wait 30 | ends 1 0 | ends 2 143"
ALL_TERM, ALL_KILL = ", ".join(["TERM"] * 3), ", ".join(["TERM KILL"] * 3)
TOGETHER = {
    "all end well": Case("ends 0 0 | ends 2 0 | ends 1 0", 0, "-, -, -"),
    "one fails": Case("ends 0 0 | ends 1 7", 7, "-, -, TERM", (), "rank 1 ended with exit code 7"),
    "one is killed": Case("ends 1 KILL", 137, "TERM, -, TERM", (f"{KILLED}; {OTHERS}",), KILLED),
    "one does not stop": Case(
        *("ignore 2 TERM | ends 0 3", 3, "-, TERM, TERM 5s KILL", ()),
        "rank 0 ended with exit code 3",
    ),
    **{
        f"{name}, and they take their time": Case(
            *(f"gets {name} & {SLOWLY} | {THEIR_TIME}", code, ALL_TERM, (ASKED,)),
            f"stopped by SIG{name}",
        )
        for name, code in (("INT", 130), ("TERM", 143), ("USR1", 138), ("HUP", 129))
    },
    "a signal, and all finish": Case(
        f"gets INT & {SLOWLY} | ends 0 0 | ends 1 0 | ends 2 0", 0, "", (ASKED,)
    ),
    "a second signal": Case(
        f"gets INT & {SLOWLY} | gets TERM", 130, ALL_KILL, (ASKED,), "stopped by SIGINT"
    ),
    "the end of a session is one signal": Case(
        *(f"gets TERM & {SLOWLY} | gets HUP | gets USR1 | wait 30 | ends 012 143", 143, ALL_TERM),
        *((ASKED,), "stopped by SIGTERM"),
    ),
    # Rank 0 would save first, but waits for rank 1 to agree, which has not got so far.
    "one dies of the signal": Case(
        *("ignore 0 TERM & gets TERM", 143, "TERM TERM 5s KILL, TERM, TERM"),
        *((ASKED,), "stopped by SIGTERM"),
    ),
    "SIGQUIT ends all": Case(
        "gets QUIT", 131, ALL_TERM, ("ending all ranks (SIGQUIT)",), "ended by SIGQUIT"
    ),
}


def rank_of(number):
    return {"RANK": str(number)}


@pytest.mark.parametrize("name", TOGETHER)
def test_ranks_that_end_together(name, job, capfd):
    job.may_all_leave = True
    check(TOGETHER[name], job, capfd, Agent(["true"], rank_of, range(3), peers=job))
    assert job.told == [TOGETHER[name].told] * bool(TOGETHER[name].told)


LOST = "stopped: machine 1: rank 2 was killed by SIGKILL"
ELSEWHERE = {
    "a failure there": Case("fails_elsewhere", 1, "TERM, TERM", (LOST,)),
    # A rank that has lost its peers ends with 1, and says nothing of the reason.
    "which a rank here suffers from": Case(
        "fails_elsewhere | wait 0.6 | ends 1 1", 1, "TERM, -", (LOST,)
    ),
    "they are not done there": Case("ends 01 0 | wait 30", None),
    "they are done": Case("ends 01 0 | wait 30 | done_elsewhere", 0),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_happens_on_other_machines(name, job, capfd):
    check(ELSEWHERE[name], job, capfd, Agent(["true"], rank_of, range(2), peers=job))


def test_nohup_stays_in_force(job):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert job.run(Agent(["true"], rank_of, range(1)), "gets HUP | wait 30 | ends 0 0") == 0
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_signal_between_two_starts_reaches_the_later_rank_too(job):
    job.on_start = lambda: job.gets("INT") if len(job.ranks) == 1 else None
    assert job.run(Agent(["true"], rank_of, range(2))) == 130
    assert job.signals() == "TERM, TERM"


CRASHED = f"mpirun was killed by SIGSEGV; {OTHERS}"
MPIRUN = {
    "one": Case("ignore 0 USR1 & gets INT | wait 30 | ends 0 138", 130, "USR1", (ASKED,)),
    "three": Case(
        "ignore 0 USR1 TERM & gets INT | gets INT | gets INT", 130, "USR1 TERM KILL", (ASKED,)
    ),
    "none": Case("ends 0 SEGV", 139, "-", (CRASHED,)),
}


@pytest.mark.parametrize("name", MPIRUN)
def test_signals_that_mpirun_gets(name, job, capfd, monkeypatch):
    monkeypatch.setattr(start.environment, "mpirun_command", lambda *_: (["/usr/bin/mpirun"], {}))
    case = MPIRUN[name]
    assert job.run(Mock(run=lambda: start.start_mpirun(1, [])), case.events) == case.code
    assert capfd.readouterr().err.splitlines() == ["starting: /usr/bin/mpirun", *case.said]
    assert job.signals() == case.signals


def lost(member, how, left, failure, of=3):
    ranks = f"{left} {'rank' if left == 1 else 'ranks'}"
    then = f"starting another (failure {failure} of {of})"
    if failure > of:
        then = f"all {of} replacements are used"
    return f"process {member} {ended(how)}: continuing with {ranks}; {then}"


def ended(how):
    return f"ended with exit code {how}" if isinstance(how, int) else f"was killed by SIG{how}"


def last(member, how):
    return f"process {member} {ended(how)}: no rank with trained state is left; ending the job"


def cannot_join(member, code):
    return f"process {member} {ended(code)} before it had joined; no other is started in its place"


KILLED_0, KILLED_1 = lost(0, "KILL", 1, 1), lost(1, "KILL", 2, 1)
KILLED_1_OF_2 = lost(1, "KILL", 1, 1)
PAIR = {"nproc": 2}
ELASTIC = {
    "one is killed, and another joins": Case(
        # Not at once: the others may still be on their way into the last generation.
        "train 012 | ends 1 KILL | generation 2 02 | train 02 | asks 3 | generation 2 02 | wait 0.3"
        " | generation 3 023 | train 023 | wait 30 | generation 3 023 | ends 0 0 | ends 2 0"
        " | ends 3 0",
        *(0, "-, -, -, -", (KILLED_1,)),
    ),
    "one hangs": Case(
        "train 012 | asks 0 & asks 2 | generation 2 012 | arrives 0 & arrives 2 | wait 39"
        " | generation 2 012 | wait 2 | wait 0.3 | generation 3 02 | train 02",
        *(None, "TERM, KILL, TERM, TERM"),
        ("process 1 has not met the others for 40 s: killing it", KILLED_1),
    ),
    "one that still imports does not hang": Case(
        "train 01 | wait 41 | generation 1 012 | wait 41", None, "TERM, TERM, TERM"
    ),
    "a user's mistake at the start": Case("ends 1 2", 2, "TERM, -, TERM"),
    "the same exception at the same step": Case(
        "train 012 | raises 1 6 no | raises 3 7 no | raises 4 7 no",
        *(1, "", (lost(1, 1, 2, 1), lost(3, 1, 2, 2), f"step 8 failed again with no; {OTHERS}")),
    ),
    "a fault between two exceptions": Case(
        "train 012 | raises 1 7 no | ends 3 KILL | raises 4 7 no",
        *(None, "", (lost(1, 1, 2, 1), lost(3, "KILL", 2, 2), lost(4, 1, 2, 3))),
    ),
    "the start fails twice": Case(
        *("ends 1 5 | ends 2 5", 5, ""),
        (lost(1, 5, 1, 1), f"the start failed again with exit code 5; {OTHERS}"),
        **PAIR,
    ),
    "one that cannot join, by its user's mistake": Case(
        "train 01 | ends 0 KILL | generation 2 1 | ends 2 2 | wait 30 | ends 1 0",
        *(0, "-, -, -", (KILLED_0, cannot_join(2, 2))),
        **PAIR,
    ),
    **{
        f"one that joins ends with {how} as the job does": Case(
            f"train 01 | ends 1 KILL | generation 2 0 | train 0 | ends 0 0 & ends 2 {how}",
            *(0, "-, -, -", (KILLED_1_OF_2,)),
            **PAIR,
        )
        for how in ("2", "1", "KILL")
    },
    "too many failures": Case(
        "train 012 | ends 1 9 | arrives 3 & ends 3 9 | wait 30 | generation 2 02",
        *(None, "", (lost(1, 9, 2, 1, of=1), lost(3, 9, 2, 2, of=1)), "", 1),
    ),
    "the last that has trained": Case(
        *("train 01 | ends 0 KILL | ends 1 TERM", 143, "-, -, TERM", (KILLED_0, last(1, "TERM"))),
        **PAIR,
    ),
    "a signal stops all and replaces none": Case(
        f"train 012 | gets TERM & {SLOWLY} | asks 2 | wait 30 | ends 0 143 | ends 1 1 | wait 30"
        " | generation 1 012 | ends 2 143",
        *(143, ALL_TERM, (ASKED,)),
    ),
}


def environment(member):
    return {"DDP_MEMBER": str(member)}


@pytest.mark.parametrize("name", ELASTIC)
def test_ranks_of_an_elastic_job(name, job, capfd):
    case = ELASTIC[name]
    mine = {"counts": [case.nproc], "store": job.said, "timeout": 40.0}
    check(
        case,
        job,
        capfd,
        ElasticAgent(
            ["true"], environment, range(case.nproc), policy=Elastic(case.max_restarts), **mine
        ),
    )
    started = case.nproc + sum("starting another" in line for line in case.said)
    assert [rank.environ["DDP_MEMBER"] for rank in job.ranks] == [*map(str, range(started))]


class Link:
    ticket, timeout = "7", 40.0
    is_closed, silent_since = False, float("inf")

    def __init__(self, job):
        self._job, self.report, self.closed_with = job, {"abandoned": []}, None
        job.link = self
        job.hears()

    @property
    def heard(self):
        return min(self._job.now, self.silent_since)

    def tell_failure(self, text):
        pass

    def close(self, code):
        self.closed_with = code


GONE = "machine 0 no longer answers: all ranks here were stopped"
SILENT = "machine 0 has not answered for 5 s: ending the ranks here"
LONG = SILENT.replace("5 s", "70 s")
TAKEN = "a newer command replaced this machine's: its ranks were stopped"
OBEYING = {
    "the end": Case("hears | hears_the_end 3", 3, "TERM, TERM"),
    "a signal to one": Case("hears | hears signal 2 USR1 | wait 30", None, "TERM, USR1"),
    "machine 0 is silent": Case(
        "hears | silence begins | wait 4.9 | wait 30 | wait 30", 1, "KILL, KILL", (SILENT, GONE)
    ),
    "machine 0 is silent for a while": Case(
        "hears | silence begins | wait 6 | silence ends | hears start 3 | wait 30",
        *(None, "KILL, KILL, TERM", (SILENT,)),
    ),
    "it stood still itself for longer than the timeout": Case(
        "hears | silence begins | stands_still 70 | silence ends | hears start 3 | wait 30",
        *(None, "KILL, KILL, TERM", (LONG,)),
    ),
    "and machine 0 is silent afterwards": Case(
        "hears | silence begins | stands_still 70 | wait 39 | wait 2",
        *(1, "KILL, KILL", (LONG, GONE)),
    ),
    "another agent of this machine": Case("hears | hears_of_another", 1, "", (TAKEN,)),
    # Machine 0 reads the first in a report, and has it sent to all.
    "one signal": Case("hears | gets TERM | reported TERM | wait 30", None),
    "two signals": Case("hears | gets TERM | gets TERM", 143, "TERM, TERM"),
}


@pytest.mark.parametrize("name", OBEYING)
def test_a_machine_that_is_not_machine_0(name, job, capfd):
    case, link = OBEYING[name], Link(job)
    check(case, job, capfd, NodeAgent(["true"], environment, (), peers=link))
    assert link.closed_with == (1 if case.code is None else case.code)


# In 1116 a machine loses the network for almost exactly as long as it takes to be given up.
SEEDS = [range(6), range(1116, 1117), *(slow(range(at, at + 18)) for at in range(6, 60, 18))]


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
@pytest.mark.parametrize("kind", [Simulation, Together])
def test_jobs_end_as_they_should_whatever_fails(kind, seeds):
    wrong = {seed: sim.wrong for seed in seeds if (sim := kind(seed).run()).wrong}
    assert wrong == {}


def test_a_seed_repeats_exactly():
    first, second = (Simulation(1).run() for _ in range(2))
    assert (first.now, first.messages, first.said) == (second.now, second.messages, second.said)
