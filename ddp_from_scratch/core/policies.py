"""Policies answer what a Reducer asks: which gradients a pass computes, and when to launch.

A Reducer has at most one policy of each kind, so there is one answer.
"""

from abc import abstractmethod

from ddp_from_scratch.core.bucket import Bucket
from ddp_from_scratch.core.observer import Observer


class Usage(Observer):
    """Decides which parameters get a gradient. Without one, each gets exactly one in each pass."""

    @property
    @abstractmethod
    def allows_unused(self) -> bool:
        """True if a parameter may get no gradient in a pass."""

    @property
    @abstractmethod
    def fixed_layout(self) -> bool:
        """True if the buckets keep their first layout, since passes differ in their gradients."""

    @abstractmethod
    def is_last_gradient(self, index: int) -> bool:
        """True if this pass adds nothing more to this parameter's gradient."""

    @abstractmethod
    def skips(self, bucket: Bucket) -> bool:
        """True if this average leaves the bucket out. The same on all ranks."""

    @abstractmethod
    def pass_ended(self) -> None:
        """Called when the pass is over: marks the parameters that have got no gradient."""

    @abstractmethod
    def agree_used(self) -> set[int] | None:
        """Returns the parameters whose `.grad` becomes the average; None means all. Collective."""

    @abstractmethod
    def misused(self) -> RuntimeError | None:
        """Returns what `backward()` must raise on this rank, after the average."""


class LaunchOrder(Observer):
    """Keeps one order of collectives on all ranks. Without one, a Reducer launches full buckets."""

    @abstractmethod
    def may_launch(self) -> bool:
        """False if full buckets must wait, at the latest for the end of backward."""

    @abstractmethod
    def end_backward(self) -> bool:
        """Ends the pass, with those of other Reducers; False leaves that to this Reducer."""

    @abstractmethod
    def pass_ended(self) -> None:
        """Called before the last launches of a pass."""

    @abstractmethod
    def pass_failed(self, number: int) -> None:
        """Called when an exception has ended this pass, before `backward()` raises it."""
