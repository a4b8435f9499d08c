"""The interface of extensions: everything that an option adds to a Reducer.

A step, and the methods that are called in it:

    forward      on_forward, on_forwarded
    ready        on_gradient, is_complete               for each gradient
    launch       may_launch, skips, on_launch, on_packed, on_launched     for each bucket
                 on_agree, on_agreed                    around a wait for ranks' weights
    end          takes_over_end, before_end             autograd has no more work in this pass
                 on_break                               or an exception has ended it
                 on_all_launched, used                  every rank has launched every bucket
    wait         on_wait, on_waited                     for each bucket
    unpack       on_finished                            for each bucket
    averaged     on_average, error
    step         on_step                                the optimizer is about to step
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ddp_from_scratch.core.bucket import Bucket


class Extension:
    """An object that a Reducer calls at each phase of a step. Its methods do nothing here.

    A Reducer notes which methods a class overrides, and calls no others: an option costs nothing in
    the phases that it leaves alone.

    Extensions are called in the order in which they were added.
    """

    def attach(self, reducer: Any) -> None:
        """Called when the Reducer has its buckets, before any other method.

        `self._of()` is the Reducer from then on. Weakly: it holds this object.
        """
        self._of: Callable[[], Any] = weakref.ref(reducer)

    # Forward ------------------------------------------------------------------------------------

    def on_forward(self) -> None:
        """Called before each forward pass of the module, also one without gradients."""

    def on_forwarded(self, outputs: object) -> None:
        """Called with the module's outputs, after each forward pass."""

    # Ready --------------------------------------------------------------------------------------

    def on_gradient(self, index: int) -> None:
        """Called when the gradient of parameter `index` is in `.grad`, also under `no_sync()`."""

    def is_complete(self, index: int) -> bool:
        """Returns False if this pass will add more to the gradient of parameter `index`."""
        return True

    # Pack, launch -------------------------------------------------------------------------------

    def may_launch(self) -> bool:
        """Returns False if full buckets must wait for the end of backward."""
        return True

    def skips(self, bucket: Bucket) -> bool:
        """Returns True if a bucket is not sent in this average; the same on all ranks."""
        return False

    def on_launch(self, bucket: Bucket) -> None:
        """Called when a bucket is full and next in order, before it is packed."""

    def on_agree(self) -> None:
        """Called before this rank waits for the weights of all ranks, if any are set."""

    def on_agreed(self) -> None:
        """Called when it has them."""

    def on_packed(self, bucket: Bucket) -> None:
        """Called when its gradients are in the buffer, before the comm hook gets it."""

    def on_launched(self, bucket: Bucket) -> None:
        """Called when this rank has handed a bucket to the comm hook, or has raised before that."""

    # The end of backward ------------------------------------------------------------------------

    def takes_over_end(self) -> bool:
        """Returns True if this extension ends the pass in the Reducer's place."""
        return False

    def before_end(self) -> None:
        """Called when autograd has no more work in this pass. Must not communicate."""

    def on_break(self, number: int) -> None:
        """Called when an exception has ended pass `number`, before `backward()` raises it."""

    def on_all_launched(self) -> None:
        """Called when this rank has launched every bucket of this average. May communicate."""

    def used(self) -> set[int] | None:
        """Returns the parameters whose `.grad` becomes the average; None means all. Collective."""
        return None

    # Wait, unpack -------------------------------------------------------------------------------

    def on_wait(self, bucket: Bucket) -> None:
        """Called before this rank waits for the average of a bucket.

        Called twice if the comm hook has one bucket under way at a time; the second wait is empty.
        """

    def on_waited(self, bucket: Bucket) -> None:
        """Called when the average of a bucket is there, and not yet in `.grad`.

        Called after a wait that has failed, too: the bucket's state is not LANDED then.
        """

    def on_finished(self, iteration: int, bucket: Bucket, takes_part: bool) -> None:
        """Called when the averages of this bucket are in `.grad`, if this rank takes part."""

    def on_average(self, iteration: int, takes_part: bool) -> None:
        """Called when all buckets are unpacked. Every rank comes here, so it may communicate.

        Args:
            iteration: the number of averages so far, 1 after the first.
            takes_part: False on a rank that has run out of data inside `join()`, and where this
                rank's backward pass is about to raise.
        """

    def error(self) -> RuntimeError | None:
        """Returns an error for `backward()` to raise after the average, on this rank."""
        return None

    # Between steps ------------------------------------------------------------------------------

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before an optimizer steps some of the Reducer's parameters."""

    def on_set_step(self) -> None:
        """Called before the first step with ranks that may be others. Must not communicate."""

    def on_abort(self) -> None:
        """Called when a step is dropped, whatever has begun of it. Must not communicate."""

    def remove(self) -> None:
        """Called when the Reducer is taken off its module. Idempotent."""


# The methods that a Reducer calls, of those extensions that override them.
METHODS = [name for name in vars(Extension) if not name.startswith("__") and name != "attach"]
