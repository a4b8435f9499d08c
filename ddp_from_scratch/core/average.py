"""The state of a backward pass and of an average. A Reducer drops each as a whole at its end."""

from collections.abc import Callable
from dataclasses import dataclass, field

from ddp_from_scratch.core.bucket import AveragePlan


@dataclass
class BackwardPass:
    """A backward pass that averages, from its first gradient to its end."""

    number: int  # autograd's
    thread: int  # in which it began
    failed: bool = False  # an exception has ended it, so autograd never runs its callback


@dataclass
class Average:
    """The average that comes next, until its last bucket has landed.

    Attributes:
        next_bucket: every bucket before this index has been launched.
        plan: made when the first gradient is packed; None before.
        weight: returns the factor of this rank's gradients, and waits for all ranks' weights; None
            means 1.
        error: this rank's own. Raised after the average, since the other ranks wait for it.
        local: the parameters that have got a gradient under `no_sync()`.
    """

    next_bucket: int = 0
    plan: AveragePlan | None = None
    weight: Callable[[], float] | None = None
    error: RuntimeError | None = None
    local: set[int] = field(default_factory=set)
