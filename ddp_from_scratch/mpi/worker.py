"""The thread that runs a group's collectives one after another, and the handles it completes."""

import atexit
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from ..errors import CommunicationError

Result = list[torch.Tensor]


class Pending(dist._Work):
    """The handle of one operation; `torch.distributed`'s Work.

    Attributes:
        name: what was asked for and by whom, for error messages.
    """

    def __init__(self, name: str, timeout: timedelta) -> None:
        super().__init__()
        self.name = name
        self._timeout = timeout
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._result: Result = []
        self._future: torch.futures.Future[Result] = torch.futures.Future()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns when the operation has ended.

        Args:
            timeout: how long to wait; None or zero means the group's own.

        Raises:
            CommunicationError: the operation failed, or did not end in time. The text names it.
        """
        limit = timeout if timeout and timeout > timedelta(0) else self._timeout
        if not self._done.wait(limit.total_seconds()):
            raise CommunicationError(
                f"{self.name} did not end within {limit.total_seconds():g} s: "
                f"not every rank called it, or a rank has stopped"
            )
        if self._error is not None:
            raise CommunicationError(f"{self.name} failed: {self._error}") from self._error
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> Result:
        return self._result

    def get_future(self) -> "torch.futures.Future[Result]":
        return self._future

    def complete(self, result: Result) -> None:
        self._result = result
        self._future.set_result(result)
        self._done.set()  # after the future, which is done when wait() returns

    def fail(self, error: Exception) -> None:
        self._error = error
        failure = CommunicationError(f"{self.name} failed: {error}")
        self._future.set_exception(failure)  # type: ignore[arg-type]  # its annotation is wrong
        self._done.set()


class PendingMessage(dist._Work):
    """The handle of a send or receive that MPI itself has under way.

    It keeps the tensor alive until MPI has done with it, and runs `finish` once on arrival.
    """

    def __init__(
        self,
        name: str,
        timeout: timedelta,
        request: MPI.Request,
        tensor: torch.Tensor,
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self.name = name
        self._timeout = timeout
        self._request = request
        self._tensor = tensor
        self._finish = finish
        self._status = MPI.Status()
        self._done = False

    def is_completed(self) -> bool:
        if not self._done and self._request.Test(self._status):
            self._done = True
            with torch.no_grad():
                self._finish()
            # The tensor belongs to the caller again, however long the handle is kept.
            self._finish = lambda: None
            del self._tensor
        return self._done

    def wait(self, timeout: timedelta | None = None) -> bool:
        """As `Pending.wait`. Polls: at first without pause, then yielding the core to others."""
        limit = timeout if timeout and timeout > timedelta(0) else self._timeout
        deadline = MPI.Wtime() + limit.total_seconds()
        pause = threading.Event()
        polls = 0
        try:
            while not self.is_completed():
                polls += 1
                if polls > 1000:
                    if MPI.Wtime() > deadline:
                        raise CommunicationError(
                            f"{self.name} did not end within {limit.total_seconds():g} s: "
                            f"the other rank has not called its part, or has stopped"
                        )
                    pause.wait(1e-4)
        except MPI.Exception as error:
            raise CommunicationError(f"{self.name} failed: {error}") from error
        return True

    def is_success(self) -> bool:
        return self.is_completed()

    def _source_rank(self) -> int:
        return self._status.Get_source()

    source_rank = _source_rank


class Worker:
    """Runs operations in the order in which they were submitted, each to its end.

    One thread for one communicator: MPI asks for the same order of collectives on every rank, and
    the order of submission is that order.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[tuple[Pending, Callable[[], Result]] | None] = SimpleQueue()
        # A daemon: blocked in MPI on a peer that died, it must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        _running.add(self)

    def submit(self, pending: Pending, operation: Callable[[], Result]) -> Pending:
        self._queue.put((pending, operation))
        return pending

    def close(self, timeout: float) -> bool:
        """Ends the thread after what was submitted; True when it did. Idempotent."""
        self._queue.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @torch.no_grad()  # a thread begins with gradients enabled, and parameters are sent, too
    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            pending, operation = item
            try:
                result = operation()
            except Exception as error:  # noqa: BLE001  # it belongs to the caller of wait()
                pending.fail(error)
            else:
                pending.complete(result)
            # Not kept until the next operation: the tensors belong to the caller again.
            del item, pending, operation


_running: "weakref.WeakSet[Worker]" = weakref.WeakSet()


@atexit.register
def _close_workers() -> None:
    """A thread that is inside torch when the interpreter ends would abort the process."""
    for worker in list(_running):
        worker.close(timeout=1.0)


def describe(operation: str, rank: int, sequence: int, tensors: Any) -> str:
    """`all_reduce number 7 on rank 1 (1024 bytes)`."""
    return f"{operation} number {sequence} on rank {rank} ({sum(t.nbytes for t in tensors)} bytes)"
