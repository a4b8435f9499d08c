"""How buckets are averaged: the comm hook, the group that sends, and this rank's weight."""

import weakref
from collections.abc import Callable
from functools import partial
from types import NoneType
from typing import Any

import torch.distributed as dist

from ddp_from_scratch.core import comm_hooks
from ddp_from_scratch.core.bucket import CommHook
from ddp_from_scratch.group import check_group


class Sender:
    """Settings with which one Reducer packs and launches its buckets.

    `transport` maps a process group to the group that sends its buckets, if another. Collective.

    Attributes:
        concurrent: True if several buckets may be in flight under this hook.
        sends: returns what `group()` returned last. Weak, as a strong reference keeps its threads.
        weight: returns this rank's weight in the next average alone, and waits for the weights of
            all ranks; None means 1.
        prepared_for: returns the group that `prepare` ran for; None before. Weak as `sends`.
        scale, mean: factors for packing flat and sparse gradients; a `mean` of 0 sends zeros.
        hook_now, state_now, aside: arguments of `Bucket.launch`.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        transport: Callable[[dist.ProcessGroup], dist.ProcessGroup] | None,
    ) -> None:
        self.process_group, self._transport = process_group, transport
        self.hook: CommHook = comm_hooks.average
        self.state: Any = process_group
        self.concurrent = True
        self.sends: Callable[[], dist.ProcessGroup | None] = NoneType
        self.prepared_for: Callable[[], dist.ProcessGroup | None] = NoneType
        self.weight: Callable[[], float] | None = None
        self.hook_now, self.state_now, self.aside = self.hook, self.state, False
        self.scale, self.mean = 1.0, 1.0
        self.op: dist.ReduceOp.RedOpType | None = None

    def set_weight(self, weight: Callable[[], float] | None) -> None:
        """Sets the factor of this rank's gradients in the next average; None means 1."""
        self.weight, self.prepared_for = weight, NoneType

    def set_hook(self, hook: CommHook, state: Any) -> None:
        """Averages each bucket with `hook(state, bucket)` from now on."""
        if not callable(hook):
            raise TypeError(f"a communication hook must be callable, got {hook!r}")
        self.hook, self.state, self.prepared_for = hook, state, NoneType
        self.concurrent = comm_hooks.has_one_collective(hook)

    def group(self) -> dist.ProcessGroup:
        """Returns the group that sends buckets. Collective if `transport` is."""
        sends = check_group(self.process_group)
        if self._transport is not None:
            sends = self._transport(sends)
        self.sends = weakref.ref(sends)
        return sends

    def through_group(self) -> bool:
        """True if the comm hook sends through `group()`, and not through a group of its own."""
        named = getattr(self.state, "process_group", self.state)
        ours = self.process_group or dist.group.WORLD
        return comm_hooks.is_ours(self.hook) and (named or dist.group.WORLD) is ours

    def prepare(self) -> None:
        """Chooses the hook, the state and the factors of the next launches.

        They stay until the hook, the weight or the (default) group changes. Waits for all weights.
        """
        own: Any = self.process_group or dist.group.WORLD
        weight = 1.0 if self.weight is None else self.weight()
        sends = self.group()
        hook: Any = self.hook
        state = self.state
        # The state of this library's hooks is the Reducer's group, or names it. They send through
        # `sends` instead, unless both are one: a reference to gloo's group keeps its threads alive.
        if sends is not own and self.through_group():
            if hasattr(state, "process_group"):
                hook = partial(hook, group=sends)
            else:
                state = sends
        self.hook_now, self.state_now = hook, state
        self.aside = not comm_hooks.is_ours(self.hook)
        self.mean = weight / dist.get_world_size(self.process_group)
        self.scale = weight or 1.0  # with weight 0 the bucket sends zeros, whatever it holds
        self.op = comm_hooks.reduction(hook, state)
        if self.op == dist.ReduceOp.SUM:
            self.scale *= 1.0 / dist.get_world_size(state)
        self.prepared_for = weakref.ref(own)
