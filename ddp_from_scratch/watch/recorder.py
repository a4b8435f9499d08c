"""Records the moments of training steps on one rank: the one timer of steps.

The events of a step, from the end of one average to the end of the next:

    begin  step stepped  forward forwarded  backward  launch.. over  all launched  averaged
           '- the optimizer of the step before, in a timeline

`stragglers.py` reads them as phases, `record.py` as the spans of a timeline.
"""

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ddp_from_scratch import gpu
from ddp_from_scratch.autograd.graph_walk import find_tensors
from ddp_from_scratch.buckets.gradient_bucket import GradientBucket
from ddp_from_scratch.buckets.observer import Observer

Mark = Any  # of `HostMarks` or `GpuMarks`
Layout = tuple[tuple[str, ...], ...]


class HostMarks:
    """Marks of what the host does. Ranks of one Linux machine have one clock."""

    # The clock itself: a function around it would take as long again, for every gradient.
    take = staticmethod(time.perf_counter)

    def seconds(self, mark: float) -> float:
        return mark


class GpuMarks:
    """Marks of what a GPU does: events in the stream that is current where they are taken.

    The host runs ahead of the GPU, so its own clock would show when work was issued, and not when
    it ran.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One moment on both clocks.
        gpu.synchronize(device)
        self._near, self._its_seconds = self.take(), time.perf_counter()
        self._near.synchronize()

    def take(self) -> torch.Event:
        return gpu.record(self._device, timed=True)

    def seconds(self, mark: torch.Event) -> float:
        """Waits for the event, and returns its time in seconds of `time.perf_counter`."""
        mark.synchronize()
        # A float32 in ms, which is exact to 0.1 us only between events that are near each other.
        passed = self._near.elapsed_time(mark) / 1e3
        seconds = self._its_seconds + passed
        if passed > 1:
            self._near, self._its_seconds = mark, seconds
        return seconds


Marks = HostMarks | GpuMarks


def marks_for(device: torch.device) -> Marks:
    """Returns the marks of the device that computes. Their times are read after the steps."""
    return GpuMarks(device) if gpu.is_gpu(device) else HostMarks()


@dataclass
class StepMarks:
    """Moments of one step.

    Attributes:
        iteration: the number of averages before it.
        layout: the parameters of each bucket, by name, in the order of launch.
        arrived: a parameter and a moment for each gradient, in one list.
        buckets: moments of each bucket by their names, see `BucketRecorder`.
        events: in their order, each with its mark; a launch has none.
        launched: True once all buckets were launched.
    """

    iteration: int
    layout: Layout = ()
    arrived: list[Any] = field(default_factory=list)
    buckets: dict[int, dict[str, Mark]] = field(default_factory=dict)
    events: list[tuple[str, Mark]] = field(default_factory=list)
    launched: bool = False


class Recorder(Observer):
    """Takes a mark at each event of a step. What ends a step, and reads it, derives from this.

    Attributes:
        marks: the clock.
        step: the step under way; None records nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self.marks = marks_for(device)
        self.step: StepMarks | None = None
        self._in_backward = False
        # Each with what removes the hook behind its steps.
        self._optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, Callable[[], object]]
        self._optimizers = weakref.WeakKeyDictionary()

    def begin(self, step: StepMarks) -> None:
        self.step = step
        self.note("begin")

    def note(self, event: str) -> None:
        """Takes a mark of this moment, if a step is recorded."""
        if self.step is not None:
            self.step.events.append((event, self.marks.take()))
            self._in_backward = event in ("backward", "waited")

    def remove(self) -> None:
        """Ends the recording, and removes the hooks of optimizers."""
        self.step = None
        for remove in self._optimizers.values():
            remove()

    def on_forward(self) -> None:
        if torch.is_grad_enabled():  # an evaluation is not recorded
            self.note("forward")

    def on_forwarded(self, outputs: object) -> None:
        for tensor in find_tensors(outputs):
            # Not on a leaf, which may be a parameter: its hooks would stay there for good.
            if tensor.grad_fn is not None:
                tensor.register_hook(self._on_backward)

    def _on_backward(self, gradient: torch.Tensor) -> None:
        # Autograd's first call in this pass, from whichever output it begins.
        if self.step is not None and not self._in_backward:
            self.note("backward")
            # A pass under no_sync() launches nothing, and ends all the same.
            torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)

    def _on_backward_end(self) -> None:
        if self._in_backward:
            self.note("over")

    def on_launch(self, bucket: GradientBucket) -> None:
        if self.step is not None:
            # Nothing but a launch at the end of backward, or before its begin was seen.
            self._in_backward |= self.step.events[-1][0] in ("begin", "over", "stepped")
            self.step.events.append(("launch", None))

    def on_agree(self) -> None:
        self.note("wait")

    def on_agreed(self) -> None:
        self.note("waited")

    def on_wait(self, bucket: GradientBucket) -> None:
        # During backward, as with PowerSGD. Later ones are in the wait for the average.
        if self.step is not None and not self.step.launched:
            self.note("wait")

    def on_waited(self, bucket: GradientBucket) -> None:
        if self.step is not None and not self.step.launched:
            self.note("waited")

    def on_all_launched(self) -> None:
        self.note("all launched")
        if self.step is not None:
            self.step.launched = True

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer not in self._optimizers:
            # Weakly, and with this recorder: the optimizer may outlive the Reducer.
            hook = partial(_call, weakref.WeakMethod(self._after_step))
            handle = optimizer.register_step_post_hook(hook)
            self._optimizers[optimizer] = weakref.finalize(self, handle.remove)

    def _after_step(self) -> None:
        self.note("stepped")


def _call(method: "weakref.WeakMethod[Callable[[], None]]", *arguments: object) -> None:
    if (found := method()) is not None:
        found()
