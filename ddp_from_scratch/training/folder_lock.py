"""A folder for one run at a time: a second one would remove the first one's checkpoints."""

import errno
import fcntl
import os
import socket
from pathlib import Path

from ddp_from_scratch.errors import UsageError

LOCK_FILE = ".lock"


class FolderLock:
    """Holds a folder until `close`, or until this process ends, however it does.

    Attributes:
        holds: False where the file system has no locks: a second run is not noticed there.

    Raises:
        UsageError: another process holds the folder, or the file is a symbolic link.
        OSError: the file cannot be opened or written.
    """

    def __init__(self, folder: Path) -> None:
        # The lock is the system's (`flock`), not the file, which stays. Opened for appending, so
        # that a loser does not empty the holder's text.
        path, flags = folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_APPEND
        try:
            # A link could lead to any file of the user's, which would be emptied.
            self._file = os.fdopen(os.open(path, flags | os.O_NOFOLLOW, 0o666), "a+")
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise UsageError(
                f"--checkpoint-dir {folder}: {path} is a symbolic link: remove it"
            ) from error
        try:
            # On NFS Linux makes it a lock of the server, so that it holds between machines, unless
            # the mount says `nolock` or `local_lock=flock`.
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.holds = True
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                self._file.seek(0)
                holder = " ".join(self._file.read(200).split()) or "another process"
                self._file.close()
                raise UsageError(
                    f"--checkpoint-dir {folder} is in use by another run ({holder}): give this one "
                    f"another folder, or wait until that one has ended"
                ) from error
            self.holds = False
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    def close(self) -> None:
        """Lets go of the folder. Idempotent."""
        self._file.close()
