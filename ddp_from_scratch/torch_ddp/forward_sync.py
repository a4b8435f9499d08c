"""Lets a forward pass decide, too, whether its gradients are averaged, as in torch's class."""

import weakref
from functools import partial
from typing import Any

import torch

from ddp_from_scratch.core.hooks import current_pass
from ddp_from_scratch.core.observer import Observer
from ddp_from_scratch.options.unused import find_tensors


class ForwardSync(Observer):
    """Keeps the gradients of a forward pass under `no_sync()` local, wherever backward runs.

    A backward pass averages if it is outside of `no_sync()`, and so was the last forward pass with
    gradients. A forward pass whose backward also ran inside has no say in later ones: calls of
    submodules, which no hook sees, may follow.

    Attributes:
        required: False inside `no_sync()`; torch's `require_backward_grad_sync`.
        has_begun: True after the first forward pass with gradients that averages.
    """

    def __init__(self) -> None:
        self.required: bool = True
        self.has_begun: bool = False
        # One for each forward pass under `no_sync()` since the last one outside. A backward pass
        # under `no_sync()` removes that of its graph.
        self._local: set[object] = set()

    def set_required(self, required: bool) -> None:
        """Sets `required`. Every rank must call it."""
        self.required = required
        self._update()

    def begin_forward(self) -> None:
        """Forgets earlier forward passes if this one has gradients and averages. Idempotent."""
        # Activation checkpointing recomputes forward passes inside backward.
        if self.required and torch.is_grad_enabled() and current_pass() == -1:
            self.has_begun = True
            self.average_next()

    on_forward = begin_forward

    def average_next(self) -> None:
        """Lets the next backward pass average, unless it runs under `no_sync()`."""
        if self._local:
            self._local.clear()
            self._update()

    def on_forwarded(self, outputs: object) -> None:
        if self.required or not torch.is_grad_enabled() or current_pass() != -1:
            return
        # Transforms of torch.func accumulate nothing.
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return
        mark = object()
        nodes = {t.grad_fn for t in find_tensors(outputs) if t.grad_fn is not None}
        for node in nodes:
            # Weak, so that a graph does not keep this object alive.
            node.register_prehook(partial(_enter, weakref.ref(self), mark))
        if nodes:
            self._local.add(mark)

    def enter(self, mark: object) -> None:
        """Backward enters the graph of a forward pass that ran under `no_sync()`."""
        if not self.required:
            self._local.discard(mark)

    def _update(self) -> None:
        self._reducer().set_sync(self.required and not self._local)


def _enter(found: "weakref.ref[ForwardSync]", mark: object, _gradients: Any) -> None:
    if (forward_sync := found()) is not None:
        forward_sync.enter(mark)
