"""The interface of a bucket, whether its gradients are dense or sparse."""

from collections.abc import Callable, Collection
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from ddp_from_scratch.buckets.layout import BucketLayout
from ddp_from_scratch.buckets.packing import Packing

CommHook = Callable[[Any, Any], torch.futures.Future[Any]]


class BucketState(Enum):
    """The place of a bucket between two averages.

    FILLING -- launch --> LAUNCHED -- wait --> LANDED -- finish --> FILLING
    """

    # Gradients are marked ready, and nothing has been sent.
    FILLING = auto()
    # The buffer belongs to the collective: nothing else may read it or write to it.
    LAUNCHED = auto()
    # The buffer holds the average, `.grad` does not yet.
    LANDED = auto()


class LaunchArgs(NamedTuple):
    """The arguments of all launches of one average.

    Attributes:
        hook, state: the comm hook and its first argument.
        weight: the weight of this rank's gradients. The weights of all ranks add up to the world
            size. With 0 the rank contributes zeros, whatever its gradients hold.
        scale: the factor of each gradient as it is packed: the weight (1 where that is 0) and, for
            the hooks of this package, the division by the world size.
        group: the process group that they are for. Held weakly: a reference would keep its threads.
        aside: True calls the hook on a stream of its own, if the bucket is on a GPU.
    """

    hook: CommHook
    state: Any
    weight: float = 1.0
    scale: float = 1.0
    group: Callable[[], dist.ProcessGroup | None] = lambda: None
    aside: bool = False


class GradientBucket(Protocol):
    """A bucket: gradients that are averaged together.

    Attributes:
        layout: the members, by index, and their offsets.
        state: changed by `launch`, `wait` and `finish` alone.
        missing: members whose gradient has neither been marked ready nor unused.
        is_sparse: True if it holds one sparse gradient and no flat buffer.
    """

    layout: BucketLayout
    state: BucketState
    missing: set[int]
    is_sparse: bool

    @property
    def early(self) -> Packing | None:
        """Packs each gradient before `mark_ready`; None if `launch` packs all at once."""

    def index(self) -> int:
        """Returns its place in the order of launch, 0 for the first."""

    def parameters(self) -> list[torch.nn.Parameter]:
        """Returns the members' parameters."""

    @property
    def begun(self) -> bool:
        """True if a member has been marked ready or unused."""

    @property
    def arrived(self) -> bool:
        """True if this bucket waits for no other rank. Safe to call from any thread."""

    def mark_ready(self, index: int) -> bool:
        """Marks the gradient of parameter `index` ready; True if no other is missing."""

    def mark_unused(self, index: int) -> None:
        """Marks parameter `index` as one that gets no gradient in this pass."""

    def launch(self, args: LaunchArgs, on_packed: Callable[[Any], None] | None = None) -> None:
        """Packs the gradients and starts the average; returns before it is there.

        Args:
            args: the same for all launches of an average.
            on_packed: called with the bucket between the two.
        """

    def when_landed(self, callback: Callable[[], None]) -> None:
        """Calls back, in whatever thread, when the launched average is there or has failed."""

    def wait(self) -> None:
        """Waits for the average, if launched. Idempotent."""

    def finish(self, used: Collection[int] | None) -> None:
        """Waits, unpacks the averages of members in `used` (None: all), and empties the bucket."""

    def reset(self) -> None:
        """Empties the bucket, whatever has become of its launch. Idempotent."""
