"""Records the moments of training steps on one rank."""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddp_from_scratch.core.bucket import Bucket
from ddp_from_scratch.core.extension import Extension
from ddp_from_scratch.core.hooks import Handle, ModuleHook
from ddp_from_scratch.marks import Marks
from ddp_from_scratch.options.unused import find_tensors
from ddp_from_scratch.reducer import Reducer

Mark = Any  # see `Marks`


@dataclass
class BucketMarks:
    """Moments of one bucket; None for what did not happen."""

    index: int
    pack: Mark = None
    launched: Mark = None
    landed: Mark = None
    wait: Mark = None
    waited: Mark = None
    unpacked: Mark = None
    unpack: Mark = None


@dataclass
class StepMarks:
    """Moments of one step, from its first forward pass to the end of the optimizer's step.

    Attributes:
        iteration: the number of averages before this one.
        layout: the parameters of each bucket, by name, in the order of launch.
        forward: a begin and an end for each forward pass, in one list.
        backward: the begin of each backward pass.
        arrived: a parameter and a moment for each gradient, in one list.
        backward_end: when all buckets were launched.
        averaged: when every `.grad` was the average.
        optimizer: begin and end.
    """

    iteration: int
    layout: tuple[tuple[str, ...], ...]
    forward: list[Mark] = field(default_factory=list)
    backward: list[Mark] = field(default_factory=list)
    arrived: list[Any] = field(default_factory=list)
    buckets: dict[int, BucketMarks] = field(default_factory=dict)
    backward_end: Mark = None
    averaged: Mark = None
    optimizer: list[Mark] = field(default_factory=list)


class _Arrivals:
    """Takes a mark as soon as a gradient is computed.

    Apart from the `Recorder`, as short as can be: a model may have a thousand gradients in a step.
    And the garbage collector cannot see a cycle through a parameter's hooks.

    Attributes:
        found: a parameter and a mark for each gradient, in one list.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], take: Callable[[], Mark]) -> None:
        self.found: list[Any] = []
        self._take = take
        # Of a frozen parameter there is no gradient.
        self.handles = [_hook_first(p, self._note) for p in parameters if p.requires_grad]

    def _note(self, parameter: torch.Tensor) -> None:
        self.found += parameter, self._take()


def _hook_first(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Handle:
    """Calls a hook before those that are there: the Reducer's packs the gradient."""
    handle: Handle = parameter.register_post_accumulate_grad_hook(hook)
    hooks: dict[int, Any] | None = handle.hooks_dict_ref()
    assert hooks is not None, "the parameter holds them"
    # Not `move_to_end`: autograd goes through them in the order in which they were put in.
    for number in [number for number in hooks if number != handle.id]:
        hooks[number] = hooks.pop(number)
    return handle


class Recorder(Extension):
    """Takes a mark at each event of the steps after the first `skip` averages.

    An observer and hooks of its own: a Reducer without a recorder runs none of this.

    Args:
        reducer: of the module to watch.
        marks: the clock.
        skip: averages before the first recorded step, counted from when `bucket_cap_mb="auto"` has
            settled: the trials are no typical steps.
        at_average: called after each average with the number of averages so far.

    Attributes:
        first: the number of averages before the first recorded step; it grows while "auto" tries.
        steps: the recorded steps, the last of which may be under way.
    """

    def __init__(
        self, reducer: Reducer, marks: Marks, skip: int, at_average: Callable[[int], None]
    ) -> None:
        self.steps: list[StepMarks] = []
        self._reducer, self._take = reducer, marks.take
        self._at_average = at_average
        self._skip, self.first = skip, reducer.iteration + skip
        module, averaged = reducer.module, set(chain.from_iterable(reducer.buckets))
        # By id: a gradient's mark has the parameter.
        self._names = {id(p): n for n, p in module.named_parameters() if n in averaged}
        parameters = [p for p in module.parameters() if id(p) in self._names]
        self._arrivals = _Arrivals(parameters, self._take)
        # The last optimizer to step some of the Reducer's parameters.
        self._stepping: torch.optim.Optimizer | None = None
        self._handles = [
            *self._arrivals.handles,
            module.register_forward_pre_hook(ModuleHook(lambda *_: self._before_forward())),
            module.register_forward_hook(ModuleHook(lambda *a: self._after_forward(a[-1]))),
            register_optimizer_step_post_hook(partial(_call, weakref.WeakMethod(self._after_step))),
        ]
        # torch's own list of hooks outlives the model.
        weakref.finalize(self, self._handles[-1].remove)
        reducer.add_extension(self)

    def remove(self) -> None:
        """Stops recording."""
        self._reducer.remove_extension(self)
        for handle in self._handles:
            handle.remove()

    def complete(self) -> list[StepMarks]:
        """Returns the steps whose average is there, with names in place of parameters."""
        return [
            replace(step, arrived=self._named(step.arrived))
            for step in self.steps
            if step.averaged is not None
        ]

    def _named(self, arrived: list[Any]) -> list[Any]:
        names = [self._names[id(parameter)] for parameter in arrived[::2]]
        return list(chain.from_iterable(zip(names, arrived[1::2], strict=True)))

    # Around forward and backward ----------------------------------------------------------------

    def _begin(self) -> StepMarks | None:
        """Returns the step under way; begins one after an average. None before the first."""
        iteration = self._reducer.iteration
        if iteration < self.first or self._reducer.bucket_cap_mb is None:
            return None
        if not self.steps or self.steps[-1].averaged is not None:
            step = StepMarks(iteration, self._reducer.buckets, arrived=self._arrivals.found)
            self.steps.append(step)
        return self.steps[-1]

    def _before_forward(self) -> None:
        # Evaluation is not recorded.
        if torch.is_grad_enabled() and (step := self._begin()) is not None:
            # A pass that raised has no end. Nor has one that a checkpoint recomputes in part.
            del step.forward[len(step.forward) // 2 * 2 :]
            step.forward.append(self._take())

    def _after_forward(self, outputs: object) -> None:
        step = self.steps[-1] if self.steps else None
        if step is None or len(step.forward) % 2 == 0 or not torch.is_grad_enabled():
            return
        step.forward.append(self._take())
        begins = len(step.backward)
        for tensor in find_tensors(outputs):
            # Not on a leaf, which may be a parameter: its hooks would stay there for good.
            if tensor.grad_fn is not None:
                # Autograd's first call in this pass, from whichever output it begins.
                tensor.register_hook(partial(self._on_backward, step, begins))

    def _on_backward(self, step: StepMarks, begins: int, gradient: torch.Tensor) -> None:
        if len(step.backward) == begins:
            step.backward.append(self._take())

    # Of the Reducer -----------------------------------------------------------------------------

    def _of(self, bucket: Bucket) -> BucketMarks | None:
        if (step := self._begin()) is None:
            return None
        return step.buckets.setdefault(bucket.index(), BucketMarks(bucket.index()))

    def on_launch(self, bucket: Bucket) -> None:
        """Marks that packing begins."""
        if (found := self._of(bucket)) is not None:
            found.pack = self._take()

    def on_launched(self, bucket: Bucket) -> None:
        """Marks the launch, and later the moment when the average is there."""
        if (found := self._of(bucket)) is not None:
            found.launched = self._take()
            # Without this recorder: the group's thread may keep a callback for a while.
            bucket.when_landed(partial(_landed, found, self._take))

    def on_all_launched(self) -> None:
        """Marks the end of the backward pass."""
        if (step := self._begin()) is not None:
            step.backward_end = self._take()

    def on_wait(self, bucket: Bucket) -> None:
        """Marks that the main thread begins to wait."""
        # The first of two: that of a hook that has one bucket under way at a time.
        if (found := self._of(bucket)) is not None and found.wait is None:
            found.wait = self._take()

    def on_waited(self, bucket: Bucket) -> None:
        """Marks that it need not wait any longer."""
        if (found := self._of(bucket)) is not None:
            found.unpack = self._take()
            if found.waited is None:
                found.waited = found.unpack

    def on_finished(self, iteration: int, bucket: Bucket, takes_part: bool) -> None:
        """Marks that the averages are in `.grad`."""
        if (found := self._of(bucket)) is not None:
            found.unpacked = self._take()

    def on_average(self, iteration: int, takes_part: bool) -> None:
        """Marks the end of the average."""
        if self._reducer.bucket_cap_mb is None:
            # The next one is a trial, too.
            self.first = iteration + 1 + self._skip
        if self.steps and self.steps[-1].iteration == iteration - 1:
            self.steps[-1].averaged = self._take()
        self._arrivals.found = []
        self._at_average(iteration)

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Marks that an optimizer begins to step."""
        # Not `_begin`: `backward_and_step` comes here before its backward pass, others after it.
        self._stepping = optimizer
        if self.steps and not self.steps[-1].optimizer:
            self.steps[-1].optimizer.append(self._take())

    def _after_step(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        # torch calls this for all optimizers of the process. The last of several ends the step.
        if optimizer is self._stepping and self.steps and self.steps[-1].optimizer:
            self.steps[-1].optimizer[1:] = [self._take()]


def _call(method: "weakref.WeakMethod[Callable[..., None]]", *arguments: Any) -> None:
    if (found := method()) is not None:
        found(*arguments)


def _landed(found: BucketMarks, take: Callable[[], Mark]) -> None:
    found.landed = take()
