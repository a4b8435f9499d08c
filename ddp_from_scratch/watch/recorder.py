"""An observer that records the events of training steps on one rank."""

import torch

from ddp_from_scratch.core.bucket import Bucket
from ddp_from_scratch.core.observer import Tracer
from ddp_from_scratch.options.unused import find_tensors
from ddp_from_scratch.watch.record import Clock, Event, EventMark, StepMarks


class Recorder(Tracer):
    """Takes a mark at each event of a step. Subclasses decide where a step ends, and read it."""

    def __init__(self, device: torch.device) -> None:
        self.clock: Clock = Clock(device)
        self.step: StepMarks | None = None  # the current step; None records nothing
        self._in_backward = False
        self._all_launched = False

    def begin(self, step: StepMarks) -> None:
        self.step = step
        self._all_launched = False
        self.note(Event.BEGIN)

    def note(self, event: Event) -> None:
        if self.step is not None:
            self.step.events.append(EventMark(event, self.clock.take()))
            self._in_backward = event in (Event.BACKWARD, Event.WAITED)

    def on_forward(self) -> None:
        if torch.is_grad_enabled():  # else it is an evaluation
            self.note(Event.FORWARD)

    def on_forwarded(self, outputs: object) -> None:
        if torch.is_grad_enabled():
            self.note(Event.FORWARDED)
        for tensor in find_tensors(outputs):
            # A leaf may be a parameter, which would keep the hook forever.
            if tensor.grad_fn is not None:
                tensor.register_hook(self._on_backward)

    def _on_backward(self, gradient: torch.Tensor) -> None:
        # Only the first output that autograd reaches begins the pass.
        if self.step is not None and not self._in_backward:
            self.note(Event.BACKWARD)
            # A pass under no_sync() launches nothing, so autograd must report its end.
            torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)

    def _on_backward_end(self) -> None:
        if self._in_backward:
            self.note(Event.OVER)

    def on_launch(self, bucket: Bucket) -> None:
        if self.step is not None:
            before = self.step.events[-1]
            # A launch after these events shows a backward pass whose begin was not noted.
            between = (Event.BEGIN, Event.OVER, Event.STEP, Event.STEPPED)
            self._in_backward |= before.event in between
            self.step.events.append(EventMark(Event.LAUNCH, before.mark))

    def on_wait(self, bucket: Bucket | None) -> None:
        # Only waits during backward, as with PowerSGD; later ones are part of the final wait.
        if not self._all_launched:
            self.note(Event.WAIT)

    def on_waited(self, bucket: Bucket | None) -> None:
        if not self._all_launched:
            self.note(Event.WAITED)

    def on_all_launched(self) -> None:
        self.note(Event.ALL_LAUNCHED)
        self._all_launched = True

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.note(Event.STEP)

    def on_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self.note(Event.STEPPED)
