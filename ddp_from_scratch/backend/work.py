"""Work: the handle of a collective; and the thread that runs a group's, one after another."""

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import repeat
from queue import SimpleQueue

import torch
import torch.distributed as dist

from ddp_from_scratch.backend.barrier import CheckedBarrier
from ddp_from_scratch.errors import CommunicationError, NoSharedMemory

Result = list[torch.Tensor]


@dataclass(slots=True)
class Operation:
    """This rank's part of a collective. Its tensors live as long as it does.

    Attributes:
        fingerprint: the same on all ranks that call the same operation; errors print it.
        run: called once all ranks have arrived; communicates, and may return tensors.
        prepare: called before, in the operation's turn; returns a detail of the call in which the
            ranks may differ (`CheckedBarrier.same_place`).
    """

    fingerprint: str
    run: Callable[[], Result | None]
    prepare: Callable[[], str] = str


def run_in_turn(operations: Sequence[Operation], barrier: CheckedBarrier, seconds: float) -> Result:
    """Prepares, meets and runs, one operation after another; `seconds` are for each to meet."""
    result: Result = []
    for operation in operations:
        # Only when the one before has ended: both write to the same memory.
        place = operation.prepare()
        try:
            # The timeout begins here, not when the call was made: others may run before it.
            barrier.meet(operation.fingerprint, place, seconds)
            result += operation.run() or []
        except NoSharedMemory:
            raise  # on every rank, so none waits for another and the group stays usable
        except BaseException as error:  # Ctrl-C, too, or an error of a signal's handler
            barrier.break_off(error)
            raise
    return result


class NodeWork(dist.Work):
    """`torch.distributed`'s Work of one call.

    Args:
        name: names the call and the rank in error messages; called only when there is an error.
        timeout: the group's, in which the operation itself fails when a rank does not come.
        barrier: knows the missing ranks.
    """

    def __init__(
        self, name: Callable[[], str], timeout: timedelta, barrier: CheckedBarrier
    ) -> None:
        super().__init__()
        self._name, self._timeout, self._barrier = name, timeout, barrier
        self._result: Result = []
        self._error: Exception | None = None
        self._future: torch.futures.Future[Result] = torch.futures.Future()
        # Returns the future each time it is called. Not a method: it is in every bucket's way.
        self.get_future = repeat(self._future).__next__  # type: ignore[method-assign]
        # No lock guards it, as a signal's handler may read it in the middle of anything. It changes
        # once, after everything that a caller may read then.
        self._ended = False
        self._under_way = threading.Lock()  # held until `_ended`: waiting threads sleep on it
        self._under_way.acquire()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns when the operation has ended.

        Raises:
            CommunicationError: it failed, or did not end in time. The text names it.
        """
        if not self._ended:
            self._wait_until_ended(timeout)
        if self._error is not None:
            raise self._error
        return True

    def _wait_until_ended(self, timeout: timedelta | None) -> None:
        # Two seconds more than the operation has: it ends by itself, and then knows best which
        # ranks were missing.
        limit = self._timeout.total_seconds() + 2.0
        if timeout is not None and timeout > timedelta(0):
            limit = timeout.total_seconds()
        began = time.monotonic()
        # While messages are under way, this thread wakes up for them: it may be the only one.
        nap = min(self._barrier.progress(), limit)
        while not self._ended:
            if self._under_way.acquire(timeout=nap):
                self._under_way.release()  # others may wait, too
            elif time.monotonic() - began >= limit:
                raise CommunicationError(
                    f"{self._name()} did not end within {limit:g} s: "
                    f"{self._barrier.missing_names} did not come"
                )
            else:
                self._barrier.progress()

    def is_completed(self) -> bool:
        return self._ended

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> Result:
        return self._result

    def complete(self, result: Result) -> None:
        self._result = result
        self._future.set_result(result)
        self._end()

    def fail(self, error: Exception) -> None:
        self._error = CommunicationError(f"{self._name()} failed: {error}")
        self._error.__cause__ = error
        self._future.set_exception(self._error)  # type: ignore[arg-type]  # a wrong annotation
        self._end()

    def _end(self) -> None:
        self._ended = True  # after the future, which is done when wait() returns
        self._under_way.release()


Run = Callable[[], Result]


class Worker:
    """Runs operations in the order in which they were submitted, each to its end.

    One thread for one group: all ranks must come to its operations in the same order, and the
    order of submission is that order. Where nothing waits, the thread that submits can run an
    operation itself.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[tuple[NodeWork, Run] | None] = SimpleQueue()
        # Submitted and unfinished. Work is in it before it can begin and until it has ended, so
        # that empty means: the thread that looks has nothing ahead of it.
        self._queued: set[NodeWork] = set()
        self._turn = threading.Lock()  # held while an operation runs
        self._closed = False
        # A daemon: blocked in MPI on a peer that died, it must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        _running.add(self)

    def submit(self, work: NodeWork, run: Run, at_once: bool) -> NodeWork:
        """Runs `run` after the operations submitted before, then completes its handle `work`.

        On the group's thread, or on this one `at_once`, where the caller is going to wait for it.
        """
        if self._closed:
            raise RuntimeError("the process group is closed")
        # Here and now only where nothing is ahead, or the ranks' orders would differ.
        if at_once and not self._queued and self._turn.acquire(blocking=False):
            self._execute(work, run)
        elif threading.get_ident() == self._thread.ident:
            # A future's callback runs on this thread, and no other would run what it submits and
            # may wait for: first the operations submitted before, then this one.
            while self._queued and (item := self._queue.get()) is not None:
                self._take(*item)
            self._take(work, run)
        else:
            self._queued.add(work)  # first: the thread may take it at once
            self._queue.put((work, run))
        return work

    def close(self, timeout: float) -> bool:
        """Ends the thread after the submitted operations; True if it has ended. Idempotent."""
        self._closed = True
        self._queue.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            self._take(*item)
            # Not kept until the next operation comes: the tensors belong to the caller again.
            del item

    def _take(self, work: NodeWork, run: Run) -> None:
        self._turn.acquire()
        self._execute(work, run)

    def _execute(self, work: NodeWork, run: Run) -> None:
        """Runs it and completes its handle. The caller has the turn, which is given back here."""
        gradients = torch.is_grad_enabled()
        try:
            try:
                # As under `torch.no_grad()`, which takes as long as a small operation.
                torch._C._set_grad_enabled(False)
                result = run()
            finally:
                torch._C._set_grad_enabled(gradients)
                self._turn.release()
                # Before the handle completes: its callbacks may submit, with nothing ahead of them.
                self._queued.discard(work)
        except Exception as error:  # noqa: BLE001  # it belongs to the caller of wait()
            work.fail(error)
        else:
            work.complete(result)


_running: "weakref.WeakSet[Worker]" = weakref.WeakSet()


@atexit.register
def _close_workers() -> None:
    """A thread that is inside torch when the interpreter ends would abort the process."""
    for worker in list(_running):
        worker.close(timeout=1.0)
