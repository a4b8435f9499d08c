"""A future for comm hooks that start a collective after another one."""

from collections.abc import Callable
from typing import Any

import torch


class Later(torch.futures.Future[Any]):
    """A future whose value is computed by the thread that waits for it."""

    def __init__(self, compute: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self._compute = compute
        self._value: torch.Tensor | None = None

    # A callback of the first collective would be simpler, but not every backend can start a
    # collective inside a callback.
    def wait(self) -> torch.Tensor:
        """Computes the value the first time."""
        if self._value is None:
            self._value = self._compute()
        return self._value

    def value(self) -> torch.Tensor:
        """Returns the result of `wait`."""
        return self.wait()

    def then(self, callback: Callable[[Any], Any]) -> "Later":
        """Returns a future that runs `callback` when it is waited for."""
        return Later(lambda: callback(self))
