"""Finds the first loss that is not finite, without a step that waits for its GPU."""

import torch

from ddp_from_scratch import gpu

# An event as one number, so that a MAX over ranks leaves the earliest step, and of that the lowest
# rank; 0 is none.
_STEPS, _RANKS = 2**42, 2**20


def as_number(step: int, rank: int) -> int:
    """The event "at this step on this rank"."""
    return (_STEPS - step) * _RANKS - rank


def from_number(number: int) -> tuple[int, int]:
    """The step and the rank that `as_number` was given."""
    steps, rank = divmod(-number, _RANKS)
    return _STEPS + steps, rank


def place_of(number: int, steps_per_epoch: int) -> str:
    """An event in words, with its epoch and step counted from 1."""
    step, rank = from_number(number)
    epoch, step = divmod(step, steps_per_epoch)
    return f"in epoch {epoch + 1}, step {step + 1}/{steps_per_epoch}, on rank {rank}"


class LossWatch:
    """Remembers the first step whose loss was not finite."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._first = torch.zeros((), dtype=torch.int64, device=device)
        # On a GPU, a copy in the host's memory that lags behind by as many steps as the host runs
        # ahead. Pinned, so that the copy is asynchronous; the event marks its end.
        self._arrived: torch.Tensor | None = None
        self._event: torch.Event | None = None
        if gpu.is_gpu(device):
            self._arrived = torch.zeros((), dtype=torch.int64, pin_memory=True)
            self._event = torch.Event(device)

    def see(self, loss: torch.Tensor, step: int) -> None:
        """Looks at a loss of this step, a tensor without dimensions."""
        here = as_number(step, self._rank) * loss.detach().isfinite().logical_not()
        self._first = torch.maximum(self._first, here)
        # One copy at a time: while the last is on its way, this step's find waits for a later one.
        if self._arrived is not None and self._event is not None and self._event.query():
            self._arrived.copy_(self._first, non_blocking=True)
            self._event.record()

    def known(self) -> int:
        """`as_number` of the first such step, as far as it has arrived, or 0. Does not wait."""
        return int(self._first if self._arrived is None else self._arrived)

    def settled(self) -> int:
        """`as_number` of the first such step of all, or 0. Waits for the GPU."""
        return int(self._first)
