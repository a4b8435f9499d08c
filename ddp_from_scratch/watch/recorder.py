"""Records the events of training steps on one rank.

A step lasts from the end of one average to the end of the next:

    begin  step stepped  forward forwarded  backward  launch.. over  all launched  averaged
           '- in a timeline, this optimizer step belongs to the previous step

`stragglers.py` turns the events into phases, `record.py` into the spans of a timeline.
"""

import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ddp_from_scratch import gpu
from ddp_from_scratch.core.bucket import Bucket
from ddp_from_scratch.core.extension import Extension
from ddp_from_scratch.options.unused import find_tensors

Mark = Any  # what `take` of `HostMarks` or `GpuMarks` returns
Layout = tuple[tuple[str, ...], ...]


class HostMarks:
    """Takes times of the host's work. All ranks of a Linux machine share one clock."""

    # The clock function itself: every gradient calls it, and a wrapper would double the cost.
    take = staticmethod(time.perf_counter)

    def seconds(self, mark: float) -> float:
        return mark


class GpuMarks:
    """Takes times of a GPU's work, as events on the current stream: the host runs ahead of it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gpu.synchronize(device)  # one moment on both clocks
        self._near, self._its_seconds = self.take(), time.perf_counter()
        self._near.synchronize()

    def take(self) -> torch.Event:
        return gpu.record(self._device, timed=True)

    def seconds(self, mark: torch.Event) -> float:
        """Waits for the event and returns its time in seconds of `time.perf_counter`."""
        mark.synchronize()
        # `elapsed_time` is a float32 in ms, exact to 0.1 us only if the events are close together.
        passed = self._near.elapsed_time(mark) / 1e3
        seconds = self._its_seconds + passed
        if passed > 1:
            self._near, self._its_seconds = mark, seconds
        return seconds


Marks = HostMarks | GpuMarks


def marks_for(device: torch.device) -> Marks:
    """Returns the marks for the device that computes. Their times are read after the steps."""
    return GpuMarks(device) if gpu.is_gpu(device) else HostMarks()


@dataclass
class StepMarks:
    """The marks of one step."""

    iteration: int  # the number of averages before it
    layout: Layout = ()  # the parameters of each bucket, in launch order
    arrived: list[Any] = field(default_factory=list)  # a parameter and a mark for each gradient
    buckets: dict[int, dict[str, Mark]] = field(default_factory=dict)  # by index and moment
    events: list[tuple[str, Mark]] = field(default_factory=list)  # a launch has no mark
    launched: bool = False  # True once all buckets are


class Recorder(Extension):
    """Takes a mark at each event of a step. Subclasses decide where a step ends, and read it."""

    def __init__(self, device: torch.device) -> None:
        self.marks = marks_for(device)
        self.step: StepMarks | None = None  # the current step; None records nothing
        self._in_backward = False
        # By optimizer, the function that removes its post-step hook.
        self._optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, Callable[[], object]]
        self._optimizers = weakref.WeakKeyDictionary()

    def begin(self, step: StepMarks) -> None:
        self.step = step
        self.note("begin")

    def note(self, event: str) -> None:
        if self.step is not None:
            self.step.events.append((event, self.marks.take()))
            self._in_backward = event in ("backward", "waited")

    def close(self) -> None:
        self.step = None
        for remove in self._optimizers.values():
            remove()

    def on_forward(self) -> None:
        if torch.is_grad_enabled():  # else it is an evaluation
            self.note("forward")

    def on_forwarded(self, outputs: object) -> None:
        for tensor in find_tensors(outputs):
            # A leaf may be a parameter, which would keep the hook forever.
            if tensor.grad_fn is not None:
                tensor.register_hook(self._on_backward)

    def _on_backward(self, gradient: torch.Tensor) -> None:
        # Only the first output that autograd reaches begins the pass.
        if self.step is not None and not self._in_backward:
            self.note("backward")
            # A pass under no_sync() launches nothing, so autograd must report its end.
            torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)

    def _on_backward_end(self) -> None:
        if self._in_backward:
            self.note("over")

    def on_launch(self, bucket: Bucket) -> None:
        if self.step is not None:
            # A launch after these events shows a backward pass whose begin was not noted.
            self._in_backward |= self.step.events[-1][0] in ("begin", "over", "stepped")
            self.step.events.append(("launch", None))

    def on_agree(self) -> None:
        self.note("wait")

    def on_agreed(self) -> None:
        self.note("waited")

    def on_wait(self, bucket: Bucket) -> None:
        # Only waits during backward, as with PowerSGD; later ones are part of the final wait.
        if self.step is not None and not self.step.launched:
            self.note("wait")

    def on_waited(self, bucket: Bucket) -> None:
        if self.step is not None and not self.step.launched:
            self.note("waited")

    def on_all_launched(self) -> None:
        self.note("all launched")
        if self.step is not None:
            self.step.launched = True

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer not in self._optimizers:
            # Weak, and removed with this recorder, since the optimizer may outlive the Reducer.
            hook = partial(_note_step, weakref.WeakMethod(self.note))
            handle = optimizer.register_step_post_hook(hook)
            self._optimizers[optimizer] = weakref.finalize(self, handle.remove)


def _note_step(note: "weakref.WeakMethod[Callable[[str], None]]", *arguments: object) -> None:
    if (found := note()) is not None:
        found("stepped")


class Watched(Protocol):
    """What a timeline needs of a Reducer, which this module cannot import: it imports `watch`."""

    module: torch.nn.Module
    process_group: dist.ProcessGroup | None
    device: torch.device
    iteration: int

    @property
    def buckets(self) -> Layout: ...
    @property
    def bucket_cap_mb(self) -> Any: ...
    def stats(self) -> Any: ...
    def add_extension(self, extension: Extension) -> None: ...
    def remove_extension(self, extension: Extension) -> None: ...


class BucketRecorder(Recorder):
    """Also records each gradient and each bucket, in the steps after the first `skip` averages.

    With `bucket_cap_mb="auto"` the count starts after its trials, which are not typical steps.
    `at_average` is called after each average with the number of averages so far.
    """

    def __init__(self, reducer: Watched, skip: int, at_average: Callable[[int], None]) -> None:
        super().__init__(reducer.device)
        self.steps: list[StepMarks] = []  # the last one is incomplete
        self._reducer, self._at_average = reducer, at_average
        self._skip, self.first = skip, reducer.iteration + skip
        averaged = {name for bucket in reducer.buckets for name in bucket}
        parameters = {n: p for n, p in reducer.module.named_parameters() if n in averaged}
        # By id, since `_Arrivals` records parameters, not names.
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._arrivals = _Arrivals(parameters, self.marks.take)
        reducer.add_extension(self)
        self._begin(reducer.iteration)

    def _begin(self, iteration: int) -> None:
        self.step, self._arrivals.found = None, []
        if iteration >= self.first and self._reducer.bucket_cap_mb is not None:
            step = StepMarks(iteration, self._reducer.buckets, self._arrivals.found)
            self.steps.append(step)
            self.begin(step)

    def close(self) -> None:
        super().close()
        self._reducer.remove_extension(self)
        for handle in self._arrivals.handles:
            handle.remove()

    def complete(self) -> list[StepMarks]:
        """Returns the averaged steps, each from its forward pass to its optimizer's end."""
        found = []
        for step, following in pairwise(self.steps):
            events = step.events[_opening(step) :] + following.events[: _opening(following)]
            arrived = list(step.arrived)
            arrived[::2] = [self._names[id(parameter)] for parameter in arrived[::2]]
            found.append(replace(step, events=events, arrived=arrived))
        return found

    def _mark(self, bucket: Bucket, moment: str) -> None:
        if self.step is not None:
            moments = self.step.buckets.setdefault(bucket.index(), {})
            moments[moment] = self.marks.take()

    def on_forwarded(self, outputs: object) -> None:
        if torch.is_grad_enabled():
            self.note("forwarded")
        super().on_forwarded(outputs)

    def on_launch(self, bucket: Bucket) -> None:
        super().on_launch(bucket)
        self._mark(bucket, "pack")

    def on_launched(self, bucket: Bucket) -> None:
        self._mark(bucket, "launched")
        if self.step is not None:
            moments, take = self.step.buckets[bucket.index()], self.marks.take
            moments["landed"] = None  # so that another thread only replaces it while we read
            # No reference to this recorder, since the group's thread may keep the callback.
            bucket.when_landed(lambda: moments.update(landed=take()))

    def on_wait(self, bucket: Bucket) -> None:
        super().on_wait(bucket)
        # A hook with one bucket in flight at a time makes two calls, of which the first counts.
        if self.step is not None and "wait" not in self.step.buckets.get(bucket.index(), {}):
            self._mark(bucket, "wait")

    def on_waited(self, bucket: Bucket) -> None:
        self._mark(bucket, "unpack")
        if self.step is not None:
            moments = self.step.buckets[bucket.index()]
            moments.setdefault("waited", moments["unpack"])
        super().on_waited(bucket)

    def on_finished(self, iteration: int, bucket: Bucket, takes_part: bool) -> None:
        self._mark(bucket, "unpacked")

    def on_average(self, iteration: int, takes_part: bool) -> None:
        self.note("averaged")
        if self._reducer.bucket_cap_mb is None:
            # The next average is a trial, too.
            self.first = iteration + 1 + self._skip
        self._begin(iteration)
        self._at_average(iteration)

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        super().on_step(optimizer)
        self.note("step")


def _opening(step: StepMarks) -> int:
    # Earlier events belong to the previous step's optimizer.
    opens = ("forward", "launch", "all launched")
    places = (place for place, (event, _) in enumerate(step.events) if event in opens)
    return next(places, len(step.events))


class _Arrivals:
    """Takes a mark as soon as a gradient is computed.

    Apart from the recorder, since the garbage collector sees no cycle through a parameter's hooks.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], take: Callable[[], Mark]) -> None:
        self.found: list[Any] = []  # a parameter and a mark for each gradient
        self._take = take
        trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
        self.handles = [p.register_post_accumulate_grad_hook(self._note) for p in trained]
        for handle in self.handles:
            hooks = handle.hooks_dict_ref()
            # Run before the Reducer's, which packs. `move_to_end` has no effect on autograd.
            for number in [number for number in hooks if number != handle.id]:
                hooks[number] = hooks.pop(number)

    def _note(self, parameter: torch.Tensor) -> None:
        self.found += parameter, self._take()
