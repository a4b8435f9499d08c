"""Watches the processes of other ranks on this machine: a killed one will not come."""

import os
import select
from collections.abc import Sequence
from contextlib import suppress


class ProcessWatch:
    """Processes by index, each followed by a descriptor that no later process can take over.

    Args:
        pids: of processes that run now. One that cannot be followed (an old kernel) never counts as
            ended: its rank is then missed at the timeout. 0 stands for none.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._index_of: dict[int, int] = {}
        for index, pid in enumerate(pids):
            if pid not in (0, os.getpid()) and hasattr(os, "pidfd_open"):
                with suppress(OSError):
                    self._index_of[os.pidfd_open(pid)] = index

    def ended(self) -> list[int]:
        """Returns the indices of the processes that have ended, also by a signal."""
        poll = select.poll()
        for descriptor in self._index_of:
            poll.register(descriptor, select.POLLIN)
        return [self._index_of[descriptor] for descriptor, _ in poll.poll(0)]

    def close(self) -> None:
        """Stops watching. Idempotent."""
        while self._index_of:
            os.close(self._index_of.popitem()[0])

    __del__ = close
