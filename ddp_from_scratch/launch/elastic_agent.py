"""The agents of an elastic job, on machine 0 and on the others; `job_store.py` has its messages."""

import math
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddp_from_scratch.launch.agent import Agent, Child
from ddp_from_scratch.launch.job_store import Generation, JobStore, Member
from ddp_from_scratch.launch.nodes import EXCHANGE_S, Link, MachineRegistry
from ddp_from_scratch.launch.policy import (
    LOST_S,
    Elastic,
    JobState,
    Loss,
    Verdict,
    ended,
    server_ended,
    stopped,
)
from ddp_from_scratch.launch.rank_process import say

_MEETING_S = 0.005  # between two looks while processes wait for each other
_SETTLED_S = 0.25


@dataclass(kw_only=True, eq=False)
class ElasticAgent(Agent):
    """Machine 0's agent of an elastic job.

    `counts` are the ranks of each machine at the start. A process that the others have met before,
    and wait for in vain for `timeout` seconds, is killed: it hangs.
    """

    peers: MachineRegistry | None = None
    policy: Elastic
    counts: Sequence[int]
    store: JobStore
    timeout: float = math.inf
    name: str = "process {}"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._machines = [node for node, count in enumerate(self.counts) for _ in range(count)]
        self._living: set[int] = set(self.members)  # the numbers of the running processes
        self._said: dict[int, Member] = {}  # each one's last report
        self._generation, self._announced_at = Generation(), 0.0
        self._ended_well, self._failures = False, 0
        self._last_failure: Any = None  # see `Member.failure`
        self._hanging: set[int] = set()  # killed for that; their exit codes may still be on the way
        self._announce(self._living)

    def _launch(self, member: int) -> Child:
        self.store.say(member, Member())
        machine = self._machines[member]
        if self.peers is not None and machine:
            return self.peers.start(machine, member)
        return super()._launch(member)

    def _start_another(self, machine: int) -> None:
        member = len(self._machines)
        self._machines.append(machine)
        self._start(member)

    def _poll(self) -> dict[int, int | None]:
        codes = super()._poll()
        # Read after the exit codes, so that the report of an exited process is complete.
        self._said = {member: self.store.member(member) for member in codes}
        return codes

    def _judge(self, member: int, code: int) -> Verdict:
        said = self._said[member]
        if code == 0:
            self._ended_well |= said.max_world_size > 0
            return Verdict()
        members, machine = {*self._generation.members}, self._machines[member]
        is_lost = self.peers is not None and member in self.peers.lost
        loss = Loss(
            self.name.format(member), code, member in members, said, machine if is_lost else None
        )
        job = JobState(
            running=len(self._living),
            stopped_by=self._received[0] if self._received else 0,
            server_code=self._server_code(),
            remaining=len(self._living & members),
            has_state=bool(self._with_state()),
            ended_well=self._ended_well,
            failures=self._failures,
            last_failure=self._last_failure,
        )
        verdict = self.policy.verdict(loss, job)
        if verdict.counts:
            self._failures, self._last_failure = self._failures + 1, loss.failure
        if verdict.replace:
            self._start_another(machine)
        return verdict

    def _continue(self) -> int | None:
        """Leads the processes to the next generation; returns the exit code at the job's end."""
        if not self._living or (self._ended_well and not self._with_state()):
            # A process that has not joined yet has no state to continue with.
            return self._carry_out(stopped(self._received[0])) if self._received else 0
        self._kill_stopped()
        self._note_arrivals()
        self._kill_hanging()
        if not self._received:
            self._regroup()
            self._admit()
        self._pause = 0.02 if self._generation.steps else _MEETING_S
        return None

    def _admit(self) -> None:
        """Starts the processes of machines that may join now."""
        if self.peers is None:
            return
        # Known only after the job has begun.
        able = [self._said[member].max_world_size for member in self._with_state()]
        # Some may have been lost since their exit codes were read.
        running = len(self._living - self.peers.lost)
        for machine in self.peers.admit(min(able, default=0), running):
            self._start_another(machine)

    def _note_arrivals(self) -> None:
        generation = self._generation
        said = [self._said.get(member, Member()) for member in generation.members]
        joined = [report for report in said if report.joined == generation.number]
        if any(report.max_world_size for report in joined):
            generation = generation._replace(started=True)
        if len(joined) == len(said):
            generation = generation._replace(steps=[report.step for report in said])
        if generation != self._generation:
            self._generation = generation
            self.store.announce(generation)

    def _kill_hanging(self) -> None:
        generation = self._generation
        # While this machine stood still, so did its ranks.
        waited = time.monotonic() - max(self._announced_at, self._woke)
        if generation.steps or waited <= self.timeout:
            return
        members = self._living.intersection(generation.members)
        came = {member for member in members if self._said[member].joined == generation.number}
        for member in members - came if came else ():
            # One that has never met the others may still import what it needs.
            if self._said[member].joined and member not in self._hanging:
                self._hanging.add(member)
                name = self.name.format(member)
                say(f"{name} has not met the others for {waited:.0f} s: killing it")
                self._children[member].send_signal(signal.SIGKILL)

    def _regroup(self) -> None:
        number, members, *_ = self._generation
        present = self._living & set(members)
        asking = {m for m, said in self._said.items() if m in self._living and said.wants > number}
        lost = any(  # one that exited with 0 counts only if its peers wait for it to join
            self._children[member].poll() or self.store.member(member).joined < number
            for member in set(members) - present
        )
        # One that joins waits a moment, until all members have joined the last generation.
        is_settled = time.monotonic() - self._announced_at > _SETTLED_S
        if lost or asking & present or (asking and is_settled):
            self._announce(present | asking)

    def _with_state(self) -> set[int]:
        return {m for m, said in self._said.items() if m in self._living and said.max_world_size}

    def _announce(self, members: set[int]) -> None:
        ordered = sorted(members)
        machines = [self._machines[member] for member in ordered]
        self._generation = Generation(self._generation.number + 1, ordered, machines)
        self._announced_at = time.monotonic()
        self.store.announce(self._generation)


class NodeAgent(Agent):
    """The agent of an elastic job on a machine other than machine 0; starts what that orders."""

    peers: Link

    _pause = EXCHANGE_S / 2
    _done = 0  # orders obeyed so far
    _cut_off = False

    def _look(self) -> int | None:
        """Obeys machine 0 until it ends the job; returns the exit code."""
        link = self.peers
        self._note_pause()
        self._report()
        if (code := self._server_code()) is not None and not self._received:
            return self._carry_out(server_ended(code))
        now = time.monotonic()
        silence = now - link.heard
        if link.is_closed or now - max(link.heard, self._woke) > link.timeout:
            say("machine 0 no longer answers: all ranks here were stopped")
            return 1
        if silence > LOST_S and not self._cut_off:
            say(f"machine 0 has not answered for {silence:.0f} s: ending the ranks here")
            # Reported no later than their exit codes, which would count as failures otherwise.
            running = [member for member, child in self._children.items() if child.poll() is None]
            link.report["abandoned"] = link.report["abandoned"] + running
            self._signal(signal.SIGKILL)
        self._cut_off = silence > LOST_S
        if self._ended_by:
            return self._carry_out(ended(self._ended_by))
        # Machine 0 forwards the first signal to all ranks.
        if len(self._received) > (0 if self._cut_off else 1):
            return self._carry_out(stopped(self._received[0]))
        if not self._cut_off:
            if link.job["end"] is not None:
                return int(link.job["end"])
            orders = link.job["orders"].get(link.ticket)
            if orders is None:
                say("a newer command replaced this machine's: its ranks were stopped")
                return 1
            self._obey(orders[self._done :])
        self._kill_stopped()
        return None

    def _obey(self, orders: Sequence[Any]) -> None:
        """Starts processes or sends them signals, as machine 0 says."""
        for kind, member, argument in orders:
            self._done += 1
            if kind == "start":
                self._start(member)
            elif self._children[member].poll() is None:
                self._children[member].send_signal(argument)

    def _report(self) -> None:
        codes = {member: child.poll() for member, child in self._children.items()}
        # If the fork server is lost, machine 0 must not hear that its ranks are: it would replace
        # them on this machine. It loses the whole machine instead, as if it were switched off.
        if self._server_code() is None:
            self.peers.report |= {"codes": codes, "signals": list(self._received)}

    def _end_all(self) -> None:
        super()._end_all()
        self._report()
