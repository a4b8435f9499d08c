"""How buckets are sent: the comm hook, this rank's weight, with overlap or without."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from ddp_from_scratch.buckets.gradient_bucket import CommHook, LaunchArgs
from ddp_from_scratch.comm_hooks import default_hooks
from ddp_from_scratch.group import gloo_beside, takes_cpu_tensors
from ddp_from_scratch.sync.gradient_weight import GradientWeight


class CommState:
    """The comm hook, and the weight of this rank in the next average.

    Args:
        process_group: the ranks that take part.
        overlap: launch buckets during backward, not at its end.

    Attributes:
        overlap: as given, or as `bucket_cap_mb="auto"` has chosen.
        hook, state: the comm hook, and its first argument.
        several_at_once: whether several buckets may be under way at a time.
        args: of the launches of this average, once `agree_args` has made them.
        weight: of this rank, if it was set; until the end of the next average.
        joining: whether `join()` sets the weights.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, overlap: bool) -> None:
        self.overlap = overlap
        self.hook: CommHook = default_hooks.average
        self.state: Any = process_group
        self.several_at_once = True
        self.args: LaunchArgs | None = None
        self.weight: GradientWeight | None = None
        self.joining = False
        self._process_group = process_group
        self._cpu_group: dist.ProcessGroup | None = None  # of gloo, where the group has no CPU

    def set_overlap(self, overlap: bool) -> None:
        """Launches buckets during backward from now on, or at its end."""
        self.overlap = overlap

    def set_joining(self, joining: bool) -> None:
        """Lets `join()` set the weights, or the program again."""
        self.joining = joining

    def set_hook(self, hook: CommHook, state: Any) -> None:
        """Lets this comm hook send from now on.

        Raises:
            TypeError: it cannot be called.
        """
        if not callable(hook):
            raise TypeError(f"a communication hook must be callable, got {hook!r}")
        self.hook, self.state, self.args = hook, state, None
        self.several_at_once = default_hooks.may_overlap(hook)

    def agree_weight(self, amount: float) -> GradientWeight:
        """Starts to agree on the sum of all ranks' amounts. Collective.

        Raises:
            ValueError: `amount` is negative or not finite.
        """
        if self._cpu_group is None and not takes_cpu_tensors(self._process_group):
            self._cpu_group = gloo_beside(self._process_group)
        return GradientWeight.of(amount, self._cpu_group or self._process_group)

    def set_weight(self, weight: GradientWeight | None) -> None:
        """Multiplies this rank's gradients by it in the next average; None means 1."""
        self.weight, self.args = weight, None

    def agree_args(self) -> LaunchArgs:
        """Fixes the launches of this average. Waits for the weights of all ranks, if any are set.

        Raises: as `GradientWeight.value`.
        """
        weight = 1.0 if self.weight is None else self.weight.value()
        hook, factor = default_hooks.while_packing(self.hook, self.state)
        self.args = LaunchArgs(hook, self.state, weight, weight * factor or factor)
        return self.args

    @contextmanager
    def keeping_local(self) -> Iterator[None]:
        """Inside, passes end as ever, but buckets keep local gradients (`node_shared_sgd.py`).

        Raises:
            RuntimeError: a comm hook is registered.
        """
        if self.hook is not default_hooks.average:
            raise RuntimeError("gradients that stay local cannot go through a comm hook")
        self.set_hook(default_hooks.keep_local, self.state)
        try:
            yield
        finally:
            self.set_hook(default_hooks.average, self.state)
