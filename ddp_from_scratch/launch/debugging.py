"""One rank has the terminal, for `breakpoint()`; the others wait for it without a timeout."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

DEBUG_RANK = "DDP_DEBUG_RANK"  # the rank that is debugged


def variables(rank: int, debugged: int) -> dict[str, str]:
    """Returns the variables of a rank in a job in which the rank `debugged` is debugged.

    The others have no terminal, so `breakpoint()` does nothing in them.
    """
    own = {} if rank == debugged else {"PYTHONBREAKPOINT": "0"}
    return {DEBUG_RANK: str(debugged), **own}


def is_on(environ: Mapping[str, str] = os.environ) -> bool:
    """True in the ranks of a job in which one is debugged."""
    return bool(environ.get(DEBUG_RANK))


def has_stdin(environ: Mapping[str, str]) -> bool:
    """True for the rank that reads the standard input of its launcher."""
    return is_on(environ) and environ[DEBUG_RANK] == environ.get("RANK")


@contextmanager
def same_terminal_afterwards() -> Iterator[None]:
    """Restores the terminal, which a debugger that was killed may have left without echo."""
    try:
        import termios

        before = termios.tcgetattr(0)
    except (ImportError, OSError, termios.error):
        yield
        return
    try:
        yield
    finally:
        sys.stdout.flush()
        termios.tcsetattr(0, termios.TCSADRAIN, before)
