"""Work handles of collectives, and the thread that runs a group's operations in order."""

import atexit
import os
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
from ddp_from_scratch.common.errors import CommunicationError, NoSharedMemory
from ddp_from_scratch.common.whereabouts import whereabouts

Outputs = list[torch.Tensor]

FORKED = "this process was forked from a rank, which alone may do this"  # an error's text


@dataclass(slots=True)
class Operation:
    """This rank's part of a collective. It keeps its tensors alive."""

    fingerprint: str  # describes the operation; equal on all ranks, and part of errors
    run: Callable[[], Outputs | None]  # called once all ranks have arrived
    prepare: Callable[[], str] = str  # called before, in turn; returns a place (`same_place`)


def run_in_turn(
    operations: Sequence[Operation], barrier: CheckedBarrier, seconds: float, others: int = 0
) -> Outputs:
    """Prepares, meets and runs one operation after another; `seconds` is the timeout of each.

    `others` counts this rank's calls on the gloo group beside this one.
    """
    result: Outputs = []
    for operation in operations:
        place = operation.prepare()  # after the last one has ended: both write to the same memory
        try:
            # The timeout starts here, not at the call, since other operations may run first.
            barrier.meet(operation.fingerprint, place, seconds, others)
            result += operation.run() or []
        except NoSharedMemory:
            raise  # every rank raises it, so the group stays usable
        except BaseException as error:  # includes Ctrl-C and errors in signal handlers
            barrier.break_off(error)
            raise
    return result


class NodeWork(dist.Work):
    """The work handle of one call, which `name` names in errors; the group has this timeout."""

    def __init__(
        self, name: Callable[[], str], timeout: timedelta, barrier: CheckedBarrier
    ) -> None:
        super().__init__()
        self._name, self._timeout, self._barrier = name, timeout, barrier
        self._result: Outputs = []
        self._error: Exception | None = None
        self._future: torch.futures.Future[Outputs] = torch.futures.Future()
        # `repeat` returns the future on each call, faster than a method: every bucket calls it.
        self.get_future: Callable[[], torch.futures.Future[Outputs]] = repeat(self._future).__next__
        self._ended = False  # set last; a signal handler, which can take no lock, may read it
        self._under_way = threading.Lock()  # held until `_ended`; waiting threads sleep on it
        self._under_way.acquire()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._ended:
            self._wait_until_ended(timeout)
        if self._error is not None:
            raise self._error
        return True

    def _wait_until_ended(self, timeout: timedelta | None) -> None:
        # Two seconds longer than the operation's own timeout, whose error names the missing ranks.
        limit = self._timeout.total_seconds() + 2.0
        if timeout is not None and timeout > timedelta(0):
            limit = timeout.total_seconds()
        began = time.monotonic()
        nap = min(self._barrier.progress(), limit)  # perhaps no other thread advances messages
        while not self._ended:
            if self._under_way.acquire(timeout=nap):
                self._under_way.release()  # for other waiting threads
            elif time.monotonic() - began >= limit:
                raise CommunicationError(
                    f"{self._name()} did not end within {limit:g} s: "
                    f"{self._barrier.missing_names} did not arrive"
                    f"{whereabouts(self._barrier.missing(), limit)}"
                )
            else:
                self._barrier.progress()

    def is_completed(self) -> bool:
        return self._ended

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> Outputs:
        return self._result

    def complete(self, result: Outputs) -> None:
        self._result = result
        self._future.set_result(result)
        self._end()

    def fail(self, error: Exception) -> None:
        self._error = CommunicationError(f"{self._name()} failed: {error}")
        self._error.__cause__ = error
        self._future.set_exception(self._error)  # type: ignore[arg-type]  # a wrong annotation
        self._end()

    def _end(self) -> None:
        self._ended = True  # after the future, which must be done when wait() returns
        self._under_way.release()


Task = Callable[[], Outputs]


class Worker:
    """Runs a group's operations one at a time, in the order of submission, equal on all ranks."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[tuple[NodeWork, Task] | None] = SimpleQueue()
        # Submitted and unfinished work; a thread that finds it empty may run an operation at once.
        self._queued: set[NodeWork] = set()
        self._turn = threading.Lock()  # held while an operation runs
        self._closed = self._forked = False
        # A daemon: if it blocks in MPI on a lost peer, it must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        _running.add(self)

    def submit(self, work: NodeWork, run: Task, at_once: bool) -> NodeWork:
        """Runs `run` in its turn, in this thread if `at_once` allows, then completes `work`."""
        if self._forked:
            # Not raised here: torch would look this group up to log it, and fail to find it.
            work.fail(RuntimeError(FORKED))
            return work
        if self._closed:
            raise RuntimeError("the process group is closed")
        # Only if nothing is queued, or the order would differ between ranks.
        if at_once and not self._queued and self._turn.acquire(blocking=False):
            self._execute(work, run)
        elif threading.get_ident() == self._thread.ident:
            # A future's callback submits here and may wait, so this thread runs the queue first.
            while self._queued and (item := self._queue.get()) is not None:
                self._take(*item)
            self._take(work, run)
        else:
            self._queued.add(work)  # before `put`, since the thread may take it at once
            self._queue.put((work, run))
        return work

    def close(self, timeout: float) -> bool:
        """Ends the thread after the submitted operations; True if it ended in time. Idempotent."""
        self._closed = True
        self._queue.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close_in_fork(self) -> None:
        """Makes operations raise in a forked process, which has no thread to run them."""
        self._closed = self._forked = True

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            self._take(*item)
            del item  # else it keeps the caller's tensors alive until the next operation

    def _take(self, work: NodeWork, run: Task) -> None:
        self._turn.acquire()
        self._execute(work, run)

    def _execute(self, work: NodeWork, run: Task) -> None:
        """Runs an operation and completes its handle. Releases `_turn`, which the caller holds."""
        gradients = torch.is_grad_enabled()
        try:
            try:
                # Not `torch.no_grad()`, which takes as long as a small operation.
                torch._C._set_grad_enabled(False)
                result = run()
            finally:
                torch._C._set_grad_enabled(gradients)
                self._turn.release()
                # Before the handle completes, since its callbacks may submit operations at once.
                self._queued.discard(work)
        except Exception as error:  # noqa: BLE001  # wait() raises it in the caller's thread
            work.fail(error)
        else:
            work.complete(result)


_running: "weakref.WeakSet[Worker]" = weakref.WeakSet()


@atexit.register
def _close_workers() -> None:
    """Ends the threads: one inside torch at interpreter shutdown would abort the process."""
    for worker in list(_running):
        worker.close(timeout=1.0)


def _close_in_fork() -> None:
    for worker in list(_running):
        worker.close_in_fork()


os.register_at_fork(after_in_child=_close_in_fork)
