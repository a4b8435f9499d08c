"""Extensions, through which every option hooks into a Reducer."""

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ddp_from_scratch.core.bucket import Bucket


class Extension:
    """An object that a Reducer calls in each phase of a step. Its methods do nothing here.

    A Reducer calls only methods that a class overrides, so an option costs nothing in the other
    phases. Extensions are called in the order in which they were added.

    - layout: `on_layout` is called when buckets, extensions or `ready_order` have changed.
    - forward: `on_forward` and `on_forwarded` are called before and after each forward pass of the
      module, with or without gradients.
    - ready: `on_gradient` says that a parameter has its gradient in `.grad`, also under
      `no_sync()`. `check_gradient` raises if the bucket cannot hold this gradient, which is sparse,
      has a graph of its own, or could not be packed.
    - launch: `on_begin` is called when a backward pass has its first gradient. `on_launch` is
      called before a bucket is packed, `on_packed` before the comm hook, `on_launched` after it or
      after an error, and `on_agree` and `on_agreed` before and after a wait for the weights of all
      ranks.
    - end: if an exception has ended the pass, `on_break` is called before `backward()` raises it.
      `on_all_launched` may return an error for `backward()` to raise; this rank then unpacks
      nothing.
    - wait: `on_wait` and `on_waited` are called around the wait for a bucket. If it failed,
      the bucket is not LANDED. A comm hook that allows one bucket in flight adds an empty wait.
    - unpack: `on_finished` is called when the averages of a bucket are in `.grad`.
    - averaged: `on_average` is called on every rank; iteration 1 is the first. `takes_part` is
      False without data inside `join()`, and if `backward()` is about to raise. `error` returns
      the error that `backward()` must raise on this rank.
    - between: `on_step` is called before an optimizer steps a parameter, `on_stepped` after it
      unless it has raised, `on_set_step` before the first step of new ranks, `on_abort` when a step
      is dropped, `remove` when the Reducer is removed from its module.

    `on_all_launched` and `on_average` may communicate: every rank calls them. `on_set_step` and
    `on_abort` must not. What only one extension may answer is in `policies.py`.
    """

    def attach(self, reducer: Any) -> None:
        """Called first, when the Reducer has its buckets. `self._of()` is that Reducer."""
        # Weak, because the Reducer holds this object.
        self._of: Callable[[], Any] = weakref.ref(reducer)

    def on_layout(self) -> None: ...
    def on_forward(self) -> None: ...
    def on_forwarded(self, outputs: object) -> None: ...
    def on_gradient(self, index: int) -> None: ...
    def check_gradient(self, index: int, gradient: torch.Tensor | None, bucket: Bucket) -> None: ...
    def on_begin(self) -> None: ...
    def on_launch(self, bucket: Bucket) -> None: ...
    def on_agree(self) -> None: ...
    def on_agreed(self) -> None: ...
    def on_packed(self, bucket: Bucket) -> None: ...
    def on_launched(self, bucket: Bucket) -> None: ...
    def on_break(self, number: int) -> None: ...
    def on_all_launched(self) -> RuntimeError | None: ...
    def on_wait(self, bucket: Bucket) -> None: ...
    def on_waited(self, bucket: Bucket) -> None: ...
    def on_finished(self, iteration: int, bucket: Bucket, takes_part: bool) -> None: ...
    def on_average(self, iteration: int, takes_part: bool) -> None: ...
    def error(self) -> RuntimeError | None:
        return None

    def on_step(self, optimizer: torch.optim.Optimizer) -> None: ...
    def on_stepped(self, optimizer: torch.optim.Optimizer) -> None: ...
    def on_set_step(self) -> None: ...
    def on_abort(self) -> None: ...
    def remove(self) -> None: ...


# The methods that a Reducer calls if an extension overrides them.
METHODS = [name for name in vars(Extension) if not name.startswith("__") and name != "attach"]

Kind = TypeVar("Kind", bound=Extension)


class Extensible:
    """Calls extensions, in the order in which they were added."""

    def __init__(self) -> None:
        self.extensions: list[Extension] = []
        # By phase, the methods that extensions override.
        self.calls: dict[str, list[Callable[..., Any]]] = {name: [] for name in METHODS}

    def add_extension(self, extension: Extension, first: bool = False) -> None:
        """Starts to call this extension."""
        extension.attach(self)
        self.extensions.insert(0 if first else len(self.extensions), extension)
        self._collect_calls()

    def remove_extension(self, extension: Extension) -> None:
        """Stops calling this extension."""
        self.extensions.remove(extension)
        self._collect_calls()

    def _collect_calls(self) -> None:
        # New lists, since extensions are added and removed in the middle of a phase.
        self.calls = {
            name: [
                getattr(extension, name)
                for extension in self.extensions
                if getattr(type(extension), name) is not getattr(Extension, name)
            ]
            for name in METHODS
        }
        self.layout_changed()

    def layout_changed(self) -> None:
        """Tells the extensions that buckets, extensions or `ready_order` have changed."""
        for call in self.calls["on_layout"]:
            call()

    def extension(self, kind: type[Kind]) -> Kind | None:
        """Returns the extension of this type, or None."""
        for extension in self.extensions:
            if isinstance(extension, kind):
                return extension
        return None
