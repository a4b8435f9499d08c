"""Tells when parameters are stepped on gradients that no average has touched."""

import warnings
import weakref
from collections.abc import Callable
from operator import attrgetter
from types import NoneType
from typing import NamedTuple

import torch
import torch.distributed as dist

from ddp_from_scratch.common.errors import shortened
from ddp_from_scratch.core.comm_hooks import average
from ddp_from_scratch.core.gradient_errors import taken_gradient
from ddp_from_scratch.core.observer import Check, Observer
from ddp_from_scratch.core.reducer import CoreReducer
from ddp_from_scratch.sync.check_sync import DriftCheck

_version = attrgetter("_version")  # mapped over all parameters, so not a Python function
# `StepsInHooks` looks at the second backward pass, and then at every tenth. In the first one the
# ranks' parameters are compared (`_FirstAverage` in checks.py).
_EVERY = 10


class _Step(NamedTuple):
    """An optimizer's last step, and the first gradient that it read."""

    iteration: int
    gradient: Callable[[], torch.Tensor | None]  # weak
    version: int

    @classmethod
    def of(cls, iteration: int, gradient: torch.Tensor | None) -> "_Step":
        if gradient is None:
            return cls(iteration, NoneType, 0)
        return cls(iteration, weakref.ref(gradient), gradient._version)

    def has_new(self, iteration: int, gradient: torch.Tensor | None) -> bool:
        """True if the gradient has changed since this step, but not by an average."""
        if gradient is None or iteration != self.iteration:
            return False
        return self.gradient() is not gradient or self.version != gradient._version


class LocalSteps(Observer):
    """Warns at the first step with local gradients; raises after each of them with `check_every`.

    A gradient is local if a backward pass under `no_sync()` was the last to add to it, or if there
    has been no average since the optimizer's last step but `.grad` has other values, as after
    `torch.autograd.grad`. A closure may run backward, so this looks after the step.
    """

    def attach(self, reducer: CoreReducer) -> None:
        super().attach(reducer)
        self._last = weakref.WeakKeyDictionary[torch.optim.Optimizer, _Step]()
        self._has_warned = False
        # An earlier Reducer may have averaged what was there when this one was made.
        self._new = {i for i, p in enumerate(reducer.parameters) if p.grad is None}

    def on_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        reducer: CoreReducer = self._reducer()
        last, gradient = self._last.get(optimizer), self._first_gradient(optimizer)
        self._last[optimizer] = _Step.of(reducer.iteration, gradient)
        if local := reducer.average.local:
            self._look(optimizer, local, "came from a backward pass under no_sync()")
        elif reducer.iteration == 0 if last is None else last.has_new(reducer.iteration, gradient):
            # An average that the program has scaled or clipped once more is new, too.
            is_average = reducer.iteration > 0 and last is not None and last.gradient() is gradient
            indices = set(range(len(reducer.parameters))) if last is not None else self._new
            self._look(optimizer, indices, "came from no backward pass", may_raise=not is_average)

    def _first_gradient(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
        ids = self._reducer().hooks.ids
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in ids and parameter.grad is not None:
                    gradient: torch.Tensor = parameter.grad
                    return gradient
        return None

    def on_set_step(self) -> None:
        self._last.clear()  # iterations are counted from another number

    def _look(
        self, optimizer: torch.optim.Optimizer, indices: set[int], why: str, may_raise: bool = True
    ) -> None:
        """Tells if the optimizer has stepped one of these parameters, unless all were zero."""
        reducer: CoreReducer = self._reducer()
        drift = reducer.observer(DriftCheck)
        raises = may_raise and drift is not None and not drift.advice  # the program's `check_every`
        if self._has_warned and not raises:
            return  # on a GPU, the host would wait for the gradients
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        names = [
            reducer.names[index]
            for index in sorted(indices)
            if id(parameter := reducer.parameters[index]) in stepped and _is_nonzero(parameter.grad)
        ]
        if not names or dist.get_world_size(reducer.process_group) == 1:
            return
        text = (
            f"{type(optimizer).__name__} has stepped on rank {reducer.rank} on gradients that were "
            f"not averaged, so ranks drift apart: those of {shortened(names)} {why}. Run the last "
            f"backward pass before a step outside of no_sync(), or call "
            f"reducer.average_gradients() before the step. If each rank is meant to step on its "
            f"own, as in local SGD, or the program averages by itself, use local_steps=True"
        )
        if raises:
            raise RuntimeError(text)
        self._has_warned = True
        warnings.warn(text, stacklevel=5)  # where the program calls step()


class StepsInHooks(Check):
    """Raises if the program's hooks step parameters, or take gradients, during backward.

    Such a hook may run after ours, which has sent the gradient already. torch does not count writes
    to `parameter.data`, so those are missed unless the hook takes the gradient, too. A comm hook
    may step what it has averaged, so it is not looked at.
    """

    def attach(self, reducer: CoreReducer) -> None:
        super().attach(reducer)
        self._before: list[int] | None = None  # the parameters' versions when the pass began

    def on_begin(self) -> None:
        reducer: CoreReducer = self._reducer()
        looks = reducer.iteration % _EVERY == 1 and reducer.comm.hook is average
        self._before = [*map(_version, reducer.parameters)] if looks else None

    def verdict(self) -> RuntimeError | None:
        reducer: CoreReducer = self._reducer()
        before, self._before = self._before, None
        if before is None:
            return None
        taken = set[int]().union(*(bucket.taken() for bucket in reducer.flat_buckets))
        if taken:
            return taken_gradient(reducer.names[min(taken)], reducer.rank)
        now = [*map(_version, reducer.parameters)]
        if now == before:
            return None
        rows = zip(reducer.names, before, now, strict=True)
        written = [name for name, then, this in rows if then != this]
        return RuntimeError(
            f"{shortened(written)} changed during the backward pass on rank {reducer.rank}, before "
            f"the gradients were averaged: a hook of the program writes to parameters. Step when "
            f"backward() has returned; if each rank is meant to step on its own gradients, use "
            f"local_steps=True"
        )

    def on_abort(self) -> None:
        self._before = None


def _is_nonzero(gradient: torch.Tensor | None) -> bool:
    if gradient is None:
        return False
    # Some programs step once on zeros to make an optimizer's state.
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(values.any())
