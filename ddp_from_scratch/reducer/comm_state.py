"""Settings of the next average: the comm hook, this rank's weight, overlap."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist

from ddp_from_scratch.buckets.gradient_bucket import CommHook, LaunchArgs
from ddp_from_scratch.comm_hooks import default_hooks
from ddp_from_scratch.comm_hooks.power_sgd import PowerSGDState, power_sgd_hook
from ddp_from_scratch.group import check_group, gloo_beside, takes_cpu_tensors
from ddp_from_scratch.node.process_group import shared_memory_beside
from ddp_from_scratch.node.shared_memory_group import SharedMemoryGroup
from ddp_from_scratch.sync.gradient_weight import GradientWeight


class CommState:
    """The comm hook, the weight of this rank, and overlap, for the next average.

    Args:
        process_group: the ranks that average; None means all.
        overlap: True launches buckets during backward, False at its end.
        shared_memory: True reduces in shared memory where a gloo group's ranks can.

    Attributes:
        overlap: as given, or the choice of `bucket_cap_mb="auto"`.
        hook, state: the comm hook, and its first argument.
        several_at_once: True if several buckets may be under way at a time.
        args: the arguments of this average's launches; None until `agree_args`.
        weight: the weight of this rank in the next average; None means 1.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None, overlap: bool, shared_memory: bool
    ) -> None:
        self.overlap = overlap
        self._shared_memory = shared_memory
        self.hook: CommHook = default_hooks.average
        self.state: Any = process_group
        # False for a hook that may start several collectives: with one bucket under way at a time,
        # all ranks issue them in the same order.
        self.several_at_once = True
        # Made from the hook and the weight: setting either of them resets it.
        self.args: LaunchArgs | None = None
        self.weight: GradientWeight | None = None
        # True with `shards`, whose sum allows neither weights nor another hook.
        self._fixed = False
        self._process_group = process_group
        self._backend = str(dist.get_backend(check_group(process_group)))
        # True if the hook sends through `group`; else through the group that its state names.
        self._follows = True
        # By `_follows`. Noted by `group`, which is collective: a look at the transport must not be.
        self._shares = (False, False)

    def group(self) -> dist.ProcessGroup:
        """Returns the group that sends buckets. Collective where `shared_memory_beside` is."""
        own = check_group(self._process_group)
        sends = shared_memory_beside(own) if self._shared_memory else own
        self._shares = self._shares_memory(own), self._shares_memory(sends)
        return sends

    @property
    def transport(self) -> str:
        """The way between ranks: "shared memory", or the name of the backend that sends.

        A hook of the user's own sends through the group that it names itself, most often the
        Reducer's, and not through one that was opened beside it.
        """
        return "shared memory" if self._shares[self._follows] else self._backend

    def set_overlap(self, overlap: bool) -> None:
        """Launches buckets during backward from now on, or at its end."""
        self.overlap = overlap

    def set_hook(self, hook: CommHook, state: Any) -> None:
        """Uses this comm hook from now on.

        Raises:
            RuntimeError: the hook is fixed.
            TypeError: `hook` is not callable.
        """
        self.check_free("a comm hook")
        if not callable(hook):
            raise TypeError(f"a communication hook must be callable, got {hook!r}")
        self.hook, self.state, self.args = hook, state, None
        self.several_at_once = default_hooks.may_overlap(hook)
        self._follows = default_hooks.is_ours(hook) and _stands_for(state, self._process_group)

    def fix_hook(self, hook: CommHook, state: Any) -> None:
        """Uses this comm hook for good, without weights."""
        self.set_hook(hook, state)
        self._fixed = True

    def check_free(self, what: str) -> None:
        """Raises if the hook is fixed; `what` needs another one."""
        if self._fixed:
            raise RuntimeError(f"shards=V has a sum of its own and cannot be used with {what}")

    def agree_weight(self, amount: float) -> GradientWeight:
        """Starts to agree on the sum of all ranks' amounts. Collective.

        Raises:
            RuntimeError: the hook is fixed.
            ValueError: `amount` is negative or not finite.
        """
        self.check_free("weight() or join()")
        on_cpu = takes_cpu_tensors(self._process_group)
        return GradientWeight(amount, self.group() if on_cpu else gloo_beside(self._process_group))

    def set_weight(self, weight: GradientWeight | None) -> None:
        """Sets the factor of this rank's gradients in the next average; None means 1."""
        self.weight, self.args = weight, None

    def agree_args(self) -> LaunchArgs:
        """Fixes the arguments of this average's launches. Waits for ranks' weights, if any are set.

        Raises: as `GradientWeight.value`.
        """
        weight = 1.0 if self.weight is None else self.weight.value()
        hook, state = self.hook, self.state
        own, sends = check_group(self._process_group), self.group()
        # Our hooks take a group as their state. The Reducer's own stands for the one that sends.
        # Nothing is kept where both are the same: a reference to gloo's group keeps its threads.
        if sends is not own and self._follows:
            if isinstance(state, PowerSGDState):
                hook = partial(power_sgd_hook, group=sends)
            else:
                state = sends
        hook, factor = default_hooks.while_packing(hook, state)
        # With weight 0 the bucket writes zeros itself: gradients need only the division.
        scale = factor if weight == 0 else weight * factor
        aside = not default_hooks.is_ours(self.hook)
        self.args = LaunchArgs(hook, state, weight, scale, weakref.ref(own), aside)
        return self.args

    def _shares_memory(self, group: dist.ProcessGroup) -> bool:
        return isinstance(group, SharedMemoryGroup) and group.shares_memory

    @contextmanager
    def keeping_local(self) -> Iterator[None]:
        """Keeps local gradients in the buckets inside the context; used by `node_shared.py`.

        Raises:
            RuntimeError: a comm hook is registered.
        """
        self.check_free("local gradients")
        if self.hook is not default_hooks.average:
            raise RuntimeError("gradients that stay local cannot go through a comm hook")
        self.set_hook(default_hooks.keep_local, self.state)
        try:
            yield
        finally:
            self.set_hook(default_hooks.average, self.state)


def _stands_for(state: Any, group: dist.ProcessGroup | None) -> bool:
    """True if the state of one of our hooks names this group; None names the default one."""
    named = state.process_group if isinstance(state, PowerSGDState) else state
    default = dist.group.WORLD
    return (default if named is None else named) is (default if group is None else group)
