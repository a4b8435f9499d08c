"""Watches the ranks of a job that goes on without those it loses, and starts these again.

Event                                What happens
-----------------------------------  ---------------------------------------------------------------
a rank is killed, or fails           the others go on as a new generation; another process is
                                     started in its place, and joins at the end of a step
a rank is stopped (SIGSTOP)          killed after `STOPPED_S`
a machine does not answer            its ranks are lost (`other_machines.py`), and no others started
a machine comes, or comes again      its ranks are started, and join at the end of a step
a rank ends with code 2              the user's mistake: all ranks end
the same exception at the same step  a bug and no fault: all ranks end
a process ends with code 2, or with  the others go on without it, and no other is started in its
the same code twice, before it       place; before anything was trained all ranks end
has joined
more failures than allowed           the others go on; nothing is started any more
the fork server is lost              the job ends: with it all ranks of this machine, and the
                                     means to start others
no rank is left that has a state     the job ends
"""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from ddp_from_scratch.launch.board import NO_STATE, Board
from ddp_from_scratch.launch.environment import MEMBER
from ddp_from_scratch.launch.other_machines import OtherMachines
from ddp_from_scratch.launch.watch import STOPS, Child, Watch, kill_stopped, say

if TYPE_CHECKING:
    import torch.distributed as dist

_POLL_S = 0.01
_SETTLED_S = 0.25
_USAGE = 2  # the exit code of a UsageError


class GoingOnWatch(Watch):
    """The ranks of a job, of which some may be lost; on the machine that decides.

    Args:
        command, preload: as for `Watch`.
        environment: makes a rank's environment, of its number.
        counts: ranks of each machine at the start.
        max_restarts: processes that are started in the place of others.
        board: this machine's.
        store: of several machines.
        asked: see `start_ranks`.
        timeout: seconds that another machine may take to come.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Callable[[int], dict[str, str]],
        counts: Sequence[int],
        max_restarts: int,
        board: Board,
        preload: Sequence[str],
        store: "dist.Store | None" = None,
        asked: Mapping[str, str] = MappingProxyType({}),
        timeout: float = 600.0,
    ) -> None:
        self._environment, self._board, self._max_restarts = environment, board, max_restarts
        # Of each process.
        self._machines_of = [node for node, count in enumerate(counts) for _ in range(count)]
        nproc = len(self._machines_of)
        super().__init__(command, list(map(environment, range(nproc))), preload)
        self._others: OtherMachines | None = None
        if store is not None:
            called = self._remember, self._let_in
            self._others = OtherMachines(store, counts, asked, board, *called, timeout)
        # Processes by number, as in `self._children`: those that run, and those of the present
        # generation.
        self._living: set[int] = set(range(nproc))
        self._members: set[int] = set()
        self._announced_at = 0.0
        self._ended_well = False
        self._failures = 0
        self._last_failure: tuple[int, str] | None = None
        # When a process was first seen to be stopped.
        self._stopped_at: dict[int, float] = {}

    def run(self) -> int:
        """Starts the ranks, and returns the exit code when all have ended."""
        code = 1
        try:
            code = super().run()
        finally:
            if self._others is not None:
                self._others.end(code)
        return code

    def _start(self, environ: dict[str, str]) -> Child:
        member = int(environ[MEMBER])
        self._board.processes = member + 1
        if self._others is not None and self._machines_of[member]:
            return self._others.start(self._machines_of[member], member)
        return super()._start(environ)

    def _name(self, index: int) -> str:
        return f"process {index}"

    def _wait(self) -> int:
        """Until all that run have ended well, or the job ends; returns the exit code."""
        self._announce(self._living)
        while True:
            self._pass_on()
            if self._others is not None:
                self._others.exchange()
            if self._ended_by:
                return self._ended()
            for member in sorted(self._living):
                code = self._children[member].poll()
                if code is None:
                    continue
                self._living.discard(member)
                self._ended_well |= code == 0 and self._board.has_state(member)
                ends = self._lose(member, code) if code else None
                if ends is not None:
                    return ends
            if not self._living or (self._ended_well and not self._carriers()):
                # One that was still to join has nothing to go on with.
                return self._stopped() if self._received else 0
            kill_stopped(self._children, self._stopped_at)
            # Once it stops nobody is let in.
            if not self._received:
                self._regroup()
                if self._others is not None:
                    self._others.admit(has_begun=bool(self._carriers()))
            time.sleep(_POLL_S)

    def _lose(self, member: int, code: int) -> int | None:
        """Replaces a process that has failed; returns the exit code where the job ends with it."""
        # A process that got a signal by itself has agreed with the others to stop: they end, too.
        if code - 128 in STOPS and not self._received:
            self._received.append(code - 128)
        if self._received:
            # Asked to stop, ranks end one after another with the signal's code. But where one has
            # died of it, the others wait for that one in vain.
            died = code < 0 and member in self._members
            return self._stopped() if died or not self._living else None
        if self._server_is_gone():
            return self._failed(member, code)
        failure = self._board.failure(member)
        never_joined = code > 0 and not self._board.has_arrived(member, 1)
        if never_joined:
            failure = NO_STATE, f"exit code {code}"
        again = failure is not None and failure == self._last_failure
        if never_joined and (again or code == _USAGE) and self._carriers():
            say(
                f"process {member} ended with exit code {code} before it had joined; no other is "
                f"started in its place"
            )
            return None
        if again and failure is not None:
            step, text = failure
            where = "the start" if step == NO_STATE else f"step {step + 1}"
            say(f"{where} failed again with {text}; all other ranks were stopped")
            return code
        machine = self._machines_of[member]
        is_lost = self._others is not None and machine in self._others.lost
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        if is_lost:
            how = f"was on machine {machine}"
        if code != _USAGE and self._board.has_state(member) and not self._carriers():
            say(f"process {member} {how}: no rank is left that has trained; the run ends")
            return 128 - code if code < 0 else code
        if code == _USAGE or not self._living:
            return self._failed(member, code)
        # Its machine, should it come again, gets ranks then.
        then = ""
        if not is_lost:
            self._last_failure = failure
            self._failures += 1
            then = f"; no replacement is left of {self._max_restarts}"
            if self._failures <= self._max_restarts:
                then = f"; starting another (failure {self._failures} of {self._max_restarts})"
                self._start_one_more(machine)
        left = len(self._members & self._living)
        say(f"process {member} {how}: continuing with {_ranks(left)}{then}")
        return None

    def _start_one_more(self, machine: int) -> None:
        self._machines_of.append(machine)
        self._environments.append(self._environment(len(self._children)))
        self._living.add(len(self._children))
        self._children.append(self._start(os.environ | self._environments[-1]))

    def _let_in(self, machine: int, count: int) -> str | None:
        """Starts the ranks of a machine that has come, or come again; returns why not, if not."""
        most = min((self._board.most_ranks(member) for member in self._carriers()), default=0)
        if len(self._living) + count > most:
            return f"the job can use {most} ranks, and has {len(self._living)}"
        for _ in range(count):
            self._start_one_more(machine)
        return None

    def _regroup(self) -> None:
        """Announces the next generation where one is needed."""
        generation = self._board.generation
        asking = {member for member in self._living if self._board.asks(member)}
        # A process that has ended well is missed only where others wait for it to arrive.
        lost = {
            member
            for member in self._members - self._living
            if self._children[member].poll() or not self._board.has_arrived(member, generation)
        }
        # Who joins waits for a moment: some may still be on their way into the last generation, and
        # the others would wait there for them.
        is_settled = time.monotonic() - self._announced_at > _SETTLED_S
        if lost or asking & self._members or (asking and is_settled):
            self._announce((self._members & self._living) | asking)

    def _carriers(self) -> set[int]:
        """The processes that others can go on with."""
        return {member for member in self._living if self._board.has_state(member)}

    def _announce(self, members: set[int]) -> None:
        self._members, self._announced_at = set(members), time.monotonic()
        ordered = sorted(members)
        self._board.announce(ordered, [self._machines_of[member] for member in ordered])


def _ranks(number: int) -> str:
    return f"{number} {'rank' if number == 1 else 'ranks'}"
