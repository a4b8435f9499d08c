"""Waits for collectives in jobs that continue without a lost rank.

gloo fails what is under way when a connection ends, but for a message that was partly written by
then, or is written just then: `Pair::signalException` of its TCP transport passes over those, and
their collective ends with the group's timeout. So where ranks may be lost, waits look for it.
"""

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from ddp_from_scratch.errors import CommunicationError

_LOOK_EVERY = timedelta(seconds=0.5)

# True once a rank of the default group has left it; None in a job that ends with a lost rank.
_is_broken: Callable[[], bool] | None = None


def look_for_lost_ranks(is_broken: Callable[[], bool]) -> None:
    """From now on `wait` asks `is_broken` whether a rank of the default group has left it."""
    global _is_broken
    _is_broken = is_broken


def may_be_left_behind() -> bool:
    """True if collectives may be left under way: they may still write to their tensors."""
    return _is_broken is not None


def lost_rank_check() -> Callable[[], bool]:
    """Returns the present `is_broken`, for waits of a group that is opened now."""
    return _is_broken or (lambda: False)


def wait(work: dist.Work) -> None:
    """Waits for a collective of the default group.

    Raises:
        CommunicationError: a rank has left the group, and the collective does not end.
    """
    if _is_broken is None:
        work.wait()
        return
    while True:
        try:
            work.wait(_LOOK_EVERY)
            return
        except RuntimeError:
            if work.is_completed():
                raise
        if _is_broken():
            raise CommunicationError("a rank of the group was lost")
