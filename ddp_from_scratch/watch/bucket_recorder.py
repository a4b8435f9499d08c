"""Records each gradient and each bucket of a step, too: what a timeline shows."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ddp_from_scratch.buckets.gradient_bucket import GradientBucket
from ddp_from_scratch.buckets.observer import Observer
from ddp_from_scratch.watch.recorder import Layout, Mark, Recorder, StepMarks


class Watched(Protocol):
    """What a timeline needs of a Reducer, which imports this room."""

    module: torch.nn.Module
    process_group: dist.ProcessGroup | None
    device: torch.device
    iteration: int

    @property
    def buckets(self) -> Layout: ...
    @property
    def bucket_cap_mb(self) -> Any: ...
    def stats(self) -> Any: ...
    def add_observer(self, observer: Observer) -> None: ...
    def remove_observer(self, observer: Observer) -> None: ...


class BucketRecorder(Recorder):
    """Records the steps after the first `skip` averages.

    The moments of a bucket: pack, launched, landed, wait, waited, unpack, unpacked.

    Args:
        reducer: of the module to watch.
        skip: averages before the first recorded step, counted from when `bucket_cap_mb="auto"` has
            settled: the trials are no typical steps.
        at_average: called after each average with the number of averages so far.

    Attributes:
        first: the number of averages before the first recorded step; it grows while "auto" tries.
        steps: the recorded steps, the last of which is under way.
    """

    def __init__(self, reducer: Watched, skip: int, at_average: Callable[[int], None]) -> None:
        super().__init__(reducer.device)
        self.steps: list[StepMarks] = []
        self._reducer, self._at_average = reducer, at_average
        self._skip, self.first = skip, reducer.iteration + skip
        averaged = {name for bucket in reducer.buckets for name in bucket}
        parameters = {n: p for n, p in reducer.module.named_parameters() if n in averaged}
        # By id: a gradient's mark has the parameter.
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._arrivals = _Arrivals(parameters, self.marks.take)
        reducer.add_observer(self)
        self._begin(reducer.iteration)

    def _begin(self, iteration: int) -> None:
        self.step, self._arrivals.found = None, []
        if iteration >= self.first and self._reducer.bucket_cap_mb is not None:
            step = StepMarks(iteration, self._reducer.buckets, self._arrivals.found)
            self.steps.append(step)
            self.begin(step)

    def remove(self) -> None:
        super().remove()
        self._reducer.remove_observer(self)
        for handle in self._arrivals.handles:
            handle.remove()

    def complete(self) -> list[StepMarks]:
        """Returns the steps that are averaged, from the first forward pass to the optimizer's end.

        With names in place of parameters.
        """
        found = []
        for step, following in pairwise(self.steps):
            events = step.events[_opening(step) :] + following.events[: _opening(following)]
            arrived = list(step.arrived)
            arrived[::2] = [self._names[id(parameter)] for parameter in arrived[::2]]
            found.append(replace(step, events=events, arrived=arrived))
        return found

    def _mark(self, bucket: GradientBucket, moment: str) -> None:
        if self.step is not None:
            moments = self.step.buckets.setdefault(bucket.index(), {})
            moments[moment] = self.marks.take()

    def on_forwarded(self, outputs: object) -> None:
        if torch.is_grad_enabled():
            self.note("forwarded")
        super().on_forwarded(outputs)

    def on_launch(self, bucket: GradientBucket) -> None:
        super().on_launch(bucket)
        self._mark(bucket, "pack")

    def on_launched(self, bucket: GradientBucket) -> None:
        self._mark(bucket, "launched")
        if self.step is not None:
            moments, take = self.step.buckets[bucket.index()], self.marks.take
            moments["landed"] = None  # another thread may set it while these are read
            # Without this recorder: the group's thread may keep a callback for a while.
            bucket.when_landed(lambda: moments.update(landed=take()))

    def on_wait(self, bucket: GradientBucket) -> None:
        super().on_wait(bucket)
        # The first of two: that of a hook that has one bucket under way at a time.
        if self.step is not None and "wait" not in self.step.buckets.get(bucket.index(), {}):
            self._mark(bucket, "wait")

    def on_waited(self, bucket: GradientBucket) -> None:
        self._mark(bucket, "unpack")
        if self.step is not None:
            moments = self.step.buckets[bucket.index()]
            moments.setdefault("waited", moments["unpack"])
        super().on_waited(bucket)

    def on_finished(self, iteration: int, bucket: GradientBucket, takes_part: bool) -> None:
        self._mark(bucket, "unpacked")

    def on_average(self, iteration: int, takes_part: bool) -> None:
        self.note("averaged")
        if self._reducer.bucket_cap_mb is None:
            # The next one is a trial, too.
            self.first = iteration + 1 + self._skip
        self._begin(iteration)
        self._at_average(iteration)

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        super().on_step(optimizer)
        self.note("step")


def _opening(step: StepMarks) -> int:
    # What comes before it is of the step before: its optimizer.
    opens = ("forward", "launch", "all launched")
    places = (place for place, (event, _) in enumerate(step.events) if event in opens)
    return next(places, len(step.events))


class _Arrivals:
    """Takes a mark as soon as a gradient is computed.

    Apart from the recorder, as short as can be: a model may have a thousand gradients in a step.
    And the garbage collector cannot see a cycle through a parameter's hooks.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], take: Callable[[], Mark]) -> None:
        self.found: list[Any] = []  # a parameter and a mark for each gradient
        self._take = take
        # Of a frozen parameter there is no gradient.
        trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
        self.handles = [p.register_post_accumulate_grad_hook(self._note) for p in trained]
        for handle in self.handles:
            hooks = handle.hooks_dict_ref()
            # Before those that are there: the Reducer's packs the gradient. Not `move_to_end`:
            # autograd goes through them in the order in which they were put in.
            for number in [number for number in hooks if number != handle.id]:
                hooks[number] = hooks.pop(number)

    def _note(self, parameter: torch.Tensor) -> None:
        self.found += parameter, self._take()
