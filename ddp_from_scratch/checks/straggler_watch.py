"""Times the phases of a rank's steps, and reports the rank that the others wait for."""

import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch import gpu
from ddp_from_scratch.checks.straggler_report import PHASES, WORK, StragglerReport, compare
from ddp_from_scratch.core.bucket import Bucket
from ddp_from_scratch.core.extension import Extension
from ddp_from_scratch.marks import marks_for
from ddp_from_scratch.options.unused import find_tensors


class StragglerWatch(Extension):
    """Compares the ranks' steps in every so many averages, and reports which of them is late.

    Each rank takes the time of the phases of its own steps. They are gathered after `every` steps,
    in one collective more. The phases of a step, from the end of one average to that of the next:

    - optimizer: up to the end of the last optimizer's step; clipping and loss scaling are in it.
    - data: up to the forward pass. Without an optimizer's step it begins with the average.
    - forward: until backward reaches the outputs, so with the loss and its own backward.
    - backward: until all buckets are launched; where the module is not called as a whole, with all
      that comes before it.
    - waiting: for averages, for weights, and for the ranks that come later.

    Args:
        every: the number of averages from one report to the next.
        device: the device of the parameters. On a GPU its own events are compared, not the host's.
        process_group: the ranks that are compared; None means all.
        layers_communicate: returns True if forward and backward hold waits for other ranks
            (synchronised batch norm). Then data and optimizer alone are compared.
        tell: called with each report, on every rank. By default rank 0 prints it to standard error.

    Raises:
        ValueError: `every` is no whole number of 1 or more.
    """

    def __init__(
        self,
        every: int,
        device: torch.device,
        process_group: dist.ProcessGroup | None,
        layers_communicate: Callable[[], bool],
        tell: Callable[[StragglerReport], None] | None = None,
    ) -> None:
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"straggler_every must be a number of averages, got {every!r}")
        self._every, self._device, self._process_group = every, device, process_group
        self._layers_communicate, self._tell = layers_communicate, tell or self._print
        self._marks = marks_for(device)
        # The present step: each phase with the mark at its begin. Empty before the first average.
        self._phases: list[tuple[str, Any]] = []
        # The steps since the last report, each with the mark at its end.
        self._steps: list[list[tuple[str, Any]]] = []
        self._stepped = self._launched = False
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def _enter(self, phase: str) -> None:
        if self._phases:
            self._phases.append((phase, self._marks.take()))

    def on_forward(self) -> None:
        """Ends data, or what seemed to be the optimizer's time if none has stepped."""
        if torch.is_grad_enabled() and self._phases:
            if not self._stepped:
                self._phases[0] = ("data", self._phases[0][1])
            self._enter("forward")

    def on_forwarded(self, outputs: object) -> None:
        """Ends forward as soon as a backward pass begins at one of the outputs."""
        for tensor in find_tensors(outputs):
            # Not on a leaf, which may be a parameter: its hooks would stay there for good.
            if tensor.grad_fn is not None:
                tensor.register_hook(self._on_backward)

    def _on_backward(self, gradient: torch.Tensor) -> None:
        if self._phases and self._phases[-1][0] != "backward":
            self._enter("backward")
            # A pass under no_sync() launches nothing. What follows it is data again.
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._on_backward_end)

    def _on_backward_end(self) -> None:
        if self._phases and self._phases[-1][0] == "backward":
            self._enter("data")

    def on_launch(self, bucket: Bucket) -> None:
        """Takes back that backward is over, if it launches at its end."""
        if self._phases and self._phases[-1][0] in ("data", "optimizer"):
            self._phases[-1] = ("backward", self._phases[-1][1])

    def on_agree(self) -> None:
        """Takes a wait for other ranks' weights out of backward."""
        self._enter("waiting")

    def on_agreed(self) -> None:
        """Goes on with backward."""
        self._enter("backward")

    def on_wait(self, bucket: Bucket) -> None:
        """Takes a wait during backward, as with PowerSGD, out of it."""
        if not self._launched:
            self._enter("waiting")

    def on_waited(self, bucket: Bucket) -> None:
        """Goes on with backward, if it is not over."""
        if not self._launched:
            self._enter("backward")

    def on_all_launched(self) -> None:
        """Ends backward."""
        self._launched = True
        self._enter("waiting")

    def on_average(self, iteration: int, takes_part: bool) -> None:
        """Ends the step; gathers and reports if a report is due. Collective then."""
        if gpu.is_gpu(self._device) and gpu.is_capturing():
            return  # a graph's events have no times, and its replays call nothing here
        if self._phases:
            self._enter("end")
            if not takes_part:
                # Without data it has waited all the time, in a collective of `join`.
                self._phases[:-1] = [("waiting", self._phases[0][1])]
            self._steps.append(self._phases)
        try:
            if self._steps and iteration % self._every == 0:
                self._report(iteration)
        finally:  # `tell` may raise, and the program may go on
            self._stepped = self._launched = False
            self._phases = [("optimizer", self._marks.take())]

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Watches for the end of this optimizer's steps from now on. Idempotent."""
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            # Weakly, and with this watch: the optimizer may outlive the Reducer.
            hook = partial(_call, weakref.WeakMethod(self._after_step))
            weakref.finalize(self, optimizer.register_step_post_hook(hook).remove)

    def _after_step(self) -> None:
        self._stepped = True
        # Of several optimizers the last one's step ends the phase.
        if [phase for phase, _ in self._phases[-2:]] == ["optimizer", "data"]:
            self._phases.pop()
        self._enter("data")

    def on_set_step(self) -> None:
        """Forgets the steps since the last report, which ranks that join do not have."""
        self._steps, self._phases = [], []

    def _report(self, iteration: int) -> None:
        rows = [self._seconds(step) for step in self._steps]
        own = torch.tensor(rows, dtype=torch.float64, device=self._device)
        self._steps.clear()
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(self._process_group))]
        dist.all_gather(everyone, own, group=self._process_group)
        only = ("data", "optimizer") if self._layers_communicate() else WORK
        self._tell(compare(torch.stack(everyone).cpu(), iteration, only))

    def _seconds(self, step: list[tuple[str, Any]]) -> list[float]:
        seconds = dict.fromkeys(PHASES, 0.0)
        times = [self._marks.seconds(mark) for _, mark in step]
        for (phase, _), begin, end in zip(step, times, times[1:], strict=False):
            seconds[phase] += end - begin
        return list(seconds.values())

    def _print(self, report: StragglerReport) -> None:
        if dist.get_rank(self._process_group) == 0:
            print(report, file=sys.stderr, flush=True)


def _call(method: "weakref.WeakMethod[Callable[[], None]]", *arguments: object) -> None:
    if (found := method()) is not None:
        found()
