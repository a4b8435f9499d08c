"""What follows when a rank is lost: every case of both policies, without processes."""

import math
import signal
from typing import NamedTuple

import pytest

from ddp_from_scratch.launch.job_store import NO_STATE, Member
from ddp_from_scratch.launch.policy import Elastic, FailTogether, JobState, Loss, Verdict

KILL = -signal.SIGKILL
OTHERS = "all other ranks were stopped"


class Case(NamedTuple):
    loss: Loss
    job: JobState
    verdict: Verdict


RANK_3 = Loss("rank 3", 7)
KILLED = RANK_3._replace(code=KILL)
SERVER = "the fork server, from which all ranks here were started,"
TOGETHER = {
    "it exits by itself, and has said why": Case(
        RANK_3, JobState(2), Verdict(7, reason="rank 3 ended with exit code 7")
    ),
    "it is killed": Case(
        *(KILLED, JobState(2)),
        Verdict(137, f"rank 3 was killed by SIGKILL; {OTHERS}", "rank 3 was killed by SIGKILL"),
    ),
    "the fork server exits": Case(
        *(RANK_3._replace(code=1), JobState(0, server_code=1)),
        Verdict(1, reason=f"{SERVER} ended with exit code 1"),
    ),
    "the fork server is killed": Case(
        *(KILLED, JobState(0, server_code=KILL)),
        Verdict(137, f"{SERVER} was killed by SIGKILL", f"{SERVER} was killed by SIGKILL"),
    ),
    "a signal stops it, and others still save": Case(
        *(RANK_3._replace(code=143), JobState(2, stopped_by=2), Verdict(stopped_by=2))
    ),
    "a signal stops the last": Case(
        *(RANK_3._replace(code=143), JobState(0, stopped_by=2)),
        Verdict(130, reason="stopped by SIGINT", stopped_by=2),
    ),
    "it dies of a signal while the others wait for it": Case(
        KILLED, JobState(2, stopped_by=15), Verdict(143, reason="stopped by SIGTERM", stopped_by=15)
    ),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_ranks_that_end_together(name):
    case = TOGETHER[name]
    assert FailTogether().verdict(case.loss, case.job) == case.verdict


JOINED = Member(joined=1)
TRAINED = JOINED._replace(max_world_size=8)
RAISED = TRAINED._replace(failure=[6, "ValueError: no"])
WRONG = TRAINED._replace(failure=[6, "WrongResultError: rank 1 computes wrongly"], wrong=True)
ONE = Loss("process 1", KILL, report=TRAINED)
OURS = JobState(running=2, remaining=2, has_state=True)
NOBODY = JobState(running=0)
AT_START = [NO_STATE, "exit code 5"]


def goes_on(text, **more):
    return Verdict(text=f"process 1 {text}", counts=True, **more)


NO_STATE_LEFT = "no rank with trained state is left; ending the job"
ELASTIC = {
    "it is killed": Case(
        *(ONE, OURS),
        goes_on(
            "was killed by SIGKILL: continuing with 2 ranks; starting another (failure 1 of 3)",
            replace=True,
        ),
    ),
    "it raises": Case(
        *(ONE._replace(code=1, report=RAISED), OURS._replace(remaining=1, failures=2)),
        goes_on(
            "ended with exit code 1: continuing with 1 rank; starting another (failure 3 of 3)",
            replace=True,
        ),
    ),
    "no replacement is left": Case(
        *(ONE, OURS._replace(failures=3)),
        goes_on("was killed by SIGKILL: continuing with 2 ranks; all 3 replacements are used"),
    ),
    "it computes wrongly": Case(
        *(ONE._replace(code=1, report=WRONG), OURS),
        goes_on(
            "ended with exit code 1: continuing with 2 ranks; starting another (failure 1 of 3)",
            replace=True,
        ),
    ),
    "its machine does not answer": Case(
        *(ONE._replace(lost_machine=2), OURS),
        Verdict(text="process 1 was on machine 2: continuing with 2 ranks"),
    ),
    "the same exception at the same step": Case(
        *(ONE._replace(code=1, report=RAISED), OURS._replace(last_failure=[6, "ValueError: no"])),
        Verdict(1, f"step 7 failed again with ValueError: no; {OTHERS}"),
    ),
    "another exception at the same step": Case(
        *(ONE._replace(code=1, report=RAISED), OURS._replace(last_failure=[6, "ValueError: a"])),
        goes_on(
            "ended with exit code 1: continuing with 2 ranks; starting another (failure 1 of 3)",
            replace=True,
        ),
    ),
    "two are killed": Case(
        *(ONE, OURS._replace(failures=1, last_failure=None)),
        goes_on(
            "was killed by SIGKILL: continuing with 2 ranks; starting another (failure 2 of 3)",
            replace=True,
        ),
    ),
    "the start fails again": Case(
        *(Loss("process 1", 5), OURS._replace(has_state=False, last_failure=AT_START)),
        Verdict(5, f"the start failed again with exit code 5; {OTHERS}"),
    ),
    "one that joins fails as the one before": Case(
        *(Loss("process 1", 5), OURS._replace(last_failure=AT_START)),
        Verdict(
            text="process 1 ended with exit code 5 before it had joined; "
            "no other is started in its place"
        ),
    ),
    "one that joins has a user's mistake": Case(
        *(Loss("process 1", 2), OURS),
        Verdict(
            text="process 1 ended with exit code 2 before it had joined; "
            "no other is started in its place"
        ),
    ),
    "a user's mistake of one that trains": Case(
        *(ONE._replace(code=2), OURS), Verdict(2, reason="process 1 ended with exit code 2")
    ),
    "a user's mistake at the start": Case(
        *(Loss("process 1", 2), OURS._replace(has_state=False)),
        Verdict(2, reason="process 1 ended with exit code 2"),
    ),
    "the last that has trained": Case(
        *(ONE, OURS._replace(has_state=False)),
        Verdict(137, f"process 1 was killed by SIGKILL: {NO_STATE_LEFT}"),
    ),
    "the last that has trained, with its machine": Case(
        *(ONE._replace(lost_machine=2), OURS._replace(has_state=False)),
        Verdict(137, f"process 1 was on machine 2: {NO_STATE_LEFT}"),
    ),
    "the last, before it has trained": Case(
        *(ONE._replace(report=JOINED), NOBODY),
        Verdict(
            137, f"process 1 was killed by SIGKILL; {OTHERS}", "process 1 was killed by SIGKILL"
        ),
    ),
    "one that joins as the job ends": Case(
        Loss("process 1", 1), OURS._replace(has_state=False, ended_well=True), Verdict()
    ),
    "the fork server is killed": Case(
        *(ONE, OURS._replace(server_code=KILL)),
        Verdict(137, f"{SERVER} was killed by SIGKILL", f"{SERVER} was killed by SIGKILL"),
    ),
    "it received the signal itself": Case(
        *(ONE._replace(code=143), OURS, Verdict(stopped_by=signal.SIGTERM))
    ),
    "a signal stops it": Case(
        ONE._replace(code=1), OURS._replace(stopped_by=2), Verdict(stopped_by=2)
    ),
    "it dies of a signal while the others wait for it": Case(
        *(ONE, OURS._replace(stopped_by=2)),
        Verdict(130, reason="stopped by SIGINT", stopped_by=2),
    ),
    "one that has not joined dies of a signal": Case(
        *(ONE._replace(in_generation=False), OURS._replace(stopped_by=2), Verdict(stopped_by=2))
    ),
    "a signal stops the last": Case(
        *(ONE._replace(code=143), NOBODY),
        Verdict(143, reason="stopped by SIGTERM", stopped_by=signal.SIGTERM),
    ),
}


@pytest.mark.parametrize("name", ELASTIC)
def test_ranks_that_are_replaced(name):
    case = ELASTIC[name]
    assert Elastic(3).verdict(case.loss, case.job) == case.verdict


# Without `replace_wrong`.
NOT_REPLACED = {
    "it computes wrongly": Case(
        *(ONE._replace(code=1, report=WRONG), OURS),
        Verdict(
            text="process 1 ended with exit code 1: continuing with 2 ranks; it computed wrongly, "
            "and is not replaced"
        ),
    ),
    "the last that has trained computes wrongly": Case(
        *(ONE._replace(code=1, report=WRONG), OURS._replace(has_state=False)),
        Verdict(1, f"process 1 ended with exit code 1: {NO_STATE_LEFT}"),
    ),
    "it is killed": ELASTIC["it is killed"],
    "it raises": ELASTIC["it raises"],
    "a signal stops it": ELASTIC["a signal stops it"],
}


@pytest.mark.parametrize("name", NOT_REPLACED)
def test_ranks_that_computed_wrongly_are_not_replaced(name):
    case = NOT_REPLACED[name]
    assert Elastic(3, replace_wrong=False).verdict(case.loss, case.job) == case.verdict


SILENT = "machine 1 has not answered for 6 s"
LATE = "--nproc is 1,1 there and 1,2 on machine 0"


@pytest.mark.parametrize(
    ("policy", "lost", "failed", "patience"),
    [
        (
            FailTogether(),
            Verdict(1, reason=f"lost the other ranks: {SILENT}"),
            Verdict(1, reason=f"machine 1: {LATE}"),
            [math.inf, 60.0, math.inf],
        ),
        (Elastic(3), Verdict(text=f"{SILENT}: its ranks are lost"), Verdict(), [60.0, 5.0, 5.0]),
    ],
)
def test_a_lost_machine(policy, lost, failed, patience):
    """The patience before it has joined, once it has, and after its ranks have ended."""
    assert policy.machine_lost(1, 6.0) == lost
    assert policy.machine_failed(1, LATE) == failed
    states = [(False, False), (True, False), (True, True)]
    assert [policy.patience(*state, 60.0) for state in states] == patience
