"""Comm hooks: each averages one bucket over the ranks and returns a future of the average.

    reducer.register_comm_hook(None, ddp.comm_hooks.bf16_compress_hook)

A hook is called as `hook(state, bucket) -> Future[Tensor]`, as by torch's DDP, so hooks for DDP run
here unchanged. `state` is what was registered with the hook, for this library's hooks a process
group (None means the Reducer's). `bucket` has the methods of torch's `dist.GradBucket`. The value
of the future is the averaged flat tensor, of any floating dtype, or a list of only that tensor.

A hook that starts exactly one collective declares it: `hook.one_collective = True`. Several buckets
may then be in flight. A second collective, as PowerSGD's, might come before the next bucket's on
one rank and after it on another. A hook that expects divided gradients declares
`hook.prescaled = True`. This package's hooks declare both with `@comm_hook(...)`.

Division: each gradient is divided by the number of ranks n once. As in torch's DDP that is before
the sum: n summands of 1/n each cannot overflow a 16-bit float where the average would not. With
`reduce="sum"` nobody divides. Otherwise `bucket.op` says who does, at one of these places:

- SUM: the Reducer, while it packs, which saves a pass over the bucket. `CommConfig.plan` chooses
  the factor, for `average` and for hooks that declare `prescaled`. Without a hook:
  `SparseBucket.pack` (options/sparse.py).
- AVG: the collective, on a group whose `traits` say `divides_first`. `Reduction.fold`
  (backend/reduction.py) divides; with several machines, `Reduction.split` chooses where. With
  shard="node" buckets send nothing, and `NodeShards.step` (optim/shards.py) averages while it
  steps, after the sum unless 1/n is exact.
- None: the hook. A hook outside of this package divides; so do `divide`, if another hook calls
  `average`, `_compressed` (options/comm_hooks.py), likewise, `_average_in_low_rank`
  (options/power_sgd.py), `Blockwise.exchanges` (options/blockwise.py), after the sum, and
  `TreeReduction._divide` (virtual_ranks/tree_reduction.py), which divides by the number of virtual
  ranks, after the sum except in 16 bits.

A rank's weight is one more factor while packing: `GradientWeight.value` (options/weight.py).
"""

import weakref
from collections.abc import Callable
from functools import partial
from types import NoneType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ddp_from_scratch.backend.operations import caller
from ddp_from_scratch.backend.traits import traits
from ddp_from_scratch.common import gpu
from ddp_from_scratch.common.group import check_group, of_member
from ddp_from_scratch.core.average import Average
from ddp_from_scratch.core.bucket import AveragePlan, CommHook, FlatBucket, Future

Group = dist.ProcessGroup | None
Hook = TypeVar("Hook", bound=Callable[..., Future])


def comm_hook(*, one_collective: bool = False, prescaled: bool = False) -> Callable[[Hook], Hook]:
    """Declares a hook of this package, which keeps what it remembers by parameter, not by bucket.

    Its state is a process group, or has one; a Reducer may put another of the same ranks there.
    """

    def declare(hook: Hook) -> Hook:
        vars(hook).update(ours=True, one_collective=one_collective, prescaled=prescaled)
        return hook

    return declare


# `functools.wraps` copies what is declared here, and a wrapper may start a second collective. So
# `set_hook` recognises `average` itself.
@comm_hook()
def average(process_group: Group, bucket: FlatBucket) -> Future:
    """All-reduces the bucket to its average (or sum), with the bits of torch's DDP. The default."""
    op = divide(process_group, bucket) if bucket.op is None else bucket.op
    # The collective's own future, whose value is a list: no callback runs on its thread.
    return all_reduce(bucket, bucket.sent, process_group, op)


def divide(process_group: Group, bucket: FlatBucket) -> Any:
    """Divides a bucket that its Reducer has not divided; returns the reduction that is left."""
    if (op := _reduction(process_group)) == dist.ReduceOp.SUM:
        # A division: see the head of this file.
        bucket.buffer().mul_(1.0 / dist.get_world_size(process_group))
    return op


def _reduction(process_group: Group) -> Any:
    group = process_group or dist.group.WORLD
    # AVG where it has the bits of a division before the sum. Not NCCL's, since NVSwitches (NVLS)
    # compute sums of floats but no averages.
    return dist.ReduceOp.AVG if traits(group).divides_first else dist.ReduceOp.SUM


def is_ours(hook: CommHook) -> bool:
    """True for a hook that `comm_hook` declares."""
    return getattr(hook, "ours", False) is True


def all_reduce(
    bucket: FlatBucket,
    tensor: torch.Tensor,
    process_group: Group,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> Future:
    """Starts to reduce a bucket's tensor in place; the future's value is a list of it."""
    # Ranks compare their operations; the label lets an error name the bucket.
    caller.op_label = f" for {bucket.name}"
    try:
        work = dist.all_reduce(tensor, op=op, group=process_group, async_op=True)
    finally:
        caller.op_label = ""
    if work is None:
        of_member(work)  # raises on a rank outside of the group
    return work.get_future() if tensor.is_cpu else OnGPU(work, tensor)


class OnGPU(Future):
    """The future of a collective on a GPU. Only `wait` makes the current stream wait for it."""

    def __init__(self, work: dist.Work, tensor: torch.Tensor) -> None:
        super().__init__()
        self._work, self._tensor = work, tensor

    def done(self) -> bool:
        return True  # the host never waits

    def wait(self) -> list[torch.Tensor]:
        self._work.wait()
        return self.value()

    def value(self) -> list[torch.Tensor]:
        return [self._tensor]

    def then(self, callback: Callable[[Any], Any]) -> Future:
        # On a second stream: from torch 2.15 on, `get_future` makes the current stream wait.
        with gpu.aside(self._tensor.device):
            return self._work.get_future().then(callback)


class CommConfig:
    """The comm hook and the group that sends: how buckets are averaged.

    Args:
        group_for: maps a process group to the group that sends its buckets; None means itself.
        sums: nothing is divided.

    Attributes:
        concurrent: True if several buckets may be in flight.
        last_group: returns the group that `open_group()` has returned last. The reference is weak,
            since a strong one keeps the group's threads alive.
    """

    def __init__(
        self,
        process_group: Group,
        group_for: Callable[[dist.ProcessGroup], dist.ProcessGroup] | None,
        sums: bool = False,
    ) -> None:
        self.process_group = process_group
        self.sums = sums
        self._group_for = group_for
        self.last_group: Callable[[], Group] = NoneType
        self._owner = ""
        self.set_hook(average, process_group)

    def set_hook(self, hook: CommHook, state: Any, owner: str = "") -> None:
        """Averages each bucket with `hook(state, bucket)` from now on."""
        if not callable(hook):
            raise TypeError(f"a communication hook must be callable, got {hook!r}")
        self.hook = hook
        self.state = state
        self._owner = owner or self._owner
        # The last plan without a weight, and the group that it is for. Weak, as `last_group`.
        self._plan: AveragePlan | None = None
        self._planned_for: Callable[[], Group] = NoneType
        one_collective = getattr(hook, "one_collective", False) is True
        self.concurrent: bool = hook is average or one_collective

    def require_unowned_hook(self, what: str) -> None:
        """Raises a RuntimeError if an option needs the comm hook, which `what` would replace."""
        if self._owner:
            raise RuntimeError(f"{self._owner} has a sum of its own and cannot be used with {what}")

    def open_group(self) -> dist.ProcessGroup:
        """Returns the group that sends buckets. Collective if `group_for` is."""
        group = check_group(self.process_group)
        if self._group_for is not None:
            group = self._group_for(group)
        self.last_group = weakref.ref(group)
        return group

    def through_group(self) -> bool:
        """True if the comm hook sends through `open_group()`, not a group of its own."""
        named = getattr(self.state, "process_group", self.state)
        return is_ours(self.hook) and named in (None, self.process_group or dist.group.WORLD)

    def averages_over_one_rank(self) -> bool:
        """True if each gradient is its own average: one rank, and no comm hook of the program's."""
        group = self.state or self.process_group or dist.group.WORLD
        return self.hook is average and group is not None and dist.get_world_size(group) == 1

    def plan(self, average: Average) -> AveragePlan:
        """Plans an average, before its first gradient is packed; waits for all ranks' weights."""
        own: Any = self.process_group or dist.group.WORLD
        if average.weight is not None:
            average.plan = self._new_plan(own, average.weight())
            return average.plan
        if self._plan is None or self._planned_for() is not own:
            self._plan, self._planned_for = self._new_plan(own, 1.0), weakref.ref(own)
        average.plan = self._plan
        return average.plan

    def _new_plan(self, own: dist.ProcessGroup, weight: float) -> AveragePlan:
        group, state = self.open_group(), self.state
        hook: Callable[..., Future] = self.hook
        named = getattr(state, "process_group", state)  # a user's hook may have any state
        # The state of this library's hooks is the Reducer's group, or names it. They send through
        # `group` instead, unless both are one: a reference to gloo's group keeps its threads alive.
        if self.through_group() and group is not (named or dist.group.WORLD):
            if hasattr(state, "process_group"):
                hook = partial(hook, group=group)
            else:
                state = group
        # A division: see the head of this file.
        mean = weight / dist.get_world_size(self.process_group)
        scale = weight or 1.0  # with weight 0 the bucket sends zeros, whatever it holds
        op: Any = None  # the hook divides
        if self.hook is average:
            op = _reduction(state)
        elif getattr(self.hook, "prescaled", False):
            op = dist.ReduceOp.SUM
        if self.sums:  # nothing divides
            mean, op = weight, dist.ReduceOp.SUM
        elif op == dist.ReduceOp.SUM:
            other = isinstance(named, dist.ProcessGroup)
            scale *= 1.0 / dist.get_world_size(named if other else self.process_group)
        return AveragePlan(
            hook=hook,
            state=state,
            on_side_stream=not is_ours(self.hook),
            op=op,
            scale=scale,
            mean=mean,
            sends_zeros=weight == 0,
            keeps_gradients=weight == 1 and self.averages_over_one_rank(),
        )
