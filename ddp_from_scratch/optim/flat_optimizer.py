"""Optimizers on the Reducer's flat buckets: one call per bucket instead of one per parameter.

A bucket's gradients are in one flat tensor. Here so are its parameters and their state, at the same
offsets:

    gradients       |<- fc2.bias ->|<------ fc2.weight ------>|    `bucket.py`: `.grad` is a window
    parameters      |<- fc2.bias ->|<------ fc2.weight ------>|    `flat_params.py`: so is `.data`,
    momentum        |<- fc2.bias ->|<------ fc2.weight ------>|    and each tensor of the state
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from itertools import chain, pairwise
from typing import Any, ClassVar

import torch
from torch.autograd.graph import increment_version

from ddp_from_scratch.common.memory import overlapping
from ddp_from_scratch.core.bucket import Bucket, FlatBucket
from ddp_from_scratch.core.wrapped import reducer_of
from ddp_from_scratch.optim.flat_params import FlatParams, can_move
from ddp_from_scratch.optim.shard_policy import Unsharded
from ddp_from_scratch.optim.shards import SHARDS
from ddp_from_scratch.optim.squares import squares_of_gradients, total
from ddp_from_scratch.optim.unflattened import Unflattened
from ddp_from_scratch.optim.update_rules import (
    ADAM_RULE,
    CACHE_LINE,
    SGD_RULE,
    UpdateRule,
    check_state,
)
from ddp_from_scratch.options.launch_order import check_current
from ddp_from_scratch.reducer import Reducer
from ddp_from_scratch.sync.check_sync import Mark

# In the error that ranks raise if only one of them calls it.
_STATE_DICT = ' for optimizer.state_dict(), collective with shard="world": call it on all ranks'


def _without_dynamo(method: Callable[..., Any]) -> Callable[..., Any]:
    # torch wraps it for torch.compile, and the wrapper imports torch._dynamo, which takes a second.
    @wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        imported = "torch._dynamo" in sys.modules
        return (method if imported else inspect.unwrap(method))(*args, **options)

    return call


class FlatOptimizer(torch.optim.Optimizer):
    """One of torch's optimizers, with one flat call per bucket and torch's bits.

    The second base of a subclass is torch's class. State, parameter groups and `state_dict()` have
    the form of that class, and each class loads the other's. Schedulers, GradScaler, gradient
    clipping and step hooks work, too.

    The phases of a step:

    1. arrange: if the Reducer has rebuilt its buckets, or a parameter group has changed, parameters
       move into flat tensors. Adjacent parameters of one group form a *segment*, in one tensor.
    2. step the members of each segment with flat calls.
    3. step all other parameters in place, with the same bits: members whose `.grad` is not the
       bucket's window or whose `.data` was replaced, then parameters in no bucket, and those that
       cannot move, such as 16-bit floats on a CPU (`unflattened.py`).

    One rank has nothing to average, so without a comm hook nothing moves: phase 3 steps everything,
    whatever `shard` is. If more ranks join, the next step moves parameters and state; with `shard`
    it raises, because shards belong to the process group in which they were made.

    A view of a parameter does not follow it when it moves. A copy of the optimizer (deep or
    pickled) has no Reducer, and moves nothing.

    With `shard` the ranks divide phase 2, with equal results (`shards.py`). The first step compares
    their parameters. After `backward_and_step`, `.grad` is None (except sparse gradients); between
    `backward()` and `step()` it holds averages, which you may clip or unscale.

    - "node": the ranks of a machine have one copy of parameters and state, in shared memory. If a
      program writes to a parameter, all these ranks see it: let all write the same values, or let
      one rank write, with a barrier (`dist.barrier()`) before and after.
    - "world": every rank has all parameters, and 1/n of the state: `state[parameter]` holds this
      rank's part, flat. `state_dict()` gathers it, so all ranks must call it.

    Args:
        params: parameters, named parameters or groups, as for any optimizer. They may include
            parameters that are not the Reducer's. Only adjacent parameters of one group share a
            call, so alternating groups gain little.
        args, settings: those of torch's class, except settings that choose a kernel.
        reducer: averages the gradients; a `ddp.DistributedDataParallel` stands for its own. Unless
            there is only one rank, it switches to `gradient_as_bucket_view=True`.
        shard: "none", "node" or "world". The last two need all of the Reducer's parameters, each in
            its own memory, on a CPU float32 or float64; "node" needs Linux, and a group on mpi or
            on gloo with shared memory.
        overlap_forward: with "world", parameters arrive during the next forward pass. Reading a
            parameter through its module waits for it (`forward_waits.py`). A program that keeps
            references to parameters outside modules must call `synchronize()` before it reads or
            writes them.

    Raises:
        TypeError: a setting that chooses a kernel, such as `foreach` or `fused`.
        ValueError: a value out of range, as in torch's class; none of the Reducer's parameters is
            among `params`; a parameter is complex, and this optimizer takes none (Adam, AdamW);
            what `shard` needs is missing: a UsageError where the ranks share no memory.
        RuntimeError: see `Reducer.keep_bucket_views`. With `shard`, from a step: the Reducer was
            removed, `.data` of a parameter was replaced, settings differ between ranks, the step
            is inside `join()`, or, in `backward_and_step`, a comm hook is registered.
    """

    _rule: ClassVar[UpdateRule]

    def __init__(
        self,
        params: Iterable[Any],
        *args: Any,
        reducer: Reducer,
        shard: str = "none",
        overlap_forward: bool = False,
        **settings: Any,
    ) -> None:
        for name in ("foreach", "fused", "capturable", "differentiable"):
            if name in settings:
                raise TypeError(f"{type(self).__name__} takes no {name}: it has one kernel")
        if shard not in SHARDS:
            raise ValueError(f'shard must be "none", "node" or "world", got "{shard}"')
        if overlap_forward and shard != "world":
            raise ValueError(f'overlap_forward=True needs shard="world", got "{shard}"')
        super().__init__(params, *args, **settings)
        # Saved in the groups, so that torch's class has the same bits after it loads them.
        for group in (self.defaults, *self.param_groups):
            group["fused"] = self._rule.fused
        reducer = reducer_of(reducer)
        self._reducer: Reducer | None = reducer  # None in a copy of the optimizer
        if not any(group is not None for b in self._buckets for group in self._groups_of(b)):
            raise ValueError("none of params is one of the reducer's parameters")
        # True if the step under way averages over one rank, so over none.
        self._is_one_rank = reducer.core.comm.averages_over_one_rank()
        if not self._is_one_rank:
            reducer.keep_bucket_views()
        self.shard: str = shard
        # Of the gradients of the last step; empty unless the next average compares ranks.
        self.gradient_marks: dict[torch.Tensor, Mark] = {}
        self._segments = dict[FlatBucket, list[FlatParams]]()
        self._unflattened = list[Unflattened]()
        self._arranged_for: Any = None  # the buckets and groups of the last `_arrange`
        self._shared = set[int]()  # ids of parameters that share memory
        name = type(self).__name__ if shard == "none" else f'{type(self).__name__}(shard="{shard}")'
        self._shards = SHARDS[shard](name, reducer, self._rule, overlap_forward)
        self._check_groups()

    _add_param_group = _without_dynamo(torch.optim.Optimizer.add_param_group)
    zero_grad: Callable[..., None] = _without_dynamo(torch.optim.Optimizer.zero_grad)
    _own_state_dict = _without_dynamo(torch.optim.Optimizer.state_dict)
    # Raises a ValueError, and changes nothing, if the state is another optimizer's or model's.
    load_state_dict: Callable[..., None] = _without_dynamo(torch.optim.Optimizer.load_state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as in torch. Raises a ValueError for complex parameters in Adam, AdamW."""
        self._add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.is_complex() and not self._rule.takes_complex:
                self.param_groups.pop()
                raise ValueError(
                    f"{type(self).__name__} takes no complex parameters, got one of "
                    f"{tuple(parameter.shape)} and {parameter.dtype}: step it with torch.optim.Adam"
                )

    def __getstate__(self) -> dict[str, Any]:
        if self.shard == "world":
            raise TypeError(
                "the optimizer has only this rank's share of the state, which cannot be copied: "
                "use state_dict()"
            )
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_reducer" in self.__dict__:  # from `load_state_dict`, which has changed nothing yet
            self._check_loaded(state["state"], state["param_groups"])
            self._shards.mark_loaded(state["state"])
        super().__setstate__(state)
        if "_reducer" not in self.__dict__:  # in a copy
            self._reducer, self.shard, self._segments, self.gradient_marks = None, "none", {}, {}
            self._unflattened, self._arranged_for, self._is_one_rank = [], None, True
            self._shards = Unsharded(type(self).__name__, None, self._rule)

    def _check_loaded(
        self, states: Mapping[torch.Tensor, dict[str, Any]], groups: Sequence[dict[str, Any]]
    ) -> None:
        kind = type(self).__name__
        for group in groups:
            if missing := [name for name in self._rule.required if name not in group]:
                raise ValueError(
                    f"a parameter group that is loaded lacks {', '.join(missing)}: {kind} loads a "
                    f"state_dict() of ddp.{kind} or torch.optim.{kind}"
                )
            names = self._rule.state_names({"amsgrad": False} | group)
            for parameter in group["params"]:
                if parameter in states:
                    check_state(parameter, states[parameter], names)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Returns torch's `state_dict()`, with the whole state.

        With shard="world" collective: all ranks call it, also where only one saves the result.
        """
        packed: dict[str, Any] = self._own_state_dict()
        index_of = {id(p): index for index, p in enumerate(self._parameters())}
        for segments in self._segments.values():
            whole = self._shards.whole_state(segments, self.state, _STATE_DICT)
            for parameter, state in whole.items():
                index = index_of[id(parameter)]
                packed["state"][index] = {**packed["state"][index], **state}
        return packed

    def _parameters(self) -> Iterator[torch.Tensor]:
        return (parameter for group in self.param_groups for parameter in group["params"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all parameters with their `.grad`; `closure` and the result are as in torch."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # A `_BackwardAndStep` has stepped the segments during backward. At its end the Reducer may
        # have rebuilt its buckets. The step ends in the layout in which it began.
        self.gradient_marks = {}
        if not isinstance(closure, _BackwardAndStep):
            self._arrange()
            if not self._is_one_rank:
                self.gradient_marks = self._shards.mark_gradients(self._parameters())
            for bucket in self._segments:
                self._step_bucket(bucket)
        if self._is_one_rank:
            self._shards.check_step()
            self._shards.forget_loaded()
        else:
            self._shards.end_step(list(self._segments), self.param_groups)
        for unflattened in self._unflattened:
            unflattened.step(self.state, self.param_groups[unflattened.group])
        return loss

    def backward_and_step(
        self, loss: torch.Tensor, *, max_norm: float | None = None
    ) -> torch.Tensor | None:
        """Runs `loss.backward()` and `step()` in one call; steps each bucket when it has arrived.

        The result is bitwise equal to that of the two calls. Use the two calls for GradScaler,
        which must see all gradients before the first parameter changes. With `max_norm` the step
        begins when the last bucket has arrived, and all gradients are scaled so that their global
        2-norm is at most `max_norm`. After backward passes under `no_sync()`, call this outside
        of it.

        Returns:
            With `max_norm` the norm before clipping, float64 of shape (), the same for each
            `shard`; otherwise None.

        Raises:
            RuntimeError: a parameter of the Reducer got no gradient, or none did, or this is inside
                `no_sync()`; nothing was stepped.
            ValueError: `max_norm` is negative.
        """
        if self._reducer is None:
            kind = type(self).__name__
            raise RuntimeError(f"a copy of a ddp.{kind} has no Reducer: call backward() and step()")
        check_current(self._reducer.core)
        if max_norm is not None and not max_norm >= 0:
            raise ValueError(f"max_norm must be 0 or more, got {max_norm}")
        self._arrange(max_norm)
        backward = _BackwardAndStep(loss, self, self._reducer, max_norm)
        if self._is_one_rank:
            self.step(backward)  # so that hooks and schedulers see one step
            self._drop_gradients(self._buckets)
        else:
            with self._shards.averaging(max_norm is not None):
                self.step(backward)
        return backward.norm

    def _drop_gradients(self, buckets: Iterable[Bucket]) -> None:
        """Drops the gradients that `shard` does not keep after `backward_and_step`."""
        # A local gradient would be taken for an average. And a Reducer that rebuilds its buckets
        # would move it while other ranks still read it.
        if self.shard != "none":
            for bucket in buckets:
                for parameter in bucket.parameters():
                    parameter.grad = None

    @torch.no_grad()
    def _clip(self, max_norm: float) -> torch.Tensor:
        segments = list(self._segments.values())
        if self._is_one_rank:
            # As if they were in flat tensors: the norm has the same bits on any number of ranks.
            members = [self._movable(bucket) for bucket in self._buckets]
            squares = total([squares_of_gradients(each) for each in members if each])
            flat = {*map(id, chain.from_iterable(members))}
        else:
            squares = self._shards.sum_of_squares(segments)
            flat = {
                id(segment.parameters[index])
                for segment in chain.from_iterable(segments)
                for index in self._shards.members(segment)
            }
        gradients = [(id(p), p.grad) for p in self._parameters() if p.grad is not None]
        separate = [gradient for key, gradient in gradients if key not in flat]
        for gradient in separate:
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            squares = squares + values.abs().double().square().sum()
        norm = squares.sqrt()
        # As in torch.nn.utils.clip_grad_norm_.
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for segment in chain.from_iterable(segments):
            segment.scale_gradients(factor)
        for gradient in [g for _, g in gradients] if self._is_one_rank else separate:
            gradient.mul_(factor)
        return norm

    def forget_loaded(self) -> None:
        """The next step does not compare what ranks have loaded: all have the same state."""
        self._shards.forget_loaded()

    def synchronize(self) -> None:
        """With `overlap_forward`, waits until all parameters have arrived. Else a no-op."""
        self._shards.synchronize()

    # 1. arrange ---------------------------------------------------------------------------------

    @property
    def _buckets(self) -> Sequence[FlatBucket]:
        return () if self._reducer is None else self._reducer.core.flat_buckets

    def _check_groups(self) -> None:
        if self.shard != "none" and any(None in self._groups_of(b) for b in self._buckets):
            raise ValueError(
                "params must hold all of the reducer's parameters: the gradient of another one "
                "would not be averaged"
            )

    @torch.no_grad()
    def _arrange(self, max_norm: float | None = None) -> None:
        """Moves parameters into flat tensors if buckets or groups have changed. Idempotent."""
        self._shards.begin_step(max_norm)
        if self._reducer is not None:
            was_one_rank = self._is_one_rank
            self._is_one_rank = self._reducer.core.comm.averages_over_one_rank()
            if was_one_rank and not self._is_one_rank:
                self._reducer.keep_bucket_views()
        buckets = () if self._is_one_rank else self._buckets
        groups = [[*map(id, group["params"])] for group in self.param_groups]
        if (buckets, groups) == self._arranged_for:
            return
        self._check_groups()
        if not self._is_one_rank:
            self._shards.before_arranging()
        before = list(self._segments.values())
        # Includes parameters in no bucket, which may share memory with one that would move.
        self._shared = overlapping(list(self._parameters()))
        self._segments = {bucket: self._make_segments(bucket) for bucket in buckets}
        moved: dict[torch.Tensor, tuple[FlatParams, int]] = {
            parameter: (segment, index)
            for segment in chain.from_iterable(self._segments.values())
            for index, parameter in enumerate(segment.parameters)
        }
        others = [[p for p in group["params"] if p not in moved] for group in self.param_groups]
        self._unflattened = [
            Unflattened(parameters, index, self._rule, self._shared)
            for index, parameters in enumerate(others)
            if parameters
        ]
        if not self._is_one_rank:
            self._shards.arranged(self._segments, [*chain.from_iterable(others)])
        for segments in before:  # bucket by bucket, since the whole state may not fit into memory
            for parameter, whole in self._shards.whole_state(segments, self.state).items():
                self.state[parameter].update(whole)
                if parameter in moved:
                    segment, index = moved[parameter]
                    segment.gather([index], self.state, self.param_groups[segment.group])
        self._arranged_for = (buckets, groups)

    def _movable(self, bucket: FlatBucket) -> list[torch.nn.Parameter]:
        groups = zip(self._groups_that_move(bucket), bucket.parameters(), strict=True)
        return [parameter for group, parameter in groups if group is not None]

    def _groups_that_move(self, bucket: FlatBucket) -> list[int | None]:
        """Returns the group of each member; None for one that cannot be in a flat tensor."""
        rows = zip(self._groups_of(bucket), bucket.parameters(), bucket.views, strict=True)
        shared = self._shared
        return [g if can_move(p, view) and id(p) not in shared else None for g, p, view in rows]

    def _make_segments(self, bucket: FlatBucket) -> list[FlatParams]:
        """Moves the bucket's parameters into segments of one group, except those that cannot."""
        groups = self._groups_that_move(bucket)
        offsets, itemsize = bucket.offsets, bucket.flat.itemsize
        cuts = [0]
        for i in range(1, len(groups)):
            odd = (offsets[i] - offsets[cuts[-1]]) * itemsize % CACHE_LINE != 0
            # A part that begins inside a chunk might not begin at a cache line of a parameter.
            separate = odd and self._shards.cuts and not self._rule.exact_anywhere
            if separate or groups[i] != groups[i - 1]:
                cuts.append(i)
        for_state, for_parameters = self._shards.allocate, self._shards.allocator(bucket)
        return [
            FlatParams(bucket, slice(begin, end), group, self._rule, for_state, for_parameters)
            for begin, end in pairwise([*cuts, len(groups)])
            if (group := groups[begin]) is not None
        ]

    def _groups_of(self, bucket: FlatBucket) -> list[int | None]:
        index_of = {id(p): i for i, group in enumerate(self.param_groups) for p in group["params"]}
        return [index_of.get(id(parameter)) for parameter in bucket.parameters()]

    # 2. step each segment -------------------------------------------------------------------------

    @torch.no_grad()
    def _step_bucket(self, bucket: Bucket) -> None:
        for segment in self._segments.get(bucket, ()) if isinstance(bucket, FlatBucket) else ():
            group, parameters = self.param_groups[segment.group], segment.parameters
            members = self._shards.members(segment)
            spans = segment.gather(members, self.state, group)
            self._shards.step(segment, spans, group)
            if "step" in segment.state:
                segment.count(spans)
            if len(members) < len(parameters):
                self._step_out_of_place(segment, members, group)
                parameters = [parameters[index] for index in members]
            # Autograd counts writes to a parameter, but not those through other tensors.
            increment_version(parameters)

    # 3. the others ------------------------------------------------------------------------------

    def _step_out_of_place(
        self, segment: FlatParams, in_place: Sequence[int], group: dict[str, Any]
    ) -> None:
        for index in sorted({*range(len(segment.parameters))}.difference(in_place)):
            parameter = segment.parameters[index]
            if parameter.grad is not None:
                state = self.state[parameter] if self._rule.state_names(group) else {}
                self._rule.step(parameter, parameter.grad, state, group)


class _BackwardAndStep:
    """The closure of `backward_and_step`, which steps buckets during `backward()`."""

    def __init__(
        self, loss: torch.Tensor, optimizer: FlatOptimizer, reducer: Reducer, clip: float | None
    ) -> None:
        self._loss, self._optimizer, self._reducer, self._clip = loss, optimizer, reducer, clip
        self.norm = None if clip is None else torch.zeros((), dtype=torch.float64, device="cpu")

    def __call__(self) -> torch.Tensor:
        optimizer, iteration = self._optimizer, self._reducer.core.iteration
        at_once = self._clip is None and optimizer.shard == "none"
        step_bucket = optimizer._step_bucket if at_once else self._step_landed
        with self._reducer.core.step_in_backward(step_bucket):
            self._loss.backward()
        if self._reducer.core.iteration == iteration:
            self._reducer.check_complete()
            raise RuntimeError(
                "nothing was averaged, so nothing was stepped: backward_and_step() is inside "
                "no_sync(), or the loss depends on none of the Reducer's parameters"
            )
        return self._loss

    def _step_landed(self, bucket: Bucket) -> None:
        optimizer, landed = self._optimizer, [bucket]
        if self._clip is not None:
            if bucket is not self._reducer.core.all_buckets[-1]:
                return
            landed, self.norm = [*optimizer._segments], optimizer._clip(self._clip)
        for each in landed:
            if isinstance(each, FlatBucket) and each in optimizer._segments:
                optimizer._step_bucket(each)
                optimizer._drop_gradients([each])


class SGD(FlatOptimizer, torch.optim.SGD):
    """torch.optim.SGD with one flat call per bucket.

    `params`, `reducer`, `shard` and `overlap_forward` are described in `optim/flat_optimizer.py`.
    The bits are those of `foreach=False` and `foreach=True`. With `fused=True` torch rounds the
    momentum of a parameter's last elements differently.

    Follows: torch/optim/sgd.py, `_single_tensor_sgd` and `_fused_sgd`.
    """

    _rule = SGD_RULE


class Adam(FlatOptimizer, torch.optim.Adam):
    """torch.optim.Adam with one flat call per bucket, and the bits of `fused=True`.

    `params`, `reducer`, `shard` and `overlap_forward` are described in `optim/flat_optimizer.py`.
    Sparse gradients raise a RuntimeError.

    Follows: torch/optim/adam.py, `_fused_adam`.
    """

    _rule = ADAM_RULE


class AdamW(FlatOptimizer, torch.optim.AdamW):
    """torch.optim.AdamW with one flat call per bucket: `ddp.Adam` with decoupled weight decay.

    Follows: torch/optim/adamw.py, and `_fused_adam` in torch/optim/adam.py.
    """

    _rule = ADAM_RULE
