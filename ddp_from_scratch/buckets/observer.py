"""Observers of a Reducer: drift checks, stall reports, tuning, buffers, optimizers."""

import torch

from ddp_from_scratch.buckets.gradient_bucket import GradientBucket


class Observer:
    """Called by a Reducer at each step of an average; here each method does nothing.

    A Reducer holds a list of observers, empty unless an option asks for one.
    """

    def on_all_launched(self) -> None:
        """Every bucket of this average has been launched, on this rank."""

    def on_landed(self, iteration: int, bucket: GradientBucket) -> None:
        """The averages of this bucket are in `.grad`."""

    def on_average(self, iteration: int, takes_part: bool) -> None:
        """All buckets are unpacked and empty again. All ranks come to this: it may communicate.

        Args:
            iteration: the number of averages so far, 1 after the first.
            takes_part: False on a rank that has run out of data inside `join()`.
        """

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step some of the Reducer's parameters."""
