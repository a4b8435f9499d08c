"""Optimizers on the Reducer's flat buckets: one call per bucket instead of one per parameter.

A bucket's gradients are in one flat tensor. Here so are its parameters and their state, at the same
offsets:

    gradients       |<- fc2.bias ->|<------ fc2.weight ------>|    `bucket.py`: `.grad` is a window
    parameters      |<- fc2.bias ->|<------ fc2.weight ------>|    `flat_params.py`: so is `.data`,
    momentum        |<- fc2.bias ->|<------ fc2.weight ------>|    and each tensor of the state
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch.autograd.graph import increment_version

from ddp_from_scratch.common.memory import in_huge_pages
from ddp_from_scratch.core.bucket import Bucket
from ddp_from_scratch.core.extension import Extension
from ddp_from_scratch.optim import flat_params
from ddp_from_scratch.optim.flat_params import FlatParams, UpdateRule, can_move, overlapping
from ddp_from_scratch.reducer import Reducer


def _without_dynamo(method: Callable[..., Any]) -> Callable[..., Any]:
    # torch wraps it for torch.compile, and the wrapper imports torch._dynamo, which takes a second.
    @wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        imported = "torch._dynamo" in sys.modules
        return (method if imported else inspect.unwrap(method))(*args, **options)

    return call


class FlatOptimizer(torch.optim.Optimizer):
    """One of torch's optimizers, with one flat call per bucket and torch's bits.

    The second base of a subclass is torch's class. State, parameter groups and `state_dict()` are
    that class's, and each class loads the other's. Schedulers, GradScaler, gradient clipping and
    step hooks work, too.

    The phases of a step:

    1. arrange: if the Reducer has rebuilt its buckets, or a parameter group has changed, parameters
       move into flat tensors. Neighbours of one group form a *run*, in one tensor.
    2. step the members of each run with flat calls.
    3. step the others one by one, with the same bits: members that are not in place (`.grad` is not
       the bucket's window, `.data` was replaced), then parameters in no bucket, and those that
       cannot move, such as 16-bit floats on a CPU.

    A view of a parameter that was made before it moved does not follow it; `state_dict()`,
    `load_state_dict()` and deep copies are not affected. A copy of the optimizer (deep or pickled)
    has no Reducer and steps one by one.

    Args:
        params: parameters, named parameters or groups, as for any optimizer. Some may not be the
            Reducer's. Only neighbours of one group share a call, so groups that alternate between
            parameters (weights and biases, for example) gain little.
        args, settings: those of torch's class, except settings that choose a kernel.
        reducer: averages the gradients. It switches to `gradient_as_bucket_view=True`.

    Raises:
        TypeError: a setting that chooses a kernel (`foreach`, `fused`, `capturable`,
            `differentiable`).
        ValueError: a value out of range, as in torch's class; none of the Reducer's parameters is
            among `params`; a parameter is complex, and this optimizer takes none (Adam, AdamW).
        RuntimeError: see `Reducer.keep_bucket_views`.
    """

    _rule: ClassVar[UpdateRule]
    _cuts_gradients: ClassVar[bool] = False  # True if several ranks each step a part of a run

    def __init__(
        self, params: Iterable[Any], *args: Any, reducer: Reducer, **settings: Any
    ) -> None:
        for name in ("foreach", "fused", "capturable", "differentiable"):
            if name in settings:
                raise TypeError(f"{type(self).__name__} takes no {name}: it has one kernel")
        super().__init__(params, *args, **settings)
        # Saved in the groups, so that torch's class has the same bits after it loads them.
        for group in (self.defaults, *self.param_groups):
            group["fused"] = self._rule.fused
        self._reducer: Reducer | None = reducer  # None in a copy of the optimizer
        if not any(group is not None for b in self._buckets for group in self._groups_of(b)):
            raise ValueError("none of params is one of the reducer's parameters")
        reducer.keep_bucket_views()

    _add_param_group = _without_dynamo(torch.optim.Optimizer.add_param_group)
    zero_grad = _without_dynamo(torch.optim.Optimizer.zero_grad)
    state_dict = _without_dynamo(torch.optim.Optimizer.state_dict)
    load_state_dict = _without_dynamo(torch.optim.Optimizer.load_state_dict)

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

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_reducer", None)  # in a copy

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all parameters with their `.grad`; `closure` and the result are as in torch."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._arrange()
        # A `_BackwardAndStep` has stepped the runs during backward.
        if not isinstance(closure, _BackwardAndStep):
            for bucket in self._runs:
                self._step_bucket(bucket)
        for parameter, group in self._alone:
            self._step_alone(parameter, self.param_groups[group])
        return loss

    def backward_and_step(self, loss: torch.Tensor) -> None:
        """Runs `loss.backward()` and `step()` in one, and steps each bucket when it has landed.

        The first buckets step while the last are in flight. The result is that of the two calls,
        bit for bit. Use the two calls for clipping by the global norm and GradScaler, which must
        see every gradient before the first parameter changes.

        Raises:
            RuntimeError: a parameter of the Reducer got no gradient, or none did, or this is inside
                `no_sync()`; nothing was stepped.
        """
        if self._reducer is None:
            name = type(self).__name__
            raise RuntimeError(f"a copy of a ddp.{name} has no Reducer: call backward() and step()")
        self._arrange()
        # Calls `step`, so that hooks and schedulers see one step.
        self.step(_BackwardAndStep(loss, self, self._reducer))

    # 1. arrange ---------------------------------------------------------------------------------

    @property
    def _buckets(self) -> Sequence[Bucket]:
        return () if self._reducer is None else self._reducer.flat_buckets

    @torch.no_grad()
    def _arrange(self) -> None:
        """Moves parameters into flat tensors if buckets or groups have changed. Idempotent."""
        buckets = self._buckets
        groups = [[id(p) for p in group["params"]] for group in self.param_groups]
        if (buckets, groups) == self.__dict__.get("_arranged_for"):
            return
        # Includes parameters in no bucket, which may share memory with one that would move.
        shared = overlapping([p for group in self.param_groups for p in group["params"]])
        self._runs: dict[Bucket, list[FlatParams]] = {
            bucket: self._make_runs(bucket, shared) for bucket in buckets
        }
        moved = {id(p) for runs in self._runs.values() for run in runs for p in run.parameters}
        self._alone = [
            (parameter, index)
            for index, group in enumerate(self.param_groups)
            for parameter in group["params"]
            if id(parameter) not in moved
        ]
        self._arranged_for = (buckets, groups)

    def _make_runs(self, bucket: Bucket, shared: set[int]) -> list[FlatParams]:
        """Moves the bucket's parameters into runs of one group each, except those that cannot."""
        rows = zip(self._groups_of(bucket), bucket.parameters(), bucket.views, strict=True)
        # None for a parameter that does not move.
        groups = [g if can_move(p, view) and id(p) not in shared else None for g, p, view in rows]
        offsets, itemsize = bucket.offsets, bucket.buffer().itemsize
        cuts = [0]
        for i in range(1, len(groups)):
            odd = (offsets[i] - offsets[cuts[-1]]) * itemsize % flat_params.CACHE_LINE != 0
            # A part that begins inside a piece might not begin at a cache line of a parameter.
            apart = odd and self._cuts_gradients and not self._rule.exact_anywhere
            if apart or groups[i] != groups[i - 1]:
                cuts.append(i)
        return [
            FlatParams(bucket, slice(begin, end), group, self._rule, self._allocate)
            for begin, end in pairwise([*cuts, len(groups)])
            if (group := groups[begin]) is not None
        ]

    def _allocate(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        return in_huge_pages(like.new_empty(numel))

    def _groups_of(self, bucket: Bucket) -> list[int | None]:
        groups = enumerate(self.param_groups)
        index_of = {id(p): index for index, group in groups for p in group["params"]}
        return [index_of.get(id(parameter)) for parameter in bucket.parameters()]

    # 2. step each run ---------------------------------------------------------------------------

    @torch.no_grad()
    def _step_bucket(self, bucket: Bucket) -> None:
        for run in self._runs[bucket]:
            group = self.param_groups[run.group]
            members = run.in_place()
            stretches = run.gather(members, self.state, group)
            run.update(stretches, group, 0, run.gradient)
            run.count(stretches)
            # Autograd counts writes to a parameter, but not those through other tensors.
            increment_version([run.parameters[index] for index in members])
            for index in set(range(len(run.parameters))).difference(members):
                self._step_alone(run.parameters[index], group)

    # 3. one by one ------------------------------------------------------------------------------

    def _step_alone(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        if parameter.grad is not None:
            state = self.state[parameter] if self._rule.state_names(group) else {}
            self._rule.step(parameter, parameter.grad, state, group)


class _BackwardAndStep(Extension):
    """The closure of `backward_and_step`, which steps buckets during `backward()`."""

    def __init__(self, loss: torch.Tensor, optimizer: FlatOptimizer, reducer: Reducer) -> None:
        self._loss, self._optimizer, self._reducer = loss, optimizer, reducer
        self._stepped = False

    def __call__(self) -> torch.Tensor:
        self._reducer.add_extension(self)
        try:
            self._loss.backward()
        finally:
            # Also after an error, since a later backward() must not step.
            self._reducer.remove_extension(self)
        if not self._stepped:
            self._reducer.check_complete()
            raise RuntimeError(
                "nothing was averaged, so nothing was stepped: backward_and_step() is inside "
                "no_sync(), or the loss depends on none of the Reducer's parameters"
            )
        return self._loss

    def on_finished(self, iteration: int, bucket: Bucket, takes_part: bool) -> None:
        if takes_part and bucket in self._optimizer._runs:
            self._optimizer._step_bucket(bucket)
            self._stepped = True


class SGD(FlatOptimizer, torch.optim.SGD):
    """torch.optim.SGD with one flat call per bucket; for params and reducer see `FlatOptimizer`.

    The bits are those of `foreach=False` and `foreach=True`. With `fused=True` torch rounds the
    momentum of a parameter's last elements differently.

    Follows: torch/optim/sgd.py, `_single_tensor_sgd` and `_fused_sgd`.
    """

    _rule = flat_params.SGD_RULE


class Adam(FlatOptimizer, torch.optim.Adam):
    """torch.optim.Adam with one flat call per bucket, and the bits of `fused=True`.

    For params and reducer see `FlatOptimizer`. Sparse gradients raise a RuntimeError.

    Follows: torch/optim/adam.py, `_fused_adam`.
    """

    _rule = flat_params.ADAM_RULE


class AdamW(FlatOptimizer, torch.optim.AdamW):
    """torch.optim.AdamW with one flat call per bucket: `ddp.Adam` with decoupled weight decay.

    Follows: torch/optim/adamw.py, and `_fused_adam` in torch/optim/adam.py.
    """

    _rule = flat_params.ADAM_RULE
