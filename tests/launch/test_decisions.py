"""What supervisors decide: tables of events, with fake ranks and a fake clock."""

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ddp_from_scratch.launch import other_machines
from ddp_from_scratch.launch.board import Board
from ddp_from_scratch.launch.going_on import GoingOnWatch
from ddp_from_scratch.launch.other_machines import Follower
from ddp_from_scratch.launch.supervisor import _MpirunWatch
from ddp_from_scratch.launch.watch import Watch
from tests.launch.fake_ranks import (
    Event,
    Job,
    arrives,
    asks,
    ends,
    fails,
    generation,
    gets,
    ignores,
    is_stopped,
    trains,
)

INT, TERM, HUP, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL
USR1, USR2, QUIT = signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT
ALL = [INT, TERM, HUP, USR1, USR2, QUIT]
ASKED = "stopping all ranks; once more ends them at once"
LATER = 30.0  # longer than any limit of a supervisor


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """Whatever signals this process ignores (nohup), and is left with the handlers it had."""
    before = [signal.signal(number, signal.SIG_DFL) for number in ALL]
    yield Job(monkeypatch)
    now = [signal.signal(number, handler) for number, handler in zip(ALL, before, strict=True)]
    assert {handler for handler in now if handler is not signal.SIG_IGN} <= {signal.SIG_DFL}


@dataclass
class Case:
    """Events, and what comes of them."""

    events: list[Event]
    code: int | None  # None: the job still runs
    said: list[str] = field(default_factory=list)
    signals: list[list[int]] | None = None  # that each rank has got
    told: list[str] = field(default_factory=list)  # to other machines
    max_failures: int = 3
    nproc: int = 3


# All ranks end when one fails ---------------------------------------------------------------------

TOGETHER = {
    "all end well": Case([ends(0, 0), ends(2, 0), ends(1, 0)], 0, signals=[[], [], []]),
    "one fails": Case(
        [ends(0, 0), ends(1, 7)],
        7,
        signals=[[], [], [TERM]],
        told=["rank 1 ended with exit code 7"],
    ),
    "one is killed": Case(
        [ends(1, -KILL)],
        137,
        ["rank 1 was killed by SIGKILL; all other ranks were stopped"],
        [[TERM], [], [TERM]],
        ["rank 1 was killed by SIGKILL"],
    ),
    "one does not stop": Case(
        [ignores(2, TERM), ends(0, 3)],
        3,
        [],
        [[], [TERM], [TERM, KILL]],
        ["rank 0 ended with exit code 3"],
    ),
    **{
        f"{number.name}, and they take their time": Case(
            [
                (gets(number), *(ignores(r, TERM) for r in range(3))),
                LATER,
                ends(0, 143),
                LATER,
                ends(1, 0),
                ends(2, 143),
            ],
            128 + number,
            [ASKED],
            [[TERM]] * 3,
            [f"stopped by {number.name}"],
        )
        for number in (INT, TERM, USR1, HUP)
    },
    "a signal, and all finish": Case(
        [(gets(INT), *(ignores(r, TERM) for r in range(3)))] + [ends(r, 0) for r in range(3)],
        0,
        [ASKED],
    ),
    "a second signal": Case(
        [(gets(INT), *(ignores(r, TERM) for r in range(3))), gets(TERM)],
        130,
        [ASKED],
        [[TERM, KILL]] * 3,
        ["stopped by SIGINT"],
    ),
    "the end of a session is one signal": Case(
        [(gets(TERM), *(ignores(r, TERM) for r in range(3))), gets(HUP), gets(USR1), LATER]
        + [ends(r, 143) for r in range(3)],
        143,
        [ASKED],
        [[TERM]] * 3,
        ["stopped by SIGTERM"],
    ),
    # Rank 0 would save first, but waits for rank 1 to agree, which has not got so far.
    "one dies of the signal": Case(
        [(ignores(0, TERM), gets(TERM))],
        143,
        [ASKED],
        [[TERM, TERM, KILL], [TERM], [TERM]],
        ["stopped by SIGTERM"],
    ),
    "a second signal while one is given time": Case(
        [(ignores(0, TERM), gets(TERM)), gets(TERM)],
        143,
        [ASKED],
        [[TERM, TERM, KILL]] + [[TERM]] * 2,
        ["stopped by SIGTERM"],
    ),
    **{
        f"{number.name} ends all": Case(
            [gets(number)],
            128 + number,
            [f"ending all ranks ({number.name})"],
            [[TERM]] * 3,
            [f"ended by {number.name}"],
        )
        for number in (QUIT, USR2)
    },
}


@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_ranks_that_end_together(
    name: str, elsewhere: bool, job: Job, capfd: pytest.CaptureFixture[str]
) -> None:
    case, job.may_all_leave = TOGETHER[name], True
    environments = [{"RANK": str(rank)} for rank in range(3)]
    machines: Any = job if elsewhere else None
    assert job.run(Watch(["true"], environments, machines=machines), case.events) == case.code
    assert capfd.readouterr().err.splitlines() == case.said
    if case.signals is not None:
        assert job.signals() == case.signals
    for (_, asked), *_, (last, killed) in (r.signals for r in job.ranks if len(r.signals) > 1):
        assert last == KILL
        assert (killed - asked >= 5.0) == (name in ("one does not stop", "one dies of the signal"))
    assert job.told == (case.told if elsewhere else [])


def says(text: str) -> Event:
    return lambda job: setattr(job, "elsewhere", text)


LOST = "machine 1: rank 2 was killed by SIGKILL"
ELSEWHERE = {
    "a failure there": Case([says(LOST)], 1, [f"stopped: {LOST}"], [[TERM]] * 2),
    "which a rank here tells, too": Case([says(LOST), 0.6, ends(1, 3)], 3, [], [[TERM], []]),
    # A rank that has lost its peers ends with 1, and says nothing of the reason.
    "which a rank here suffers from": Case(
        [says(LOST), 0.6, ends(1, 1)], 1, [f"stopped: {LOST}"], [[TERM], []]
    ),
    "they are not done there": Case([ends(0, 0), ends(1, 0), LATER], None),
    "they are not done there, and a signal comes": Case(
        [ends(0, 0), ends(1, 0), LATER, gets(INT)], 0, [ASKED]
    ),
    "they are done": Case(
        [ends(0, 0), ends(1, 0), LATER, lambda job: setattr(job, "may_all_leave", True)], 0
    ),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_happens_on_other_machines(
    name: str, job: Job, capfd: pytest.CaptureFixture[str]
) -> None:
    case, machines = ELSEWHERE[name], job
    watched = Watch(["true"], [{"RANK": "0"}, {"RANK": "1"}], machines=machines)  # type: ignore[arg-type]
    assert job.run(watched, case.events) == case.code
    assert capfd.readouterr().err.splitlines() == case.said
    if case.signals is not None:
        assert job.signals() == case.signals


def test_nohup_stays_in_force(job: Job) -> None:
    signal.signal(HUP, signal.SIG_IGN)
    assert job.run(Watch(["true"], [{}]), [gets(HUP), LATER, ends(0, 0)]) == 0
    assert signal.getsignal(HUP) is signal.SIG_IGN


def test_a_signal_between_two_starts_reaches_the_later_rank_too(job: Job) -> None:
    job.on_start = lambda job: gets(INT)(job) if len(job.ranks) == 1 else None
    assert job.run(Watch(["true"], [{}, {}]), []) == 130
    assert job.signals() == [[TERM], [TERM]]


MPIRUN = {
    "one": Case([(ignores(0, USR1), gets(INT)), LATER, ends(0, 138)], 130, [ASKED], [[USR1]]),
    "two": Case([(ignores(0, USR1), gets(INT)), gets(INT)], 130, [ASKED], [[USR1, TERM]]),
    "three": Case(
        [(ignores(0, USR1, TERM), gets(INT)), gets(INT), gets(INT)],
        130,
        [ASKED],
        [[USR1, TERM, KILL]],
    ),
    "none": Case(
        [ends(0, -11)], 139, ["mpirun was killed by SIGSEGV; all other ranks were stopped"], [[]]
    ),
}


@pytest.mark.parametrize("name", MPIRUN)
def test_signals_that_mpirun_gets(name: str, job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    case = MPIRUN[name]
    assert job.run(_MpirunWatch(["/usr/bin/mpirun", "true"], [{}]), case.events) == case.code
    assert (capfd.readouterr().err.splitlines(), job.signals()) == (case.said, case.signals)


# The others go on ---------------------------------------------------------------------------------


def another(number: int, of: int = 3) -> str:
    return f"; starting another (failure {number} of {of})"


CANNOT_JOIN = (
    "process {} ended with exit code {} before it had joined; no other is started in its place"
)
KILLED_0 = f"process 0 was killed by SIGKILL: going on with 1 rank{another(1)}"
KILLED_1 = f"process 1 was killed by SIGKILL: going on with 2 ranks{another(1)}"
GOING_ON = {
    "one is killed, and another joins": Case(
        [
            *(trains(0, 1, 2), ends(1, -KILL), generation(2, 0, 2), trains(0, 2), asks(3)),
            # Not at once: the others may still be on their way into the last generation.
            *(generation(2, 0, 2), 0.3, generation(3, 0, 2, 3), trains(0, 2, 3), LATER),
            *(generation(3, 0, 2, 3), ends(0, 0), ends(2, 0), ends(3, 0)),
        ],
        0,
        [KILLED_1],
        [[]] * 4,
    ),
    "one that lost a peer asks": Case(
        [trains(0, 1, 2), asks(2), generation(2, 0, 1, 2), LATER, generation(2, 0, 1, 2)], None
    ),
    "one that ended well is not missed": Case(
        [
            trains(0, 1, 2),
            ends(0, 0),
            generation(1, 0, 1, 2),
            ends(1, -KILL),
            generation(2, 2),
            ends(2, 0),
        ],
        0,
        ["process 1 was killed by SIGKILL: going on with 1 rank; no replacement is left of 0"],
        max_failures=0,
    ),
    "one that ended well is not waited for": Case(
        [trains(0, 1, 2), asks(1), generation(2, 0, 1, 2), ends(0, 0), generation(3, 1, 2)], None
    ),
    "all that have trained are done": Case(
        [trains(0, 1), ends(0, -KILL), generation(2, 1), ends(1, 0)],
        0,
        [KILLED_0],
        [[], [], [TERM]],
        nproc=2,
    ),
    "one ends well before any has trained": Case(
        [(arrives(0), ends(0, 0)), LATER, generation(1, 0, 1, 2)], None, [], [[], [TERM], [TERM]]
    ),
    "all end well without a state": Case([ends(0, 0), ends(1, 0), ends(2, 0)], 0),
    "a user's mistake at the start": Case([ends(1, 2)], 2, [], [[TERM], [], [TERM]]),
    "a user's mistake later": Case([trains(0, 1, 2), ends(1, 2)], 2),
    "the same exception at the same step": Case(
        [
            trains(0, 1, 2),
            fails(1, 6, "ValueError: no"),
            fails(3, 7, "ValueError: no"),
            fails(4, 7, "ValueError: no"),
        ],
        1,
        [
            f"process 1 ended with exit code 1: going on with 2 ranks{another(1)}",
            f"process 3 ended with exit code 1: going on with 2 ranks{another(2)}",
            "step 8 failed again with ValueError: no; all other ranks were stopped",
        ],
    ),
    "other exceptions at the same step": Case(
        [
            trains(0, 1, 2),
            fails(1, 7, "ValueError: no"),
            fails(3, 7, "ValueError: yes"),
            fails(4, 7, "ValueError: no"),
            generation(2, 0, 2),
        ],
        None,
        [
            f"process {member} ended with exit code 1: going on with 2 ranks{another(number)}"
            for number, member in enumerate((1, 3, 4), 1)
        ],
    ),
    "a fault between two exceptions": Case(
        [
            trains(0, 1, 2),
            fails(1, 7, "ValueError: no"),
            ends(3, -KILL),
            fails(4, 7, "ValueError: no"),
        ],
        None,
        [
            f"process 1 ended with exit code 1: going on with 2 ranks{another(1)}",
            f"process 3 was killed by SIGKILL: going on with 2 ranks{another(2)}",
            f"process 4 ended with exit code 1: going on with 2 ranks{another(3)}",
        ],
    ),
    "the only one fails at its start": Case([ends(0, 5)], 5, nproc=1),
    "the start fails twice": Case(
        [ends(1, 5), ends(2, 5)],
        5,
        [
            f"process 1 ended with exit code 5: going on with 1 rank{another(1)}",
            "the start failed again with exit code 5; all other ranks were stopped",
        ],
        nproc=2,
    ),
    "the start fails with another code": Case(
        [ends(1, 5), ends(2, 6)],
        None,
        [
            f"process 1 ended with exit code 5: going on with 1 rank{another(1)}",
            f"process 2 ended with exit code 6: going on with 1 rank{another(2)}",
        ],
        nproc=2,
    ),
    "one that cannot join, by its user's mistake": Case(
        [trains(0, 1), ends(0, -KILL), generation(2, 1), ends(2, 2), LATER, ends(1, 0)],
        0,
        [KILLED_0, CANNOT_JOIN.format(2, 2)],
        [[]] * 3,
        nproc=2,
    ),
    "one that cannot join, for the second time": Case(
        [trains(0, 1), ends(0, -KILL), ends(2, 5), ends(3, 5), LATER, ends(1, 0)],
        0,
        [
            KILLED_0,
            f"process 2 ended with exit code 5: going on with 1 rank{another(2)}",
            CANNOT_JOIN.format(3, 5),
        ],
        [[]] * 4,
        nproc=2,
    ),
    "too many failures": Case(
        [trains(0, 1, 2), ends(1, 9), (arrives(3), ends(3, 9)), LATER, generation(2, 0, 2)],
        None,
        [
            f"process 1 ended with exit code 9: going on with 2 ranks{another(1, of=1)}",
            "process 3 ended with exit code 9: going on with 2 ranks; no replacement is left of 1",
        ],
        max_failures=1,
    ),
    "the last that has trained": Case(
        [trains(0, 1), ends(0, -KILL), ends(1, -TERM)],
        143,
        [
            KILLED_0,
            "process 1 was killed by SIGTERM: no rank is left that has trained; the run ends",
        ],
        [[], [], [TERM]],
        nproc=2,
    ),
    # Process 1 has not trained yet, as one may see it whose note comes late.
    "the only one that has trained": Case(
        [trains(0), ends(0, -KILL)],
        137,
        ["process 0 was killed by SIGKILL: no rank is left that has trained; the run ends"],
    ),
    "all at once": Case(
        [trains(0, 1), (ends(0, -KILL), ends(1, 9))],
        9,
        [
            KILLED_0,
            "process 1 ended with exit code 9: no rank is left that has trained; the run ends",
        ],
        nproc=2,
    ),
    "one is stopped": Case(
        [trains(0, 1, 2), is_stopped(1), 5.1, generation(2, 0, 2)],
        None,
        [KILLED_1],
        [[TERM], [KILL], [TERM], [TERM]],
    ),
    "one is stopped for a while, twice": Case(
        [
            trains(0, 1, 2),
            is_stopped(1),
            4.0,
            is_stopped(1, False),
            is_stopped(1),
            4.0,
            is_stopped(1, False),
            LATER,
            generation(1, 0, 1, 2),
        ],
        None,
    ),
    "a signal stops all and replaces none": Case(
        [
            trains(0, 1, 2),
            (gets(TERM), *(ignores(r, TERM) for r in range(3))),
            asks(2),
            LATER,
            ends(0, 143),
            ends(1, 1),
            LATER,
            generation(1, 0, 1, 2),
            ends(2, 143),
        ],
        143,
        [ASKED],
        [[TERM]] * 3,
    ),
    "a signal, and all finish": Case(
        [
            trains(0, 1, 2),
            (gets(TERM), *(ignores(r, TERM) for r in range(3))),
            (ends(0, 0), ends(1, 0), ends(2, 0)),
        ],
        143,
        [ASKED],
    ),
    "one dies of the signal": Case(
        [trains(0, 1, 2), (gets(INT), ignores(0, TERM), ignores(1, TERM))],
        130,
        [ASKED],
        [[TERM, TERM, KILL], [TERM, TERM, KILL], [TERM]],
    ),
    "one gets the signal by itself": Case(
        [
            trains(0, 1, 2),
            (ignores(0, TERM), ignores(2, TERM), ends(1, 143)),
            LATER,
            ends(0, 143),
            ends(2, 143),
        ],
        143,
        [ASKED],
        [[TERM], [], [TERM]],
    ),
    "SIGQUIT ends all": Case([trains(0, 1, 2), gets(QUIT)], 131, ["ending all ranks (SIGQUIT)"]),
}


@pytest.mark.parametrize("name", GOING_ON)
def test_ranks_that_go_on(
    name: str, job: Job, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    case, job.board = GOING_ON[name], Board(tmp_path, capacity=16)
    watched = GoingOnWatch(
        *(["true"], lambda member: {"DDP_MEMBER": str(member)}),
        *([case.nproc], case.max_failures, job.board, ()),
    )
    assert job.run(watched, case.events) == case.code
    assert capfd.readouterr().err.splitlines() == case.said
    assert [rank.environ["DDP_MEMBER"] for rank in job.ranks] == list(
        map(str, range(len(job.ranks)))
    )
    assert len(job.ranks) == case.nproc + sum("starting another" in line for line in case.said)
    if case.signals is not None:
        assert job.signals() == case.signals


# Several machines ---------------------------------------------------------------------------------


def comes(job: Job, ticket: int) -> None:
    """A supervisor of machine 1 asks to be let in."""
    arrival = {"node": 1, "counts": [1, 2], "asked": {}}
    assert job.store.add("tickets", 1) == ticket
    job.store.set(f"arrival {ticket}", json.dumps(arrival))


def reports(job: Job, words: dict[int, list[int]], ticket: int = 1) -> None:
    ranks = {member: [None, its, None] for member, its in words.items()}
    report = {"ranks": ranks, "signals": [], "ended": False, "beat": job.clock.now}
    job.store.set(f"report {ticket}", json.dumps(report))


def told(job: Job, ticket: int, answer: str, orders: list[list[object]]) -> None:
    """Holds what machine 0 has told a supervisor of machine 1."""
    assert job.store.get(f"answer {ticket}").decode() == answer
    assert json.loads(job.store.get("job"))["orders"].get(str(ticket), []) == orders


def test_a_machine_is_lost_and_comes_again(
    job: Job, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job.board, job.store = Board(tmp_path, capacity=16), dist.HashStore()
    started: list[list[object]] = [["start", 1, 0], ["start", 2, 0]]
    events = [
        partial(comes, ticket=1),
        partial(told, ticket=1, answer="", orders=started),
        # Both have come to generation 1, with a state that 3 ranks can use.
        (partial(reports, words={1: [0, 1, 0, 3], 2: [0, 1, 0, 3]}), trains(0)),
        *(generation(1, 0, 1, 2), 6.0, generation(2, 0)),
        partial(comes, ticket=2),
        partial(told, ticket=2, answer="", orders=[["start", 3, 0], ["start", 4, 0]]),
        (partial(reports, words={3: [3, 0, 0, 0], 4: [3, 0, 0, 0]}, ticket=2)),
        *(0.3, generation(3, 0, 3, 4), partial(reports, words={3: [3, 3, 0, 3]}, ticket=2)),
        # It gives up at once what is lost again, and does not let more in than there is use for.
        *(6.0, generation(4, 0), lambda job: job.board.note_state(0, 2), partial(comes, ticket=3)),
        partial(told, ticket=3, answer="the job can use 2 ranks, and has 1", orders=[]),
        ends(0, 0),
    ]
    watched = GoingOnWatch(
        *(["true"], lambda member: {"DDP_MEMBER": str(member)}, [1, 2], 0, job.board, ()),
        *(job.store, {}, 60.0),
    )
    assert job.run(watched, events) == 0
    silence = "machine 1 has not answered for 5 s: its ranks are lost"
    lost = "process {} was on machine 1: going on with {}"
    assert capfd.readouterr().err.splitlines() == [
        *(silence, lost.format(1, "2 ranks"), lost.format(2, "1 rank")),
        "machine 1 has come again",
        *(silence, lost.format(3, "2 ranks"), lost.format(4, "1 rank")),
    ]


class Link:
    """In the place of the thread that talks to machine 0; always heard."""

    def __init__(self, store: Any, ticket: int) -> None:
        self.ticket, self.clock = ticket, store.clock
        self.job: dict[str, Any] | None = None
        self.report: dict[str, Any] = {}
        self.is_closed, self.silent_since = False, float("inf")
        store.link = self

    @property
    def heard(self) -> float:
        return min(self.clock.now, self.silent_since)

    def close(self, report: dict[str, Any]) -> None:
        self.last_report = report


def orders(*orders: tuple[str, int, int], end: int | None = None, ticket: int = 7) -> Event:
    """What machine 0 says."""
    said = {"words": [[0, 0, 0, 8]], "generation": 1, "announced": [[0, 1], [0, 1]], "end": end}
    return lambda job: setattr(job.link, "job", said | {"orders": {str(ticket): orders}})


def machine_0(is_silent: bool) -> Event:
    now = lambda job: job.clock.now if is_silent else float("inf")  # noqa: E731
    return lambda job: setattr(job.link, "silent_since", now(job))


def reported(*numbers: int) -> Event:
    """Holds which signals machine 0 is told of."""

    def event(job: Job) -> None:
        assert job.link.report["signals"] == list(numbers)

    return event


START = ("start", 1, 0), ("start", 2, 0)
FOLLOWING = {
    "the end": Case([orders(*START), orders(*START, end=3)], 3, [], [[TERM]] * 2),
    "a signal to one": Case(
        [orders(*START), orders(*START, ("signal", 2, USR1)), generation(1, 0, 1), LATER],
        None,
        [],
        [[TERM], [USR1]],
    ),
    "a signal to one that has ended": Case(
        [orders(*START), ends(1, 0), orders(*START, ("signal", 2, USR1)), LATER],
        None,
        [],
        [[TERM], []],
    ),
    "machine 0 is gone": Case(
        [orders(*START), lambda job: setattr(job.link, "is_closed", True)],
        1,
        ["machine 0 no longer answers: all ranks here were stopped"],
    ),
    "machine 0 is silent": Case(
        [orders(*START), machine_0(is_silent=True), 4.9, LATER, LATER],
        1,
        [
            "machine 0 has not answered for 5 s: ending the ranks here",
            "machine 0 no longer answers: all ranks here were stopped",
        ],
        [[KILL]] * 2,
    ),
    "machine 0 is silent for a while": Case(
        [
            orders(*START),
            machine_0(is_silent=True),
            6.0,
            machine_0(is_silent=False),
            orders(*START, ("start", 3, 0)),
            LATER,
        ],
        None,
        ["machine 0 has not answered for 5 s: ending the ranks here"],
        [[KILL], [KILL], [TERM]],
    ),
    "what it said before it was silent": Case(
        [orders(*START), machine_0(is_silent=True), 6.0, orders(*START, ("start", 3, 0)), 20.0],
        None,
        ["machine 0 has not answered for 5 s: ending the ranks here"],
        [[KILL], [KILL]],
    ),
    "another supervisor of this machine": Case(
        [orders(*START), orders(ticket=8)],
        1,
        ["another command has taken this machine's place: its ranks were stopped"],
    ),
    # Machine 0 reads the first in a report, and has it sent to all.
    "one signal": Case([orders(*START), gets(TERM), reported(TERM), LATER], None),
    "two signals": Case([orders(*START), gets(TERM), gets(TERM)], 143, [], [[TERM]] * 2),
    "a signal while machine 0 is silent": Case(
        [orders(*START), machine_0(is_silent=True), 6.0, gets(INT)],
        130,
        ["machine 0 has not answered for 5 s: ending the ranks here"],
    ),
    "SIGQUIT": Case([orders(*START), gets(QUIT)], 131, ["ending all ranks (SIGQUIT)"]),
}


@pytest.mark.parametrize("name", FOLLOWING)
def test_a_machine_that_is_not_machine_0(
    name: str,
    job: Job,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    case, job.board = FOLLOWING[name], Board(tmp_path, capacity=16)
    monkeypatch.setattr(other_machines, "_Link", Link)
    follower = Follower(
        *(["true"], lambda member: {"DDP_MEMBER": str(member)}, job.board, job, 7, 40.0, ())
    )
    assert job.run(follower, case.events) == case.code
    assert capfd.readouterr().err.splitlines() == case.said
    assert job.link.last_report["ended"]
    if case.signals is not None:
        assert job.signals() == case.signals
