"""Takes from Python what macOS lacks: programs with this folder on PYTHONPATH run as on a Mac.

The kernel, sockets, signals and the compiled parts of Python and torch remain Linux's.
"""

import builtins
import io
import mmap
import os
import sys
from collections.abc import Callable
from typing import Any

CALLS = "eventfd", "memfd_create", "pidfd_open", "sched_getaffinity", "sched_setaffinity", "waitid"
FOLDERS = "/proc", "/sys", "/dev/shm"


def without_folders(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call that finds nothing in these folders."""

    def wrapped(path: Any = ".", *arguments: Any, **options: Any) -> Any:
        if not isinstance(path, int) and os.fsdecode(path).startswith(FOLDERS):
            raise FileNotFoundError(2, "No such file or directory", path)
        return call(path, *arguments, **options)

    return wrapped


class BecomesDarwin:
    """Changes `sys.platform` when the library is imported.

    Before, it imports what chooses its compiled parts by that name, and here has Linux's.
    """

    def find_spec(self, name: str, *_: object) -> None:
        if name == "ddp_from_scratch":
            import asyncio  # noqa: F401
            import multiprocessing
            import subprocess  # noqa: F401
            import urllib.request  # noqa: F401

            import torch  # noqa: F401

            multiprocessing.set_start_method("spawn", force=True)
            sys.platform = "darwin"


for name in CALLS:
    delattr(os, name)
del mmap.MADV_HUGEPAGE
for name in ("listdir", "open", "readlink", "scandir", "stat", "statvfs"):
    setattr(os, name, without_folders(getattr(os, name)))
builtins.open = io.open = without_folders(io.open)
sys.meta_path.insert(0, BecomesDarwin())
