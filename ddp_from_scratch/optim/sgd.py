"""SGD on the Reducer's flat buckets: what uses the averages at the end of a gradient's way.

A bucket's gradients lie in one flat tensor already. Here its parameters and their momentum do, too,
at the same offsets, so that a step is one call for each bucket instead of one for each parameter:

    gradients       |<- fc2.bias ->|<------ fc2.weight ------>|    bucket.py: `.grad`s are windows
    parameters      |<- fc2.bias ->|<------ fc2.weight ------>|    flat_run.py: `.data`s are, too,
    momentum        |<- fc2.bias ->|<------ fc2.weight ------>|    and momentum buffers
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ddp_from_scratch.buckets.bucket import Bucket
from ddp_from_scratch.buckets.gradient_bucket import GradientBucket
from ddp_from_scratch.buckets.memory import in_huge_pages
from ddp_from_scratch.buckets.observer import Observer
from ddp_from_scratch.optim.flat_params import FlatRun, flat_runs, overlapping
from ddp_from_scratch.reducer.reducer import Reducer

# Three arrays of this many float32 stay in the cache from the first operation of a step to its
# last, and there are few enough calls for what a call costs to be small beside them.
_CHUNK = 2**18


def _without_dynamo(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of torch's optimizers that does not import torch._dynamo, for a second, to call it.

    torch wraps it so that torch.compile does not trace it. Nothing does before that import.
    """

    @wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        imported = "torch._dynamo" in sys.modules
        return (method if imported else inspect.unwrap(method))(*args, **options)

    return call


class SGD(torch.optim.SGD):
    """torch.optim.SGD with one flat call per bucket; the same parameters to the last bit.

    State, parameter groups and `state_dict()` are those of torch.optim.SGD, and either one loads
    what the other saved. Learning-rate schedulers, GradScaler, gradient clipping and step hooks
    work on it as on torch's. The order of operations is that of `foreach=False`.

    The phases of a step:

    1. arrange: when the Reducer has laid its buckets out anew, or a parameter group has changed,
       the parameters are moved into flat tensors, neighbours of one group together: a *run*.
    2. step each run with one flat call.
    3. one by one, with the same bits: the members of a run that is not whole (a gradient is None
       or not the bucket's window, `.data` was replaced), parameters in no bucket, and 16-bit
       floats on a CPU (where torch rounds the last few elements of a tensor otherwise).

    Parameters move, once in general, in the first step. What was a view of one before then is not
    one of it any longer; neither `state_dict()`, nor `load_state_dict()`, nor a deep copy notices.

    A copy of the optimizer (deep or pickled) has no Reducer and steps one by one.

    Args:
        params: parameters, named parameters or groups, as every optimizer takes them. Some may be
            none of the Reducer's.
        lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch.optim.SGD. Neighbours
            of one group are stepped together, so groups that alternate from one parameter to the
            next (weights and biases, say) leave little of the gain.
        reducer: averages the gradients; made with `gradient_as_bucket_view=True`.

    Raises:
        ValueError: a value out of its range, as torch.optim.SGD; the Reducer keeps no gradients in
            its buckets; none of its parameters is among `params`.

    Follows: torch/optim/sgd.py, `_single_tensor_sgd`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        reducer: Reducer,
    ) -> None:
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, maximize=maximize)
        if not all(bucket.gradient_as_bucket_view for bucket in reducer.flat_buckets):
            raise ValueError("reducer must be made with gradient_as_bucket_view=True")
        self._reducer: Reducer | None = reducer
        if not any(group is not None for b in reducer.flat_buckets for group in self._groups_of(b)):
            raise ValueError("none of params is one of the reducer's parameters")

    add_param_group = _without_dynamo(torch.optim.SGD.add_param_group)
    zero_grad = _without_dynamo(torch.optim.SGD.zero_grad)
    state_dict = _without_dynamo(torch.optim.SGD.state_dict)
    load_state_dict = _without_dynamo(torch.optim.SGD.load_state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.__dict__.setdefault("_reducer", None)  # in a copy

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step with what `.grad` holds.

        Args:
            closure: computes the loss and its gradients first; as in torch.optim.SGD.

        Returns:
            What `closure` returned, or None.

        Raises:
            RuntimeError: gradients are not averaged yet (from the Reducer).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._arrange()
        if not isinstance(closure, _BackwardAndStep):
            for runs in self._runs.values():
                self._step_runs(runs)
        for parameter, group in self._outside:
            self._step_alone(parameter, self.param_groups[group])
        return loss

    def backward_and_step(self, loss: torch.Tensor) -> None:
        """`loss.backward()` and `step()` in one: a bucket is stepped as soon as it has landed.

        While the first buckets are being stepped the last are still on their way. The result is
        that of the two calls, bit for bit.

        It is a call of its own, and not how `step()` behaves, because nothing can be done between
        backward and step here: clipping by the global norm and GradScaler look at every gradient
        before the first parameter changes, so they need the two calls. Between those,
        `.grad` must hold averages; that is why `backward()` waits for them.

        Raises:
            RuntimeError: a parameter of the Reducer got no gradient, or none did, or this is
                inside `no_sync()`. Nothing was stepped then. Also after an earlier part of the
                loss went backward outside of `no_sync()`.
        """
        if self._reducer is None:
            raise RuntimeError("a copy of a ddp.SGD has no Reducer: call backward() and step()")
        self._arrange()
        backward = _BackwardAndStep(loss, self._reducer, self._runs, self._step_runs)
        # Through step(), so that it counts as one for hooks and schedulers.
        self.step(backward)

    # 1. arrange ---------------------------------------------------------------------------------

    @torch.no_grad()
    def _arrange(self) -> None:
        """Moves parameters into flat tensors if buckets or groups are not as they were.

        Idempotent: otherwise it does nothing.
        """
        buckets = () if self._reducer is None else self._reducer.flat_buckets
        groups = [[id(p) for p in group["params"]] for group in self.param_groups]
        if (buckets, groups) == self.__dict__.get("_arranged_for"):
            return
        inside = {id(parameter) for bucket in buckets for parameter in bucket.parameters()}
        self._outside = [
            (parameter, index)
            for index, group in enumerate(self.param_groups)
            for parameter in group["params"]
            if id(parameter) not in inside
        ]
        shared = overlapping([p for group in self.param_groups for p in group["params"]])
        self._runs: dict[GradientBucket, list[FlatRun]] = {
            b: flat_runs(b, self._groups_of(b), shared, self._allocate) for b in buckets
        }
        self._arranged_for = (buckets, groups)

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Where parameters and momentum are moved to."""
        return in_huge_pages(torch.empty_like(like))

    def _groups_of(self, bucket: Bucket) -> list[int | None]:
        """The index of the parameter group of each member; None for those not ours."""
        group_of = {
            id(parameter): index
            for index, group in enumerate(self.param_groups)
            for parameter in group["params"]
        }
        return [group_of.get(id(parameter)) for parameter in bucket.parameters()]

    # 2. step each run ---------------------------------------------------------------------------

    @torch.no_grad()
    def _step_runs(self, runs: Sequence[FlatRun]) -> None:
        for run in runs:
            group = self.param_groups[run.group]
            momentum, first = None, False
            whole = run.in_place()
            if whole and group["momentum"] != 0:
                states = [self.state[parameter] for parameter in run.parameters]
                whole, momentum, first = run.gather_momentum(states)
            if whole:
                _update_flat(run.flat, run.gradient, momentum, first, group)
                # Autograd counts changes of a parameter, not of the memory that it lies in.
                increment_version(run.parameters)
            else:
                for parameter in run.parameters:
                    self._step_alone(parameter, group)

    # 3. one by one ------------------------------------------------------------------------------

    def _step_alone(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        if parameter.grad is None:
            return
        momentum, first = None, False
        if group["momentum"] != 0:
            state = self.state[parameter]
            momentum = state.get("momentum_buffer")
            first = momentum is None
            if momentum is None:
                momentum = state["momentum_buffer"] = torch.empty_like(parameter.grad)
        update(parameter, parameter.grad, momentum, first, group)


class _BackwardAndStep(Observer):
    """The closure of `SGD.backward_and_step`: steps each bucket in the course of `backward()`."""

    def __init__(
        self,
        loss: torch.Tensor,
        reducer: Reducer,
        runs: Mapping[GradientBucket, Sequence[FlatRun]],
        step: Callable[[Sequence[FlatRun]], None],
    ) -> None:
        self._loss, self._reducer, self._runs, self._step = loss, reducer, runs, step
        self._stepped = 0

    def __call__(self) -> torch.Tensor:
        self._reducer.add_observer(self)
        try:
            self._loss.backward()
        finally:
            self._reducer.remove_observer(self)
        if not self._stepped:
            self._reducer.checks.check_complete()
            raise RuntimeError(
                "nothing was averaged, so nothing was stepped: backward_and_step() is inside "
                "no_sync(), or the loss depends on none of the Reducer's parameters"
            )
        return self._loss

    def on_landed(self, iteration: int, bucket: GradientBucket) -> None:
        """Steps the bucket's parameters, but for sparse gradients, which are stepped alone."""
        if bucket in self._runs:
            self._step(self._runs[bucket])
            self._stepped += 1


def _update_flat(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    momentum: torch.Tensor | None,
    first: bool,
    group: dict[str, Any],
) -> None:
    """`update` of flat tensors; on a CPU in pieces that stay in its cache.

    Not with torch's fused kernel, which reads them once but rounds the last few elements otherwise.
    """
    if parameter.device.type != "cpu":
        update(parameter, gradient, momentum, first, group)
        return
    cut = partial(torch.split, split_size_or_sections=_CHUNK * torch.get_num_threads())
    parts = cut(parameter)
    momenta: Sequence[torch.Tensor | None] = [None] * len(parts)
    if momentum is not None:
        momenta = cut(momentum)
    for p, g, m in zip(parts, cut(gradient), momenta, strict=True):
        update(p, g, m, first, group)


def update(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    momentum: torch.Tensor | None,
    first: bool,
    group: dict[str, Any],
) -> None:
    """The arithmetic of SGD, in torch's order of operations. `gradient` stays as it is.

    Args:
        parameter: is stepped.
        gradient: of the parameter's shape.
        momentum: is updated; None without momentum.
        first: `momentum` has no values yet and becomes the gradient, undampened.
        group: lr, momentum, dampening, weight_decay, nesterov and maximize.
    """
    if group["maximize"]:
        gradient = -gradient
    if group["weight_decay"] != 0:
        gradient = gradient.add(parameter, alpha=float(group["weight_decay"]))
    if momentum is not None:
        if first:
            momentum.copy_(gradient)
        else:
            momentum.mul_(group["momentum"]).add_(gradient, alpha=1 - group["dampening"])
        if group["nesterov"]:
            gradient = gradient.add(momentum, alpha=group["momentum"])
        else:
            gradient = momentum
    parameter.add_(gradient, alpha=-float(group["lr"]))
