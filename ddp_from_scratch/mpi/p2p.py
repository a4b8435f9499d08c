"""Messages between two ranks: the handles of those under way, and seeing to it that they go on.

MPI moves a large message only while both ranks are inside MPI. A rank that has sent one and then
sleeps, in a meeting or in a handle's `wait`, wakes up once in a while for as long as there are any.
"""

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from ddp_from_scratch.errors import CommunicationError
from ddp_from_scratch.mpi.runtime import MPI

# Seconds between two looks at the messages under way.
PAUSE = 1e-3


def _nothing(status: MPI.Status) -> None:
    pass


class PendingMessage(dist._Work):
    """The handle of a send or receive that MPI itself has under way.

    It keeps the tensor alive until MPI has done with it, and runs `finish` once on arrival; also
    where the caller has dropped it.

    Args:
        name: what was asked for and by whom, for error messages.
        timeout: how long a `wait()` lasts at most.
        request: MPI's.
        tensor: what is sent, or where what is received goes.
        finish: what to do on arrival; may raise a CommunicationError.
    """

    def __init__(
        self,
        name: str,
        timeout: timedelta,
        request: MPI.Request,
        tensor: torch.Tensor,
        finish: Callable[[MPI.Status], None] = _nothing,
    ) -> None:
        super().__init__()
        self._name, self._timeout = name, timeout
        self._request = request
        self._tensor = tensor
        self._finish = finish
        self._status = MPI.Status()
        self._error: CommunicationError | None = None
        self._done = False
        self._look = threading.Lock()  # any thread may see to it that messages go on
        _under_way.add(self)

    def is_completed(self) -> bool:
        # Not waiting for whoever looks: it may be this very thread, in a signal's handler.
        if self._look.acquire(blocking=False):
            try:
                if not self._done:
                    self._test()
            finally:
                self._look.release()
        return self._done

    def _test(self) -> None:
        try:
            if not self._request.Test(self._status):
                return
            with torch.no_grad():
                self._finish(self._status)
        except (MPI.Exception, CommunicationError) as error:
            self._error = CommunicationError(f"{self._name} failed: {error}")
        self._done = True
        # The tensor belongs to the caller again, however long the handle is kept.
        self._finish = _nothing
        del self._tensor
        _under_way.discard(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns when the message has arrived, or its tensor can be used again.

        At first it looks without pause, then once in a while.

        Args:
            timeout: how long to wait; None or zero means the group's own.

        Raises:
            CommunicationError: it failed, or did not end in time. The text names it.
        """
        limit = timeout if timeout and timeout > timedelta(0) else self._timeout
        began = time.monotonic()
        while not self.is_completed():
            waited = time.monotonic() - began
            if waited > limit.total_seconds():
                raise CommunicationError(
                    f"{self._name} did not end within {limit.total_seconds():g} s: "
                    f"the other rank has not called its part, or has stopped"
                )
            if waited > PAUSE:
                progress()
                time.sleep(1e-4)
        if self._error is not None:
            raise self._error
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def _source_rank(self) -> int:
        return self._status.Get_source()

    source_rank = _source_rank


_under_way: set[PendingMessage] = set()


def under_way() -> bool:
    """Whether this rank has messages that have not arrived."""
    return bool(_under_way)


def progress() -> None:
    """Lets the messages under way go on, and ends those that have arrived."""
    for message in list(_under_way):
        message.is_completed()
