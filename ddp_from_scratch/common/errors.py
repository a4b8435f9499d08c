"""Exceptions for a mistake by the user, a mistake on another rank, and failed communication."""

from collections.abc import Sequence

# What to do about a Reducer that no longer fits its module.
AGAIN = "call remove() on the Reducer and make a new one, on every rank"


class UsageError(ValueError):
    """A wrong value from the user, or a machine that cannot do what was asked.

    The message is one line that names the value, the expectation and the remedy. The command line
    prints only that line, without a traceback, and exits with code 2.
    """


class PeerError(UsageError):
    """A mistake on another rank, which reports it; this rank exits without a message."""


class CommunicationError(RuntimeError):
    """An operation that failed or timed out, usually because another rank is gone."""


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
