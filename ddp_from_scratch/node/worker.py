"""Worker: the thread that runs a group's collectives one after another."""

import atexit
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

import torch

from ddp_from_scratch.node.work import NodeWork, Result

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
        # A daemon: blocked in MPI on a peer that died, it must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        _running.add(self)

    def submit(self, work: NodeWork, run: Run, at_once: bool) -> NodeWork:
        """Runs `run` after the operations submitted before, then completes its handle `work`.

        On the group's thread, or on this one `at_once`, where the caller is going to wait for it.
        """
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
