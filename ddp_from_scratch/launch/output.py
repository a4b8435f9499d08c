"""Standard output and error, which may be full, or a pipe that nobody reads any more.

A run goes on without its output, and says so once.
"""

import os
import sys
from typing import TextIO


def replace_closed() -> None:
    """Opens /dev/null for each standard stream that is closed (`>&-`)."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            # It gets the lowest free number, so the stream's own. Else the next socket or file
            # would, and with it all that is printed.
            stream = open(os.devnull, "r+")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def write(text: str, stream: TextIO) -> None:
    """Prints a line at once, or nothing where that fails."""
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        give_up(stream, error)


def flush(stream: TextIO) -> None:
    """Writes out the buffer, or drops it where that fails."""
    try:
        stream.flush()
    except OSError as error:
        give_up(stream, error)


def give_up(stream: TextIO, error: OSError) -> None:
    """Sends the buffer, and all that follows, to /dev/null."""
    # Under the stream's number: Python's buffer goes there at the next flush, and fails no more.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
    if stream is sys.stdout:
        text = (
            f"warning: standard output cannot be written to ({error.strerror}): continuing without"
        )
        write(text, sys.stderr)
