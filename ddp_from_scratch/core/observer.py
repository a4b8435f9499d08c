"""Observers, through which most options hook into a Reducer.

Options that are not phases of a step have other places: comm hooks and the group that sends in
`CommConfig`, sparse gradients in `Layout`, weights in `CoreReducer.set_weight`, and optimizers that
step during backward in `CoreReducer.step_in_backward`.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import torch

from ddp_from_scratch.core.bucket import Bucket


class Observer:
    """An object that a Reducer tells of each phase of a step. Its methods do nothing here.

    A Reducer calls only methods that a class overrides, so an option costs nothing in the other
    phases. It calls observers in the order in which they were added. Their methods return nothing;
    for decisions a Reducer asks a `Check` (below) and the classes in `policies.py`.

    - forward: `on_forward` and `on_forwarded` are called before and after each forward pass of the
      module, with or without gradients.
    - ready: `on_gradient` is called when a parameter has its gradient in `.grad`, also under
      `no_sync()`.
    - launch: `on_launch` is called before a bucket is packed (a `ViewBucket` may have packed large
      gradients already, and their `.grad` is None), `on_packed` when a bucket has all gradients,
      before it is sent. A sparse bucket has no `buffer()`.
    - unpack: `on_unpacked` is called for every bucket. If this rank takes part, its averages are in
      `.grad`. `iteration` is the number of averages before this one.
    - averaged: `on_average` is called on every rank; `iteration` counts this average, too.
      `takes_part` is False without data inside `join()`, and if a `verdict` is an error.
    - between: `on_step` is called before an optimizer steps a parameter, `on_stepped` after it
      unless it has raised, `on_set_step` before the first step of new ranks, `on_abort` when a step
      is dropped, `remove` when the Reducer is removed from its module.

    `on_average` may communicate: every rank calls it. The others must not. During backward the
    Reducer holds a lock in `on_begin`, `on_launch`, `on_packed` and `on_launched`, so they must not
    add or remove observers. Doing so in the last three raises, as do `missing()` and `no_sync()`
    there and in a comm hook. A class that overrides `on_packed` makes one rank pack, too.
    """

    def attach(self, reducer: Any) -> None:
        """Called first, when the Reducer has its buckets. `self._reducer()` is that Reducer."""
        # Weak, because the Reducer holds this object.
        self._reducer: Callable[[], Any] = weakref.ref(reducer)

    def on_forward(self) -> None: ...
    def on_forwarded(self, outputs: object) -> None: ...
    def on_gradient(self, index: int) -> None: ...
    def on_launch(self, bucket: Bucket) -> None: ...
    def on_packed(self, bucket: Bucket) -> None: ...
    def on_unpacked(self, iteration: int, bucket: Bucket, takes_part: bool) -> None: ...
    def on_average(self, iteration: int, takes_part: bool) -> None: ...
    def on_step(self, optimizer: torch.optim.Optimizer) -> None: ...
    def on_stepped(self, optimizer: torch.optim.Optimizer) -> None: ...
    def on_set_step(self) -> None: ...
    def on_abort(self) -> None: ...
    def remove(self) -> None: ...


class Tracer(Observer):
    """An observer that measures times: it is told of the begin and the end of each phase.

    A comm hook that allows one bucket in flight makes two waits for a bucket. If a wait has failed,
    the bucket is not LANDED.
    """

    def on_launched(self, bucket: Bucket) -> None:
        """Called after the comm hook, or after an error between `on_launch` and its return."""

    def on_all_launched(self) -> None:
        """Called when this rank has launched all buckets, before it checks or waits."""

    def on_wait(self, bucket: Bucket | None) -> None:
        """Called before a wait for a bucket, or (None) for the weights of all ranks."""

    def on_waited(self, bucket: Bucket | None) -> None:
        """Called after that wait, also if it has failed."""


class Check(Observer):
    """An observer that decides whether `backward()` raises on this rank."""

    def on_begin(self) -> None:
        """Called when a backward pass has its first gradient."""

    def verdict(self) -> RuntimeError | None:
        """Returns an error for `backward()` to raise; this rank then unpacks nothing.

        Every rank calls it when all buckets are launched, so it may communicate. All checks are
        asked. Of several errors the last one counts, before any that the Reducer itself has found.
        """
        return None

    def late_verdict(self) -> RuntimeError | None:
        """Returns what `backward()` must raise after the average, although `.grad` is right.

        All checks are asked. Of several errors the first one counts, after that of `verdict`.
        """
        return None


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

Void: TypeAlias = list[Callable[[], None]]
OfBucket: TypeAlias = list[Callable[[Bucket], None]]
OfOptimizer: TypeAlias = list[Callable[[torch.optim.Optimizer], None]]
Verdicts: TypeAlias = list[Callable[[], RuntimeError | None]]


class Calls:
    """The methods that observers override, by the method: a list of bound ones for each."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self.on_forward: Void = overriding(Observer.on_forward, observers)
        self.on_forwarded: list[Callable[[object], None]] = overriding(
            Observer.on_forwarded, observers
        )
        self.on_gradient: list[Callable[[int], None]] = overriding(Observer.on_gradient, observers)
        self.on_launch: OfBucket = overriding(Observer.on_launch, observers)
        self.on_packed: OfBucket = overriding(Observer.on_packed, observers)
        self.on_unpacked: list[Callable[[int, Bucket, bool], None]] = overriding(
            Observer.on_unpacked, observers
        )
        self.on_average: list[Callable[[int, bool], None]] = overriding(
            Observer.on_average, observers
        )
        self.on_step: OfOptimizer = overriding(Observer.on_step, observers)
        self.on_stepped: OfOptimizer = overriding(Observer.on_stepped, observers)
        self.on_set_step: Void = overriding(Observer.on_set_step, observers)
        self.on_abort: Void = overriding(Observer.on_abort, observers)
        self.remove: Void = overriding(Observer.remove, observers)
        self.on_launched: OfBucket = overriding(Tracer.on_launched, observers)
        self.on_all_launched: Void = overriding(Tracer.on_all_launched, observers)
        self.on_wait: list[Callable[[Bucket | None], None]] = overriding(Tracer.on_wait, observers)
        self.on_waited: list[Callable[[Bucket | None], None]] = overriding(
            Tracer.on_waited, observers
        )
        self.on_begin: Void = overriding(Check.on_begin, observers)
        self.verdict: Verdicts = overriding(Check.verdict, observers)
        self.late_verdict: Verdicts = overriding(Check.late_verdict, observers)


def overriding(
    method: Callable[Concatenate[Any, Arguments], Result], observers: Sequence[Observer]
) -> list[Callable[Arguments, Result]]:
    """Returns this method, bound, of each observer whose class overrides it."""
    name = method.__name__
    return [
        getattr(observer, name)
        for observer in observers
        if getattr(type(observer), name, method) is not method
    ]
