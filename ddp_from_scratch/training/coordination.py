"""Ranks that end together: one rank's mistake or signal is known to all at the same step."""

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist

from ddp_from_scratch.errors import PeerError, UsageError
from ddp_from_scratch.group import of_member
from ddp_from_scratch.launch.rank_process import is_communication_error
from ddp_from_scratch.waiting import wait


@contextmanager
def together(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Makes every rank leave this block in the same way. Collective.

    Where any rank raised a UsageError inside, the lowest such rank raises its own and every other
    one a PeerError.
    """
    mine: UsageError | None = None
    try:
        yield
    except UsageError as error:
        mine = error
    # Else the others would go on to wait for a rank that has gone.
    failed = torch.tensor([int(mine is not None)])
    wait(of_member(dist.all_reduce(failed, dist.ReduceOp.MAX, group=group, async_op=True)))
    if not failed.item():
        return
    texts: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(texts, str(mine) if mine else None, group=group)
    rank = next(r for r, text in enumerate(texts) if text is not None)
    if rank == dist.get_rank(group) and mine is not None:
        raise mine
    raise PeerError(f"rank {rank}: {texts[rank]}")


def require_same(asked: Mapping[str, str], group: dist.ProcessGroup | None) -> None:
    """Ends all ranks unless each was asked for the same. Collective.

    Raises:
        UsageError: on rank 0, a PeerError on the others; it names what differs, and where.
    """
    everyone: list[Mapping[str, str]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(everyone, dict(asked), group=group)
    text = differences(everyone)
    if text is not None:
        raise UsageError(text) if dist.get_rank(group) == 0 else PeerError(text)


def differences(asked: Sequence[Mapping[str, str]]) -> str | None:
    """Each value that some rank does not share with rank 0, as a line; None where there is none."""
    found = []
    for name, value in asked[0].items():
        rank = next((r for r, theirs in enumerate(asked) if theirs.get(name) != value), None)
        if rank is not None:
            found.append(f"{name} is {value} on rank 0 and {asked[rank].get(name)} on rank {rank}")
    if not found:
        return None
    they = "they" if len(found) > 1 else "it"
    return f"{'; '.join(found)}: {they} must be the same on all ranks"


class StopSignal:
    """SIGINT, SIGTERM, SIGUSR1 and SIGHUP, acted on by all ranks after the same step.

    A launcher's signal reaches ranks at different steps. So ranks exchange in each step whether one
    has come, over a group for CPU tensors (None: the default group): `ask` begins it before the
    step, `answer` ends it after. Two other numbers travel along. Inside the `with` block a second
    signal ends the process at once.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._received = 0
        # The signal's number and `also`: one all-reduce for all, whose MAX leaves the highest.
        self._flags = torch.zeros(3, dtype=torch.int64)
        self._handle: dist.Work | None = None

    def __enter__(self) -> "StopSignal":
        # SIGUSR1 is the one that mpirun hands on without killing the ranks soon after, and that
        # Slurm is commonly set to send before a job's time is up.
        self._previous = {
            number: signal.signal(number, self._remember)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN  # nohup
        }
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._received and isinstance(error, Exception) and is_communication_error(error):
            # Some rank ended before it could agree on a step with us: we end as asked, too.
            signal.signal(self._received, signal.SIG_DFL)
            os.kill(os.getpid(), self._received)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        signal.signal(number, signal.SIG_DFL)

    def drop(self) -> None:
        """Drops an exchange that a lost rank broke off."""
        # New: the broken one may still write to the old ones.
        self._flags, self._handle = torch.zeros_like(self._flags), None

    def ask(self, *also: int) -> None:
        """Starts the exchange of this step; `also` has at most two numbers."""
        self._flags.zero_()
        self._flags[: 1 + len(also)] = torch.tensor([self._received, *also])
        # Asynchronous: the step hides it.
        self._handle = dist.all_reduce(
            self._flags, dist.ReduceOp.MAX, group=self._group, async_op=True
        )

    def answer(self) -> tuple[int, int, int]:
        """The highest signal number at any rank that asked (0: none), and the highest of `also`."""
        assert self._handle is not None, "answer() without ask()"
        wait(self._handle)
        number, first, second = self._flags.tolist()
        return number, first, second
