"""Where a thread is: the line of the program that runs, and the function that it has called."""

import linecache
import os
import sysconfig
from contextlib import suppress
from pathlib import Path
from types import FrameType

from ddp_from_scratch.common.frames import stack_of

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


def place_of(thread: int) -> str:
    """Describes where the thread with this identifier is; empty if it has ended.

    That is its innermost line outside of libraries, with the source, and what this line has called:
    the package's innermost function, or else the innermost of all.

        train.py:87: batch = next(batches), in selectors.py:415 (select)

    Any thread may call it, while the other runs.
    """
    frames = stack_of(thread)
    if not frames:
        return ""
    at = next((index for index, frame in enumerate(frames) if not _is_library(frame)), None)
    called_by_it = frames if at is None else frames[: at + 1]
    ours = [f for f in called_by_it if f.f_code.co_filename.startswith(_PACKAGE)]
    inside = [*ours, frames[0]][0]
    called = f"{_file(inside)}:{inside.f_lineno} ({inside.f_code.co_name})"
    if at is None:
        return called
    program = frames[at]
    # Python has no line for some instructions.
    source = linecache.getline(program.f_code.co_filename, program.f_lineno or 0).strip()
    line = f"{_file(program)}:{program.f_lineno}{': ' if source else ''}{source}"
    return line if program is inside else f"{line}, in {called}"


def _is_library(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    frozen = file.startswith("<frozen")
    return frozen or file.startswith((_PACKAGE, _STANDARD)) or any(i in file for i in _INSTALLED)


def _file(frame: FrameType) -> str:
    """Returns a short name of a frame's file: below the current folder, or below site-packages."""
    file = frame.f_code.co_filename
    if file.startswith(_PACKAGE):
        return os.path.relpath(file, Path(_PACKAGE).parent)
    for folder in _INSTALLED:
        if folder in file:
            return file.rpartition(folder)[2]
    if file.startswith(_STANDARD):
        return file.removeprefix(_STANDARD)
    with suppress(OSError):  # the folder is gone
        file = file.removeprefix(os.getcwd() + os.sep)
    return file
