"""Waits for collectives in jobs that continue without a lost rank.

When a connection ends, gloo fails its operations, except for a message that is partly written or
is being written: `Pair::signalException` of the TCP transport skips those, and their collective
ends only with the group's timeout. So where ranks may be lost, each wait looks for a lost rank.
"""

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from ddp_from_scratch.errors import CommunicationError

_LOOK_EVERY = timedelta(seconds=0.5)

# Tells whether a rank has left the default group; None in a job that ends with a lost rank.
_is_broken: Callable[[], bool] | None = None


def look_for_lost_ranks(is_broken: Callable[[], bool]) -> None:
    """Sets the check that `wait` uses: it tells whether a rank has left the default group."""
    global _is_broken
    _is_broken = is_broken


def may_be_left_behind() -> bool:
    """True if unfinished collectives may be left behind, which may still write to their tensors."""
    return _is_broken is not None


def lost_rank_check() -> Callable[[], bool]:
    """Returns the current check, for waits in a group that opens now."""
    return _is_broken or (lambda: False)


def wait(work: dist.Work) -> None:
    """Waits for a collective of the default group; raises if a rank has left the group."""
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
