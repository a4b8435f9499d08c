"""How a bucket is sent: what its gradients are multiplied by, and the comm hook."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist

from ddp_from_scratch import comm_hooks
from ddp_from_scratch.buckets.bucket import CommHook
from ddp_from_scratch.group import gloo_beside, takes_cpu_tensors
from ddp_from_scratch.sync.gradient_weight import Share


class Way(NamedTuple):
    """The arguments of `Bucket.launch`, for all buckets of one average."""

    hook: CommHook
    state: Any
    share: float
    factor: float


class Sending:
    """The comm hook, and how much this rank counts in the next average.

    Args:
        process_group: the ranks that take part.

    Attributes:
        hook, state: the comm hook, and what it is handed.
        joining: whether `join()` is in charge of the shares.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.hook: CommHook = comm_hooks.average
        self.state: Any = process_group
        self.joining = False
        self._process_group = process_group
        self._beside: dist.ProcessGroup | None = None  # of gloo, where the group has no CPU
        self._share: Share | None = None
        self._way: Way | None = None
        self._multiplier = 1.0

    def send_by(self, hook: CommHook, state: Any) -> None:
        """Lets this comm hook send from now on.

        Raises:
            TypeError: it cannot be called.
        """
        if not callable(hook):
            raise TypeError(f"a communication hook must be callable, got {hook!r}")
        self.hook, self.state, self._way = hook, state, None

    def weigh(self, amount: float) -> Share:
        """As `Reducer.weight`; returns what ranks are agreeing on."""
        if self.joining:
            raise RuntimeError("weight() cannot be used inside join(), which weighs ranks itself")
        share = self.agree(amount)
        self.count_by(share)
        return share

    def agree(self, amount: float) -> Share:
        """Starts to agree on the sum of all ranks' amounts. Collective.

        Raises:
            ValueError: `amount` is negative or not finite.
        """
        if self._beside is None and not takes_cpu_tensors(self._process_group):
            self._beside = gloo_beside(self._process_group)
        return Share.of(amount, self._beside or self._process_group)

    def count_by(self, share: Share | None) -> None:
        """What this rank's gradients are multiplied by before the next average; None means 1."""
        self._share, self._way = share, None

    def way(self) -> Way:
        """How the next average is taken. Waits, the first time, for what all ranks count by.

        Raises: as `Share.value`.
        """
        if self._way is None:
            share = 1.0 if self._share is None else self._share.value()
            hook, factor = comm_hooks.while_packing(self.hook, self.state)
            self._way = Way(hook, self.state, share, factor)
            self._multiplier = share * factor or factor
        return self._way

    def multiplier(self) -> float:
        """What a gradient is multiplied by as it is packed; a share of 0 clears it at the launch.

        Waits and raises as `way`.
        """
        if self._way is None:
            self.way()
        return self._multiplier

    def may_overlap(self) -> bool:
        """Whether several buckets may be under way at a time."""
        return comm_hooks.may_overlap(self.hook)

    def end(self) -> None:
        """An average has been taken: ranks count equally again."""
        self.count_by(None)

    @contextmanager
    def keeping_local(self) -> Iterator[None]:
        """Inside, passes end as ever, but buckets keep local gradients (`node_shared_sgd.py`).

        Raises:
            RuntimeError: a comm hook is registered.
        """
        if self.hook is not comm_hooks.average:
            raise RuntimeError("gradients that stay local cannot go through a comm hook")
        self.send_by(comm_hooks.keep_local, self.state)
        try:
            yield
        finally:
            self.send_by(comm_hooks.average, self.state)
