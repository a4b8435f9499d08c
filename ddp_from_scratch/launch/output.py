"""Standard output and error, which may be full, or a pipe that nobody reads any more.

What a run prints is not worth its end: it goes on, and says once that it cannot be heard.
"""

import os
import sys
from typing import TextIO


def replace_closed() -> None:
    """Opens /dev/null for each standard stream that is closed (`>&-`).

    Else the next socket or file would get its number, and with it what is printed.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            stream = open(os.devnull, "r+")  # noqa: SIM115  # has the lowest number that is free
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def write(text: str, stream: TextIO) -> None:
    """Prints a line at once, or nothing where that fails."""
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        give_up(stream, error)


def flush(stream: TextIO) -> None:
    """Writes out what is buffered, or drops it where that fails."""
    try:
        stream.flush()
    except OSError as error:
        give_up(stream, error)


def give_up(stream: TextIO, error: OSError) -> None:
    """Sends what is still buffered, and all that follows, to /dev/null."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
    if stream is sys.stdout:
        text = f"warning: standard output cannot be written to ({error.strerror}): going on without"
        write(text, sys.stderr)
