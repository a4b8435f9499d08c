"""Stops all ranks after the same step when one of them receives a signal."""

import os
import signal
import threading
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch.common.errors import UsageError
from ddp_from_scratch.common.group import cpu_group, may_be_in_flight, wait
from ddp_from_scratch.launch.rank_process import is_communication_error

# SIGUSR1: mpirun forwards it and kills no rank, and Slurm can send it before the time is up.
_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class StopSignal:
    """Records SIGINT, SIGTERM, SIGUSR1 and SIGHUP in its `with` block, so that ranks stop together.

        with ddp.StopSignal() as stop:
            for batch in batches:
                ...                             # one step
                if number := stop.requested():  # on all ranks after the same step
                    break

    A signal may reach only some ranks, and each of them in another step: `requested` tells all
    ranks. The same signal again ends the process at once. SIGHUP is left alone if it is ignored, as
    under nohup.

    Attributes:
        received: the number of the signal that this rank has received last; 0 if none. In a run of
            `ddp.elastic` pass it to `run.exchange`, instead of calling `requested`.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Takes the ranks that stop together; None means all.

        Args:
            process_group: on any backend; on nccl the ranks exchange signals in a gloo group.
        """
        self.received: int = 0
        self._process_group = process_group
        self._previous: dict[int, Any] | None = None  # the handlers; None outside of `with`
        self._agreed = 0
        # The exchange in flight: the highest of all ranks' `received`, as they were at its start.
        self._highest: torch.Tensor | None = None
        self._work: dist.Work | None = None

    def requested(self) -> int:
        """Returns the number of a signal that a rank has received, on all ranks; 0 if none has.

        Collective: call it once in each step, equally often on all ranks. A call reads the exchange
        that the call before has started, and starts the next one, an all-reduce of 8 bytes. So no
        step waits for it, and all ranks stop at most two steps after the signal. From then on it
        returns the same number without communication. Inside `ddp.join` a rank without data makes
        no call, so use it outside.

        Raises:
            RuntimeError: outside of the `with` block, or in a run of `ddp.elastic`.
        """
        if self._previous is None:
            raise RuntimeError(
                "StopSignal records signals in a `with` block: write `with ddp.StopSignal() as "
                "stop:` around the training loop, and call stop.requested() inside"
            )
        if may_be_in_flight():
            raise RuntimeError(
                "in a run of ddp.elastic, StopSignal cannot exchange signals by itself: in the "
                "function of run.repeat, begin a step with answer = run.exchange(stop.received), "
                "and end it with (number,) = answer()"
            )
        if self._agreed:
            return self._agreed
        self._finish_exchange()
        if not self._agreed:
            self._highest = torch.tensor([self.received], dtype=torch.int64, device="cpu")
            group = cpu_group(self._process_group)
            self._work = dist.all_reduce(
                self._highest, dist.ReduceOp.MAX, group=group, async_op=True
            )
        return self._agreed

    def __enter__(self) -> "StopSignal":
        thread = threading.current_thread()
        if thread is not threading.main_thread():
            raise UsageError(
                f"StopSignal must be entered in the main thread, the only one that may handle "
                f"signals, got {thread.name}"
            )
        self._process = os.getpid()
        self.received = self._agreed = 0
        self._highest = self._work = None  # left behind where an error has ended the last block
        self._previous = {
            number: signal.signal(number, self._remember)
            for number in _NUMBERS
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN  # nohup
        }
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        for number, handler in (self._previous or {}).items():
            signal.signal(number, handler)
        self._previous = None
        if self.received and isinstance(error, Exception) and is_communication_error(error):
            # A rank exited before agreeing on a step with this one, which exits as asked, too.
            signal.signal(self.received, signal.SIG_DFL)
            os.kill(os.getpid(), self.received)
        if error is None:
            self._finish_exchange()  # that of the last step, before the group closes

    def _finish_exchange(self) -> None:
        if self._highest is not None:
            wait(self._work)
            self._agreed = int(self._highest)
            self._highest = self._work = None

    def _remember(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() == self._process:
            self.received = number
        else:  # a process that the rank has forked, such as a pool's
            os.kill(os.getpid(), number)
