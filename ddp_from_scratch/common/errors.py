"""Exceptions for a mistake by the user, a mistake on another rank, and failed communication."""

from collections.abc import Sequence
from typing import Any

# What to do about a Reducer that no longer fits its module.
AGAIN = "call remove() on the Reducer and make a new one, on every rank"


class UsageError(ValueError):
    """A wrong value from the user, or a request that the machine cannot fulfil.

    The message is one line that names the value, the expectation and the remedy. `run.py` prints
    only that line, without a traceback, and exits with code 2.
    """


class PeerError(UsageError):
    """A mistake on another rank, which reports it; this rank exits without a message."""


class CommunicationError(RuntimeError):
    """An operation that failed or timed out, usually because another rank is gone."""


class WrongResultError(RuntimeError):
    """Ranks computed different bits for one virtual rank, so one of them computes wrongly.

    Attributes:
        rank: the rank that computed wrongly; None if there are only two ranks, or if all three
            results differ.
        step, virtual_rank: the step and the virtual rank that were computed.
    """

    def __init__(self, text: str, rank: int | None, step: int, virtual_rank: int) -> None:
        super().__init__(text)
        self.rank: int | None = rank
        self.step: int = step
        self.virtual_rank: int = virtual_rank

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.rank, self.step, self.virtual_rank)


class PeerWrongResultError(WrongResultError, CommunicationError):
    """That error on the other ranks, which in an elastic run continue without the wrong one."""


class NoSharedMemory(CommunicationError):
    """There is no room for shared memory between the ranks of a machine."""


def one_line(error: BaseException) -> str:
    """Returns the error's text on one line, without errno and file name."""
    text = error.strerror if isinstance(error, OSError) else None
    return " ".join((text or str(error)).split()) or type(error).__name__


def shortened(names: Sequence[str], most: int = 10) -> str:
    """Joins at most `most` names, and says how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
