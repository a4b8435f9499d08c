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

    def begin(self, at_end: Callable[[], None]) -> None:
        """Lets autograd call `at_end` when the pass is over. Idempotent within it."""
        if not self.is_this:
            self._number = torch._C._current_graph_task_id()
            torch.autograd.Variable._execution_engine.queue_callback(at_end)

    def end(self) -> bool:
        """Called at its end; False if that has been done already."""
        ended = self.begun
        self._number = -1
        return ended
