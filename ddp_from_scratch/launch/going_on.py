"""Watches the ranks of a job that goes on without those it loses, and starts these again.

Event                                What happens
-----------------------------------  ---------------------------------------------------------------
a rank is killed, or fails           the others go on as a new generation; another process is
                                     started in its place, and joins at the end of a step
a rank is stopped (SIGSTOP)          killed after `STOPPED_S`
a rank ends with code 2              the user's mistake: all ranks end
the same exception at the same step  a bug and no fault: all ranks end; so does an exit code that
                                     comes twice before a process has joined
more failures than allowed           the others go on; nothing is started any more
no rank is left that has a state     the job ends
"""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from ddp_from_scratch.launch.board import NO_STATE, Board
from ddp_from_scratch.launch.environment import (
    BOARD,
    MEMBER,
    RENDEZVOUS_FILE,
    rank_environments,
)
from ddp_from_scratch.launch.watch import Child, Watch, say

STOPPED_S = 5.0
_POLL_S = 0.01
_USAGE = 2  # the exit code of a UsageError


class GoingOnWatch(Watch):
    """The ranks of one machine, of which some may be lost.

    Args:
        command, preload: as for `Watch`.
        common: variables of all ranks.
        nproc: ranks at the start.
        max_failures: processes that are started in the place of others.
        folder: this job's own, for the board.
    """

    def __init__(
        self,
        command: Sequence[str],
        common: dict[str, str],
        nproc: int,
        max_failures: int,
        folder: Path,
        preload: Sequence[str],
    ) -> None:
        # Each process is alone in its world until its first generation.
        (alone,) = rank_environments([1], 0)
        self._common = common | alone | {BOARD: str(folder)}
        self._board = Board(folder, capacity=nproc + max_failures)
        self._nproc, self._max_failures = nproc, max_failures
        super().__init__(command, [self._environment(m) for m in range(nproc)], preload)
        # Processes by number, as in `self._children`: those that run, and those of the present
        # generation.
        self._living: set[int] = set(range(nproc))
        self._members: set[int] = set()
        self._ended_well = False
        self._failures = 0
        self._last_failure: tuple[int, str] | None = None
        # When a process was first seen to be stopped.
        self._stopped_at: dict[int, float] = {}

    def _environment(self, member: int) -> dict[str, str]:
        alone = str(self._board.folder / f"alone-{member}")
        return self._common | {MEMBER: str(member), RENDEZVOUS_FILE: alone}

    def _name(self, index: int) -> str:
        return f"process {index}"

    def _wait(self) -> int:
        """Until all that run have ended well, or the job ends; returns the exit code."""
        self._announce(self._living)
        while True:
            self._pass_on()
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
            self._kill_stopped()
            if not self._received:
                self._regroup()
            time.sleep(_POLL_S)

    def _lose(self, member: int, code: int) -> int | None:
        """Replaces a process that has failed; returns the exit code where the job ends with it."""
        if self._received:
            # Asked to stop, ranks end one after another with the signal's code. But where one has
            # died of it, the others wait for that one in vain.
            died = code < 0 and member in self._members
            return self._stopped() if died or not self._living else None
        failure = self._board.failure(member)
        if code > 0 and not self._board.has_arrived(member, 1):
            failure = NO_STATE, f"exit code {code}"
        if failure is not None and failure == self._last_failure:
            step, text = failure
            where = "the start" if step == NO_STATE else f"step {step + 1}"
            say(f"{where} failed again with {text}; all other ranks were stopped")
            return code
        was_last = self._board.has_state(member) and not self._carriers()
        if code == _USAGE or was_last or not self._living:
            return self._failed(member, code)
        self._last_failure = failure
        self._failures += 1
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        then = f"no replacement is left of {self._max_failures}"
        if self._failures <= self._max_failures:
            then = f"starting another (failure {self._failures} of {self._max_failures})"
            self._environments.append(self._environment(len(self._children)))
            self._living.add(len(self._children))
            self._children.append(self._start(os.environ | self._environments[-1]))
        left = len(self._members & self._living)
        say(f"process {member} {how}: going on with {_ranks(left)}; {then}")
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
        if lost or asking:
            self._announce((self._members & self._living) | asking)

    def _carriers(self) -> set[int]:
        """The processes that others can go on with."""
        return {member for member in self._living if self._board.has_state(member)}

    def _announce(self, members: set[int]) -> None:
        self._members = set(members)
        self._board.announce(sorted(members))

    def _kill_stopped(self) -> None:
        """Kills processes that are stopped for longer than `STOPPED_S`."""
        for member in self._living:
            if not _is_stopped(self._children[member]):
                self._stopped_at.pop(member, None)
                continue
            since = self._stopped_at.setdefault(member, time.monotonic())
            if time.monotonic() - since > STOPPED_S:
                self._children[member].send_signal(signal.SIGKILL)


def _is_stopped(child: Child) -> bool:
    try:
        # The state is the first field behind the name, which is in parentheses.
        text = Path(f"/proc/{child.pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] == "T"


def _ranks(number: int) -> str:
    return f"{number} {'rank' if number == 1 else 'ranks'}"
