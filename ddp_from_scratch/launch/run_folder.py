"""A private folder for the files of a run. The next run removes it where this one was killed."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "ddp-run-"
_NEW_S = 60.0  # a folder that is not older may not have been locked yet


@contextmanager
def run_folder() -> Iterator[Path]:
    """Makes a folder that is removed at the end, and removes those of runs that were killed."""
    _remove_left_behind()
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name:  # mode 0700
        lock = os.open(name, os.O_RDONLY)
        try:
            # The system drops it with this process, however that ends.
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield Path(name)
        finally:
            os.close(lock)


def _remove_left_behind() -> None:
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's, or one that is in use
            lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found = os.fstat(lock)
                if found.st_uid == os.getuid() and time.time() - found.st_mtime > _NEW_S:
                    shutil.rmtree(left)
            finally:
                os.close(lock)
