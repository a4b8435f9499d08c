"""The thread that runs a group's collectives one after another, and the handles it completes."""

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue

import torch
import torch.distributed as dist

from ddp_from_scratch.errors import CommunicationError
from ddp_from_scratch.mpi import p2p
from ddp_from_scratch.node.barrier import Meeting

Result = list[torch.Tensor]


class Pending(dist._Work):
    """The handle of one operation; `torch.distributed`'s Work.

    Args:
        name: what was asked for and by whom, for error messages; called where there is one.
        timeout: the group's, in which the operation itself fails when a rank does not come.
        meeting: knows who that is.
    """

    def __init__(self, name: Callable[[], str], timeout: timedelta, meeting: Meeting) -> None:
        super().__init__()
        self._name, self._timeout, self._meeting = name, timeout, meeting
        # No lock guards these: a signal's handler may ask for them in the middle of anything. The
        # flags change once.
        self._known = False  # what became of it
        self._ended = False  # and its futures are done
        self._under_way = threading.Lock()  # held until then: who waits sleeps on it
        self._under_way.acquire()
        self._error: Exception | None = None
        self._result: Result = []
        self._futures: list[torch.futures.Future[Result]] = []  # one for each time it was asked for

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns when the operation has ended.

        Args:
            timeout: how long to wait; None or zero means the group's own.

        Raises:
            CommunicationError: the operation failed, or did not end in time. The text names it.
        """
        if not self._ended:
            self._wait_until_ended(timeout)
        if self._error is not None:
            raise self._error
        return True

    def _wait_until_ended(self, timeout: timedelta | None) -> None:
        # The operation ends by itself in the group's time, and then knows best what was missing.
        limit = self._timeout.total_seconds() + 2.0
        if timeout is not None and timeout > timedelta(0):
            limit = timeout.total_seconds()
        began = time.monotonic()
        nap = p2p.PAUSE if p2p.under_way() else limit
        while not self._ended:
            if self._under_way.acquire(timeout=min(nap, limit)):
                self._under_way.release()  # others may wait, too
            elif time.monotonic() - began >= limit:
                raise CommunicationError(
                    f"{self._name()} did not end within {limit:g} s: "
                    f"{self._meeting.whom} did not come"
                )
            else:
                p2p.progress()

    def is_completed(self) -> bool:
        return self._ended

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> Result:
        return self._result

    def get_future(self) -> "torch.futures.Future[Result]":
        future: torch.futures.Future[Result] = torch.futures.Future()
        self._futures.append(future)
        if self._known:  # `_end` may have looked before it was there
            self._settle(future)
        return future

    def complete(self, result: Result) -> None:
        self._result = result
        self._end()

    def fail(self, error: Exception) -> None:
        self._error = CommunicationError(f"{self._name()} failed: {error}")
        self._error.__cause__ = error
        self._end()

    def _end(self) -> None:
        self._known = True
        for future in self._futures:
            self._settle(future)  # first, as they are done when wait() returns
        self._ended = True
        self._under_way.release()

    def _settle(self, future: "torch.futures.Future[Result]") -> None:
        with suppress(RuntimeError):  # both who asks and who ends it may come here
            if self._error is None:
                future.set_result(self._result)
            else:
                future.set_exception(self._error)  # type: ignore[arg-type]  # a wrong annotation


class Worker:
    """Runs operations in the order in which they were submitted, each to its end.

    One thread for one group: all ranks must come to its operations in the same order, and the
    order of submission is that order. Where nothing waits, the thread that submits can run an
    operation itself.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[tuple[Pending, Callable[[], Result]] | None] = SimpleQueue()
        # And not ended. What a thread has submitted is in it before that can begin, and stays until
        # it has ended: so a thread finds it empty only where nothing of its own is before it.
        self._queued: set[Pending] = set()
        self._turn = threading.Lock()  # held while an operation runs
        # A daemon: blocked in MPI on a peer that died, it must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        _running.add(self)

    def submit(self, pending: Pending, operation: Callable[[], Result], at_once: bool) -> Pending:
        """Sees to it that the operation runs, after those submitted before.

        Args:
            pending: its handle.
            operation: to be run once.
            at_once: the caller is going to wait for it and may as well run it.
        """
        if at_once and not self._queued and self._turn.acquire(blocking=False):
            self._execute(pending, operation)
        elif threading.get_ident() == self._thread.ident:
            # A future's callback runs on this thread, and nobody else would run what it submits
            # and may wait for: first what was submitted before, then that.
            while self._queued and (item := self._queue.get()) is not None:
                self._take(*item)
            self._turn.acquire()
            self._execute(pending, operation)
        else:
            self._queued.add(pending)
            self._queue.put((pending, operation))
        return pending

    def close(self, timeout: float) -> bool:
        """Ends the thread after what was submitted; True when it did. Idempotent."""
        self._queue.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            self._take(*item)
            # Not kept until the next operation: the tensors belong to the caller again.
            del item

    def _take(self, pending: Pending, operation: Callable[[], Result]) -> None:
        self._turn.acquire()
        self._execute(pending, operation)

    def _execute(self, pending: Pending, operation: Callable[[], Result]) -> None:
        """Runs it; who calls this has the turn, and it is given back."""
        try:
            try:
                result = _without_gradients(operation)
            finally:
                self._turn.release()
                # Before the handle completes: its callbacks may submit, and find nothing before
                # them.
                self._queued.discard(pending)
        except Exception as error:  # noqa: BLE001  # it belongs to the caller of wait()
            pending.fail(error)
        else:
            pending.complete(result)


def _without_gradients(operation: Callable[[], Result]) -> Result:
    """Parameters are sent, too. As `torch.no_grad()`, which takes as long as a small operation."""
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        return operation()
    finally:
        torch._C._set_grad_enabled(before)


_running: "weakref.WeakSet[Worker]" = weakref.WeakSet()


@atexit.register
def _close_workers() -> None:
    """A thread that is inside torch when the interpreter ends would abort the process."""
    for worker in list(_running):
        worker.close(timeout=1.0)
