"""Where other ranks are, for the error of a group that has waited for them in vain.

A group does not know it. What does (`watch/stall.py`) adds itself to `sources`.
"""

import threading
import weakref
from collections.abc import Iterable
from typing import Protocol

# Seconds for which an error waits for this. A call to the store of a rank that is stopped blocks.
_LIMIT_S = 1.0


class Source(Protocol):
    """Knows where ranks of the default group are."""

    def whereabouts(self, rank: int, waited: float) -> str:
        """Returns "is in train.py:87: ..." or the like; "" if nothing is known of the rank.

        What is told must not be older than `waited` seconds.
        """


sources: "weakref.WeakSet[Source]" = weakref.WeakSet()


def whereabouts(ranks: Iterable[int], waited: float) -> str:
    """Returns "; rank 2 is in train.py:87: ..." for each rank of which something is known.

    The caller has waited for these ranks for `waited` seconds.
    """
    told: list[str] = []

    def look() -> None:
        for rank in ranks:
            known = (source.whereabouts(rank, waited) for source in list(sources))
            if text := next(filter(None, known), ""):
                told.append(f"; rank {rank} {text}")

    if sources:
        thread = threading.Thread(target=look, name="ddp whereabouts", daemon=True)
        thread.start()
        thread.join(_LIMIT_S)
    return "".join(told)
