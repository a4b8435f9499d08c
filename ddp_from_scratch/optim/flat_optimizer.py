"""Optimizers on the Reducer's flat buckets, one call for each bucket instead of one per parameter.

A bucket's gradients lie in one flat tensor already. Here its parameters and their state do, too, at
the same offsets:

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

from ddp_from_scratch.core.bucket import Bucket
from ddp_from_scratch.core.extension import Extension
from ddp_from_scratch.core.memory import in_huge_pages
from ddp_from_scratch.optim.flat_params import FlatParams, can_move, overlapping
from ddp_from_scratch.optim.update_rules import ADAM_RULE, CACHE_LINE, SGD_RULE, UpdateRule
from ddp_from_scratch.reducer import Reducer


def _without_dynamo(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method of torch's optimizers so that a call does not import torch._dynamo."""

    # The import takes a second. torch wraps the method for torch.compile, which imports it anyway.
    @wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        imported = "torch._dynamo" in sys.modules
        return (method if imported else inspect.unwrap(method))(*args, **options)

    return call


class FlatOptimizer(torch.optim.Optimizer):
    """One of torch's optimizers, with one flat call per bucket and torch's bits.

    A subclass names torch's class, too, as its second base.

    State, parameter groups and `state_dict()` are those of torch's class, and either one loads the
    other's. Learning-rate schedulers, GradScaler, gradient clipping and step hooks work as with
    torch's.

    The phases of a step:

    1. arrange: if the Reducer has laid its buckets out again, or a parameter group has changed, the
       parameters are moved into flat tensors, neighbours of one group together: a *run*.
    2. step the members of each run, neighbours with one flat call.
    3. one by one, with the same bits: members that are not in place (`.grad` is not the bucket's
       window, `.data` was replaced), and at the end parameters in no bucket and those that cannot
       move, such as 16-bit floats on a CPU.

    Parameters move in the first step, and rarely later. A view of a parameter that was made before
    does not follow it; `state_dict()`, `load_state_dict()` and deep copies are not affected.

    A copy of the optimizer (deep or pickled) has no Reducer and steps one by one.

    Args:
        params: parameters, named parameters or groups, as every optimizer takes them. Some may not
            be the Reducer's. Neighbours of one group are stepped together, so groups that alternate
            from one parameter to the next (weights and biases, say) leave little of the gain.
        args, settings: as torch's class takes them, without those that choose a kernel.
        reducer: averages the gradients. From now on it keeps them in its buckets, as with
            `gradient_as_bucket_view=True`.

    Raises:
        TypeError: a setting that chooses a kernel (`foreach`, `fused`, `capturable`,
            `differentiable`).
        ValueError: a value out of its range, as torch's class; none of the Reducer's parameters is
            among `params`; a parameter is complex, and this optimizer takes none (Adam, AdamW).
        RuntimeError: see `Reducer.keep_bucket_views`.
    """

    _rule: ClassVar[UpdateRule]
    # True if a run is stepped in parts, each by another rank.
    _cuts_gradients: ClassVar[bool] = False

    def __init__(
        self, params: Iterable[Any], *args: Any, reducer: Reducer, **settings: Any
    ) -> None:
        for name in ("foreach", "fused", "capturable", "differentiable"):
            if name in settings:
                raise TypeError(f"{type(self).__name__} takes no {name}: it has one kernel")
        super().__init__(params, *args, **settings)
        # Saved in the groups: torch's class, where it loads them, goes on with the same bits.
        for group in (self.defaults, *self.param_groups):
            group["fused"] = self._rule.fused
        # None in a copy of the optimizer.
        self._reducer: Reducer | None = reducer
        if not any(group is not None for b in self._buckets for group in self._groups_of(b)):
            raise ValueError("none of params is one of the reducer's parameters")
        reducer.keep_bucket_views()

    _add_param_group = _without_dynamo(torch.optim.Optimizer.add_param_group)
    zero_grad = _without_dynamo(torch.optim.Optimizer.zero_grad)
    state_dict = _without_dynamo(torch.optim.Optimizer.state_dict)
    load_state_dict = _without_dynamo(torch.optim.Optimizer.load_state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch's class; complex parameters only if this optimizer takes them."""
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
        """Steps all parameters with their `.grad`; `closure` and the result are torch's.

        Raises:
            RuntimeError: gradients are not averaged yet (from the Reducer).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._arrange()
        # That closure has stepped the runs itself, in the course of backward.
        if not isinstance(closure, _BackwardAndStep):
            for bucket in self._runs:
                self._step_bucket(bucket)
        for parameter, group in self._alone:
            self._step_alone(parameter, self.param_groups[group])
        return loss

    def backward_and_step(self, loss: torch.Tensor) -> None:
        """Runs `loss.backward()` and `step()` in one: steps a bucket as soon as it has landed.

        The first buckets are stepped while the last are under way. The result is that of the two
        calls, bit for bit. It is a call of its own, since nothing can be done between backward and
        step here: clipping by the global norm and GradScaler look at every gradient before the
        first parameter changes, so they need the two calls.

        Raises:
            RuntimeError: a parameter of the Reducer got no gradient, or none did, or this is inside
                `no_sync()`. Nothing was stepped then. Also after an earlier part of the loss went
                backward outside of `no_sync()`.
        """
        if self._reducer is None:
            name = type(self).__name__
            raise RuntimeError(f"a copy of a ddp.{name} has no Reducer: call backward() and step()")
        self._arrange()
        # Through step(), so that hooks and schedulers see one step.
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
        # Also parameters in no bucket: one of these may share its memory with one that would move.
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
        """Moves the bucket's parameters in runs, each of one group; some cannot move."""
        rows = zip(self._groups_of(bucket), bucket.parameters(), bucket.views, strict=True)
        # None for a parameter that stays where it is.
        groups = [g if can_move(p, view) and id(p) not in shared else None for g, p, view in rows]
        offsets, itemsize = bucket.offsets, bucket.buffer().itemsize
        cuts = [0]
        for i in range(1, len(groups)):
            odd = (offsets[i] - offsets[cuts[-1]]) * itemsize % CACHE_LINE != 0
            # A part that begins within a piece need not begin at a cache line of a parameter.
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
        """Returns the index of each member's parameter group; None for a parameter of no group."""
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
            # Autograd counts changes of a parameter, not of the memory that it lies in.
            increment_version([run.parameters[index] for index in members])
            for index in set(range(len(run.parameters))).difference(members):
                self._step_alone(run.parameters[index], group)

    # 3. one by one ------------------------------------------------------------------------------

    def _step_alone(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        if parameter.grad is not None:
            state = self.state[parameter] if self._rule.state_names(group) else {}
            self._rule.step(parameter, parameter.grad, state, group)


class _BackwardAndStep(Extension):
    """The closure of `backward_and_step`: steps each bucket in the course of `backward()`."""

    def __init__(self, loss: torch.Tensor, optimizer: FlatOptimizer, reducer: Reducer) -> None:
        self._loss, self._optimizer, self._reducer = loss, optimizer, reducer
        self._stepped = False

    def __call__(self) -> torch.Tensor:
        self._reducer.add_extension(self)
        try:
            self._loss.backward()
        finally:
            # Also after an error: a later backward() must not step.
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
            # All other parameters are stepped later, one by one.
            self._optimizer._step_bucket(bucket)
            self._stepped = True


class SGD(FlatOptimizer, torch.optim.SGD):
    """torch.optim.SGD with one flat call per bucket; the same parameters to the last bit.

    They are those of `foreach=False` and `foreach=True`. With `fused=True` torch rounds the
    momentum of a parameter's last elements otherwise.

    Args: lr, momentum, dampening, weight_decay, nesterov and maximize as in torch.optim.SGD. See
        `FlatOptimizer` for params and reducer, errors, and what a step does.

    Follows: torch/optim/sgd.py, `_single_tensor_sgd` and `_fused_sgd`.
    """

    _rule = SGD_RULE


class Adam(FlatOptimizer, torch.optim.Adam):
    """torch.optim.Adam with one flat call per bucket; the same parameters to the last bit.

    They are those of `fused=True`.

    Args: lr, betas, eps, weight_decay, amsgrad and maximize as in torch.optim.Adam. See
        `FlatOptimizer` for params and reducer, errors, and what a step does.

    Raises:
        RuntimeError: from a step: a gradient is sparse.

    Follows: torch/optim/adam.py, `_fused_adam`.
    """

    _rule = ADAM_RULE


class AdamW(FlatOptimizer, torch.optim.AdamW):
    """torch.optim.AdamW with one flat call per bucket: as `ddp.Adam`, with decoupled decay.

    Follows: torch/optim/adamw.py, and `_fused_adam` in torch/optim/adam.py.
    """

    _rule = ADAM_RULE
