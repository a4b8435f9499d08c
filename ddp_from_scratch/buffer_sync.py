"""A module's buffers, made equal on all ranks in the course of training."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch

from .broadcast import broadcast_buffers, send_tensors
from .reducer import Reducer


class BufferHook(NamedTuple):
    """Synchronises buffers in place of rank 0's.

    Attributes:
        state: handed to the hook.
        call: called with `state` and `{name: buffer}`; returns None or futures, which the end of
            backward waits for.
        before: whether it is called before the forward pass or after it.
    """

    state: Any
    call: Callable[[Any, dict[str, torch.Tensor]], Any]
    before: bool


class BufferSync:
    """Sends buffers around the forward passes that train and are synchronised.

    1. `before_forward`: one rank's buffers to all, or the hook's way of it.
    2. `after_forward`: the hook, if it wants to be called then.

    An evaluation sends nothing: one rank may evaluate alone.

    Args:
        reducer: of the module; says whether passes are synchronised, and on which ranks.
        enabled: False never sends any.
        ignore: names of buffers that are left alone.
        hook: in place of sending one rank's.
    """

    def __init__(
        self,
        reducer: Reducer,
        enabled: bool,
        ignore: Collection[str],
        hook: BufferHook | None = None,
    ) -> None:
        self._reducer, self._module = reducer, reducer.module
        self._enabled, self._ignore, self.hook = enabled, ignore, hook

    def will_send(self) -> bool:
        """Whether forward passes that train send buffers."""
        return self._enabled and any(True for _ in self._named())

    def before_forward(self, src: int) -> None:
        """Rank `src`'s buffers to all. Collective, where the module trains."""
        if not self._module.training or not self.will_send():
            return
        if self.hook is None:
            # An earlier forward pass may still need them for its backward; they may be the same.
            buffers = tuple(self._module.buffers())
            with torch.autograd._unsafe_preserve_version_counter(buffers):  # type: ignore[attr-defined]
                self.send(src)
        elif self.hook.before:
            self._run(self.hook)

    def after_forward(self) -> None:
        """Calls a hook that comes after forward. Collective."""
        if self.hook is not None and not self.hook.before and self._reducer.sync:
            self._run(self.hook)

    def send(self, src: int, tensors: Sequence[torch.Tensor] | None = None) -> None:
        """Rank `src`'s buffers, or these tensors, to all. Collective."""
        group = self._reducer.process_group
        if tensors is None:
            broadcast_buffers(self._module, src, group, self._ignore)
        else:
            send_tensors(list(tensors), src, group)

    def _named(self) -> Any:
        return ((n, b) for n, b in self._module.named_buffers() if n not in self._ignore)

    def _run(self, hook: BufferHook) -> None:
        futures = hook.call(hook.state, dict(self._named()))
        if futures is not None:
            self._reducer.futures += futures if isinstance(futures, list) else [futures]
