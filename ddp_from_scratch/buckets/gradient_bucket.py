"""What a Reducer asks of a bucket, whether its gradients are dense or sparse."""

from collections.abc import Callable, Collection
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

import torch

from ddp_from_scratch.buckets.layout import BucketLayout

CommHook = Callable[[Any, Any], torch.futures.Future[Any]]


class BucketState(Enum):
    """The place of a bucket between two averages.

    FILLING -- launch --> LAUNCHED -- wait --> LANDED -- finish --> FILLING
    """

    FILLING = auto()  # gradients are marked ready; nothing has been sent
    LAUNCHED = auto()  # the buffer belongs to the collective until it has been waited for
    LANDED = auto()  # the buffer holds the average, `.grad` does not yet


class LaunchArgs(NamedTuple):
    """How all buckets of one average are sent.

    Attributes:
        hook, state: the comm hook and its first argument.
        weight: of this rank's gradients. The weights of all ranks add up to the world size. With 0
            the rank contributes zeros, whatever its gradients hold.
        scale: factor of each gradient as it is packed: the weight (1 where that is 0) and, for the
            hooks of this package, the division by the world size.
    """

    hook: CommHook
    state: Any
    weight: float = 1.0
    scale: float = 1.0


class GradientBucket(Protocol):
    """Gradients that are sent together.

    Attributes:
        layout: the members, by index, and their offsets.
        state: changed by `launch`, `wait` and `finish` alone.
        missing: members whose gradient has neither been marked ready nor unused.
        is_sparse: whether it holds one sparse gradient and no flat buffer.
        packs_early: whether `pack_one` is due with each gradient, before `mark_ready`.
    """

    layout: BucketLayout
    state: BucketState
    missing: set[int]
    is_sparse: bool
    packs_early: bool

    def index(self) -> int:
        """Its place in the order of launch, 0 for the first."""

    def parameters(self) -> list[torch.nn.Parameter]:
        """The members' parameters."""

    @property
    def begun(self) -> bool:
        """Whether a member has been marked ready or unused."""

    @property
    def arrived(self) -> bool:
        """Whether no other rank is waited for. May be asked in any thread."""

    def pack_one(self, index: int, scale: float) -> None:
        """Packs one gradient, times `scale`, as soon as it is there."""

    def mark_ready(self, index: int) -> bool:
        """Marks the gradient of parameter `index` ready; True if no other is missing."""

    def mark_unused(self, index: int) -> None:
        """Marks parameter `index` as one that gets no gradient in this pass."""

    def launch(self, args: LaunchArgs) -> None:
        """Packs the gradients and sends them; returns while they are under way."""

    def wait(self) -> None:
        """Waits for the average, if launched. Idempotent."""

    def finish(self, used: Collection[int] | None) -> None:
        """Waits, unpacks the averages of members in `used` (None: all) and is empty again."""
