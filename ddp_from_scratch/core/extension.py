"""The interface of extensions, through which every option hooks into a Reducer.

The phases of a step, and the methods that a Reducer calls in them:

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
    """An object that a Reducer calls in each phase of a step. Its methods do nothing here.

    A Reducer calls only the methods that a class overrides, so an option costs nothing in the other
    phases. Extensions are called in the order in which they were added.
    """

    def attach(self, reducer: Any) -> None:
        """Called before any other method, when the Reducer has its buckets.

        From then on `self._of()` is the Reducer. The reference is weak because the Reducer holds
        this object.
        """
        self._of: Callable[[], Any] = weakref.ref(reducer)

    # Forward ------------------------------------------------------------------------------------

    def on_forward(self) -> None:
        """Called before each forward pass of the module, with or without gradients."""

    def on_forwarded(self, outputs: object) -> None:
        """Called with the module's outputs after each forward pass."""

    # Ready --------------------------------------------------------------------------------------

    def on_gradient(self, index: int) -> None:
        """Called when parameter `index` has its gradient in `.grad`, also under `no_sync()`."""

    def is_complete(self, index: int) -> bool:
        """Returns False if this pass will add to the gradient of parameter `index` again."""
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
        """Called before this rank waits for the weights of all ranks, if there are any."""

    def on_agreed(self) -> None:
        """Called after that wait."""

    def on_packed(self, bucket: Bucket) -> None:
        """Called when its gradients are in the buffer, before the comm hook gets it."""

    def on_launched(self, bucket: Bucket) -> None:
        """Called when the comm hook has the bucket, or when an error came before that."""

    # The end of backward ------------------------------------------------------------------------

    def takes_over_end(self) -> bool:
        """Returns True if this extension ends the pass itself."""
        return False

    def before_end(self) -> None:
        """Called when autograd has finished the pass. Must not communicate."""

    def on_break(self, number: int) -> None:
        """Called when an exception has ended pass `number`, before `backward()` raises it."""

    def on_all_launched(self) -> None:
        """Called when this rank has launched all buckets of an average. May communicate."""

    def used(self) -> set[int] | None:
        """Returns the parameters whose `.grad` becomes the average; None means all. Collective."""
        return None

    # Wait, unpack -------------------------------------------------------------------------------

    def on_wait(self, bucket: Bucket) -> None:
        """Called before this rank waits for the average of a bucket.

        If the comm hook allows only one bucket in flight, each bucket is waited for twice, and the
        second wait is empty.
        """

    def on_waited(self, bucket: Bucket) -> None:
        """Called after the wait, before the average is copied into `.grad`.

        If the wait failed, the bucket's state is not LANDED.
        """

    def on_finished(self, iteration: int, bucket: Bucket, takes_part: bool) -> None:
        """Called when the averages of this bucket are in `.grad`, if this rank takes part."""

    def on_average(self, iteration: int, takes_part: bool) -> None:
        """Called on every rank when all buckets are unpacked. May communicate.

        Args:
            iteration: the number of averages so far, 1 after the first.
            takes_part: False on a rank without data inside `join()`, and on a rank whose backward
                pass is about to raise.
        """

    def error(self) -> RuntimeError | None:
        """Returns an error for `backward()` to raise on this rank, after the average."""
        return None

    # Between steps ------------------------------------------------------------------------------

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before an optimizer steps any of the Reducer's parameters."""

    def on_set_step(self) -> None:
        """Called before the first step with a new set of ranks. Must not communicate."""

    def on_abort(self) -> None:
        """Called when a step is dropped, at whatever point. Must not communicate."""

    def remove(self) -> None:
        """Called when the Reducer is removed from its module. Idempotent."""


# The methods that a Reducer calls if an extension overrides them.
METHODS = [name for name in vars(Extension) if not name.startswith("__") and name != "attach"]
