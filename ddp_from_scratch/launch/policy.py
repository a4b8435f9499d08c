"""What follows when an agent loses a rank or a machine: decisions, without processes or messages.

FailTogether    the first failure ends the job on all machines
Elastic         the other ranks continue, and a new process replaces a lost one
"""

import math
import signal
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

from ddp_from_scratch.launch.job_store import NO_STATE, Member

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
LOST_S = 5.0  # an elastic job continues without a machine that is silent for so long
_USAGE = 2  # the exit code of a UsageError


class Loss(NamedTuple):
    """A process that has ended with another code than 0."""

    name: str  # "rank 1"; in an elastic job "process 1"
    code: int  # as `subprocess` gives it: -N after signal N
    in_generation: bool = True  # it trained with the others, or was to
    report: Member = Member()  # its last one
    # The machine that does not answer, if that is all that is known.
    lost_machine: int | None = None

    @property
    def failure(self) -> Any:
        """See `Member.failure`. The start is step `NO_STATE`."""
        if self.never_joined:
            return [NO_STATE, f"exit code {self.code}"]
        return self.report.failure

    @property
    def never_joined(self) -> bool:
        return self.code > 0 and not self.report.joined


class JobState(NamedTuple):
    """What is left of the job after a loss."""

    running: int  # processes
    stopped_by: int = 0  # the first stop signal
    server_code: int | None = None  # the fork server's exit code, once it has ended
    remaining: int = 0  # processes of the generation that run
    has_state: bool = False  # a process that runs has trained state
    ended_well: bool = False  # a process with trained state has exited with 0
    failures: int = 0  # so far, of those that count
    last_failure: Any = None  # the last of them, as `Loss.failure`


class Verdict(NamedTuple):
    """What is done about a loss. By default nothing: the job continues."""

    exit_code: int | None = None  # ends the job here
    text: str = ""  # is printed
    reason: str = ""  # is told to the other machines
    counts: bool = False  # as a failure, towards the limit
    replace: bool = False  # another process starts in its place
    stopped_by: int = 0  # the job stops as if this signal had been received


@dataclass(frozen=True)
class FailTogether:
    """The first failure, of a rank or a machine, ends the job on all machines."""

    elastic: ClassVar[bool] = False
    last_word_s: ClassVar[float] = 2.0  # for the other machines to hear of the end
    restart_s: ClassVar[float] = 0.0  # how long a machine's second agent waits for a place

    def verdict(self, loss: Loss, job: JobState) -> Verdict:
        """Returns what to do after `loss`."""
        return _while_stopping(loss, job) if job.stopped_by else _failed(loss, job)

    def patience(self, has_come: bool, has_ended: bool, timeout: float) -> float:
        """Returns for how many seconds a machine may be silent.

        Ranks that wait for one that has not come have a timeout of their own.
        """
        return timeout if has_come and not has_ended else math.inf

    def machine_lost(self, machine: int, silence: float) -> Verdict:
        """Returns what to do about a machine that has been silent for too long."""
        return Verdict(1, reason=no_answer(machine, silence))

    def machine_failed(self, machine: int, why: str) -> Verdict:
        """Returns what to do about a machine whose agent ends, or may not join."""
        return Verdict(1, reason=f"machine {machine}: {why}")


@dataclass(frozen=True)
class Elastic:
    """The other ranks continue; up to `max_restarts` failed ones are replaced.

    A lost machine is lost with its ranks, and gets new ones when it is reachable again. Without
    `replace_wrong`, a rank that has computed wrongly is not replaced.
    """

    max_restarts: int
    replace_wrong: bool = True

    elastic: ClassVar[bool] = True
    last_word_s: ClassVar[float] = LOST_S
    restart_s: ClassVar[float] = LOST_S + 1  # until the first agent is lost

    def verdict(self, loss: Loss, job: JobState) -> Verdict:
        """Returns what to do after `loss`."""
        if not job.stopped_by and loss.code - 128 in STOPS:
            # It has received the signal itself, and agreed with its peers to stop.
            job = job._replace(stopped_by=loss.code - 128)
        if job.stopped_by:
            return _while_stopping(loss, job)
        if job.server_code is not None:
            return _failed(loss, job)
        if job.ended_well and not job.has_state and not loss.report.max_world_size:
            return Verdict()  # the job ended as this process was about to join
        again = loss.failure is not None and loss.failure == job.last_failure
        if loss.never_joined and job.has_state and (again or loss.code == _USAGE):
            how = f"{how_it_ended(loss.code)} before it had joined"
            return Verdict(text=f"{loss.name} {how}; no other is started in its place")
        return self._end(loss, job, again) or self._continue(loss, job)

    def patience(self, has_come: bool, has_ended: bool, timeout: float) -> float:
        """Returns for how many seconds a machine may be silent."""
        return LOST_S if has_come else timeout

    def machine_lost(self, machine: int, silence: float) -> Verdict:
        """Returns what to do about a machine that has been silent for too long."""
        told = f"machine {machine} has not answered for {silence:.0f} s: its ranks are lost"
        return Verdict(text=told)

    def machine_failed(self, machine: int, why: str) -> Verdict:
        """Returns what to do about a machine whose agent ends, or may not join."""
        return Verdict()  # it is lost once it is silent, and may rejoin

    def _end(self, loss: Loss, job: JobState, again: bool) -> Verdict | None:
        """Returns the verdict if the others cannot continue."""
        if again:
            step, text = loss.failure
            where = "the start" if step == NO_STATE else f"step {step + 1}"
            told = f"{where} failed again with {text}; all other ranks were stopped"
            return Verdict(exit_code(loss.code), told)
        if loss.code == _USAGE:
            return _failed(loss, job)
        if loss.report.max_world_size and not job.has_state:
            told = f"{_what_happened(loss)}: no rank with trained state is left; ending the job"
            return Verdict(exit_code(loss.code), told)
        return None if job.running else _failed(loss, job)

    def _continue(self, loss: Loss, job: JobState) -> Verdict:
        ranks = "1 rank" if job.remaining == 1 else f"{job.remaining} ranks"
        told = f"{_what_happened(loss)}: continuing with {ranks}"
        if loss.lost_machine is not None:
            return Verdict(text=told)  # it gets its ranks back when it rejoins
        if loss.report.wrong and not self.replace_wrong:
            return Verdict(text=f"{told}; it computed wrongly, and is not replaced")
        if job.failures >= self.max_restarts:
            told += f"; all {self.max_restarts} replacements are used"
            return Verdict(text=told, counts=True)
        told += f"; starting another (failure {job.failures + 1} of {self.max_restarts})"
        return Verdict(text=told, counts=True, replace=True)


Policy: TypeAlias = FailTogether | Elastic


def stopped(number: int) -> Verdict:
    """Ends the job after its ranks were asked to stop by signal `number`."""
    return Verdict(128 + number, reason=f"stopped by {signal.Signals(number).name}")


def ended(number: int) -> Verdict:
    """Ends the job at once, as signal `number` asks."""
    name = signal.Signals(number).name
    return Verdict(128 + number, f"ending all ranks ({name})", f"ended by {name}")


def server_ended(code: int) -> Verdict:
    """Ends the ranks here, which have ended with their fork server."""
    who = "the fork server, from which all ranks here were started,"
    how = f"{who} {how_it_ended(code)}"
    return Verdict(exit_code(code), how if code < 0 else "", how)


def no_answer(machine: int, silence: float) -> str:
    """Returns the message of a job that has lost a machine."""
    return f"lost the other ranks: machine {machine} has not answered for {silence:.0f} s"


def how_it_ended(code: int) -> str:
    """Describes an exit code of `subprocess` in words."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def exit_code(code: int) -> int:
    """Converts an exit code of `subprocess` to a shell's."""
    return 128 - code if code < 0 else code


def _while_stopping(loss: Loss, job: JobState) -> Verdict:
    # Ranks that were asked to stop exit one after another with the signal's code. If one was killed
    # instead, the others wait for a rank that is gone.
    died = loss.code < 0 and loss.in_generation
    if died or not job.running:
        return stopped(job.stopped_by)._replace(stopped_by=job.stopped_by)
    return Verdict(stopped_by=job.stopped_by)


def _failed(loss: Loss, job: JobState) -> Verdict:
    if job.server_code is not None:
        return server_ended(job.server_code)
    how = f"{loss.name} {how_it_ended(loss.code)}"
    # One that exits by itself has printed why.
    told = f"{how}; all other ranks were stopped" if loss.code < 0 else ""
    return Verdict(exit_code(loss.code), told, how)


def _what_happened(loss: Loss) -> str:
    if loss.lost_machine is not None:
        return f"{loss.name} was on machine {loss.lost_machine}"
    return f"{loss.name} {how_it_ended(loss.code)}"
