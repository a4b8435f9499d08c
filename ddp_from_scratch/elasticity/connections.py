"""The connections of a gloo group, which are cut when a rank leaves it. Linux only.

Closing a group waits for what is under way in it, and that may wait for a rank which waits for this
one. gloo cannot break an operation off (its `abort` leaves them waiting), but it gives all of them
up when their connections end.
"""

import os
import socket
import stat
from contextlib import suppress


def open_sockets() -> dict[int, int]:
    """This process's sockets: the inode of each descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile, as the folder's own
            status = os.stat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


def cut(sockets: dict[int, int]) -> None:
    """Ends these connections, on both sides; their owner still closes them."""
    for descriptor, inode in sockets.items():
        with suppress(OSError):
            # Not one that has been closed, and its number given to another.
            if os.fstat(descriptor).st_ino == inode:
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    # Raises for the one that gloo listens on, whose end would abort the process.
                    connection.getpeername()
                    connection.shutdown(socket.SHUT_RDWR)
