"""The interface of observers: buffers, tuning, drift checks, stalls, stragglers, timelines."""

import torch

from ddp_from_scratch.buckets.gradient_bucket import GradientBucket


class Observer:
    """An object that a Reducer calls at each step of an average. Its methods do nothing here.

    A Reducer's list of observers is empty unless an option asks for one.
    """

    def on_forward(self) -> None:
        """Called before each forward pass of the module, also one without gradients."""

    def on_forwarded(self, outputs: object) -> None:
        """Called with the module's outputs, after each forward pass."""

    def on_launch(self, bucket: GradientBucket) -> None:
        """Called when a bucket is full and its turn has come, before it is packed."""

    def on_agree(self) -> None:
        """Called before this rank waits for the weights of all ranks, if any are set."""

    def on_agreed(self) -> None:
        """Called when it has them."""

    def on_packed(self, bucket: GradientBucket) -> None:
        """Called when its gradients are in the buffer, before the comm hook gets it."""

    def on_launched(self, bucket: GradientBucket) -> None:
        """Called when this rank has handed a bucket to the comm hook, or has raised before that."""

    def on_all_launched(self) -> None:
        """Called when this rank has launched every bucket of this average."""

    def on_wait(self, bucket: GradientBucket) -> None:
        """Called before this rank waits for the average of a bucket.

        With a comm hook that has one bucket under way at a time twice, the second time in vain.
        """

    def on_waited(self, bucket: GradientBucket) -> None:
        """Called when the average of a bucket is there, and not yet in `.grad`.

        Called after a wait that has failed, too: the bucket's state is not LANDED then.
        """

    def on_finished(self, iteration: int, bucket: GradientBucket, takes_part: bool) -> None:
        """Called when the averages of this bucket are in `.grad`, if this rank takes part."""

    def on_average(self, iteration: int, takes_part: bool) -> None:
        """Called when all buckets are unpacked. Every rank comes here, so it may communicate.

        Args:
            iteration: the number of averages so far, 1 after the first.
            takes_part: False on a rank that has run out of data inside `join()`, and where this
                rank's backward pass is about to raise.
        """

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before an optimizer steps some of the Reducer's parameters."""

    def on_set_step(self) -> None:
        """Called before the first step with ranks that may be others. Must not communicate."""

    def on_abort(self) -> None:
        """Called when a step is dropped, whatever has begun of it. Must not communicate."""
