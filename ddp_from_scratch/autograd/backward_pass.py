"""The backward pass that is under way, and that will tell when it is over."""

from collections.abc import Callable

import torch


class BackwardPass:
    """One pass at a time, from `begin` to `end`.

    Known by autograd's number of it, so that a pass that was broken off by an exception, which
    never came to its end, is not taken for the next.
    """

    def __init__(self) -> None:
        self._number = -1

    @property
    def begun(self) -> bool:
        """Whether one has begun and not ended: it is under way, or was broken off."""
        return self._number != -1

    @property
    def is_this(self) -> bool:
        """Whether the pass that autograd is executing is the one that has begun."""
        return self.begun and self._number == torch._C._current_graph_task_id()

    def begin(self, at_end: Callable[[], None], broken_off: Callable[[], None]) -> None:
        """Lets autograd call `at_end` when the pass is over. Idempotent within it.

        Where an exception breaks the pass off, `broken_off` is called instead, before
        `backward()` raises.
        """
        number = torch._C._current_graph_task_id()
        if self._number != number:
            self._number = number
            callback = _Callback(at_end, broken_off)
            torch.autograd.Variable._execution_engine.queue_callback(callback)

    def end(self) -> bool:
        """Called at its end; False if that has been done already."""
        ended = self.begun
        self._number = -1
        return ended


class _Callback:
    """Autograd calls it at the end of a pass; of one that is broken off it only lets go of it."""

    def __init__(self, at_end: Callable[[], None], broken_off: Callable[[], None]) -> None:
        self._at_end, self._broken_off = at_end, broken_off
        self._called = False

    def __call__(self) -> None:
        self._called = True
        self._at_end()

    def __del__(self) -> None:
        if not self._called:
            self._broken_off()
