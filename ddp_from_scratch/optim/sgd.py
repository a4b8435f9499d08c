"""SGD on the Reducer's flat buckets, one call for each bucket instead of one for each parameter.

A bucket's gradients lie in one flat tensor already. Here its parameters and their momentum do, too,
at the same offsets:

    gradients       |<- fc2.bias ->|<------ fc2.weight ------>|    `bucket.py`: `.grad` is a window
    parameters      |<- fc2.bias ->|<------ fc2.weight ------>|    `flat_params.py`: so is `.data`,
    momentum        |<- fc2.bias ->|<------ fc2.weight ------>|    and the momentum buffer
"""

import inspect
import sys
from collections.abc import Callable, Container, Iterable
from functools import partial, wraps
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ddp_from_scratch.buckets.bucket import Bucket
from ddp_from_scratch.buckets.gradient_bucket import GradientBucket
from ddp_from_scratch.buckets.memory import in_huge_pages
from ddp_from_scratch.buckets.observer import Observer
from ddp_from_scratch.optim.flat_params import FlatParams, make_flat_params, overlapping
from ddp_from_scratch.reducer.reducer import Reducer

# Elements of a chunk. Three arrays of so many float32 stay in the cache from the first operation of
# a step to the last. Smaller chunks would make more calls, which have a cost of their own.
_CHUNK = 2**18


def _without_dynamo(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method of torch's optimizers so that a call does not import torch._dynamo."""

    # The import takes a second. torch wraps the method so that torch.compile does not trace it, and
    # nothing traces before that import.
    @wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        imported = "torch._dynamo" in sys.modules
        return (method if imported else inspect.unwrap(method))(*args, **options)

    return call


class SGD(torch.optim.SGD):
    """torch.optim.SGD with one flat call per bucket; the same parameters to the last bit.

    State, parameter groups and `state_dict()` are those of torch.optim.SGD, and either one loads
    the other's. Learning-rate schedulers, GradScaler, gradient clipping and step hooks work as with
    torch's. The order of operations is that of `foreach=False`.

    The phases of a step:

    1. arrange: if the Reducer has laid its buckets out again, or a parameter group has changed, the
       parameters are moved into flat tensors, neighbours of one group together: a *run*.
    2. step each run with one flat call.
    3. one by one, with the same bits: the members of a run that is not whole (a gradient is None or
       not the bucket's window, `.data` was replaced), and at the end parameters in no bucket and
       those that cannot move, such as 16-bit floats on a CPU.

    Parameters move in the first step, and rarely later. A view of a parameter that was made before
    does not follow it; `state_dict()`, `load_state_dict()` and deep copies are not affected.

    A copy of the optimizer (deep or pickled) has no Reducer and steps one by one.

    Args:
        params: parameters, named parameters or groups, as every optimizer takes them. Some may not
            be the Reducer's.
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
        # None in a copy of the optimizer.
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
        """Steps all parameters with their `.grad`.

        Args:
            closure: computes the loss and its gradients first; as in torch.optim.SGD.

        Returns:
            The result of `closure`, or None.

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
            raise RuntimeError("a copy of a ddp.SGD has no Reducer: call backward() and step()")
        self._arrange()
        backward = _BackwardAndStep(loss, self._reducer, self._runs, self._step_bucket)
        # Through step(), so that hooks and schedulers see one step.
        self.step(backward)

    # 1. arrange ---------------------------------------------------------------------------------

    @torch.no_grad()
    def _arrange(self) -> None:
        """Moves parameters into flat tensors if buckets or groups have changed. Idempotent."""
        buckets = () if self._reducer is None else self._reducer.flat_buckets
        groups = [[id(p) for p in group["params"]] for group in self.param_groups]
        if (buckets, groups) == self.__dict__.get("_arranged_for"):
            return
        # Also parameters in no bucket: one of these may share its memory with one that would move.
        shared = overlapping([p for group in self.param_groups for p in group["params"]])
        self._runs: dict[GradientBucket, list[FlatParams]] = {
            b: make_flat_params(b, self._groups_of(b), shared, self._allocate) for b in buckets
        }
        moved = {id(p) for runs in self._runs.values() for run in runs for p in run.parameters}
        self._alone = [
            (parameter, index)
            for index, group in enumerate(self.param_groups)
            for parameter in group["params"]
            if id(parameter) not in moved
        ]
        self._arranged_for = (buckets, groups)

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Allocates memory for flat parameters or momentum."""
        return in_huge_pages(torch.empty_like(like))

    def _groups_of(self, bucket: Bucket) -> list[int | None]:
        """Returns the index of each member's parameter group; None for a parameter of no group."""
        group_of = {
            id(parameter): index
            for index, group in enumerate(self.param_groups)
            for parameter in group["params"]
        }
        return [group_of.get(id(parameter)) for parameter in bucket.parameters()]

    # 2. step each run ---------------------------------------------------------------------------

    @torch.no_grad()
    def _step_bucket(self, bucket: GradientBucket) -> None:
        for run in self._runs[bucket]:
            group = self.param_groups[run.group]
            momentum, first = None, False
            whole = run.in_place()
            if whole and group["momentum"] != 0:
                states = [self.state[parameter] for parameter in run.parameters]
                lacking = [state.get("momentum_buffer") is None for state in states]
                first = all(lacking)
                # If only some members have momentum, the others begin it one by one.
                whole = first or not any(lacking)
                momentum = run.gather_momentum(states) if whole else None
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
        flat_buckets: Container[GradientBucket],
        step: Callable[[GradientBucket], None],
    ) -> None:
        self._loss, self._reducer, self._step = loss, reducer, step
        self._flat_buckets = flat_buckets
        self._stepped = 0

    def __call__(self) -> torch.Tensor:
        self._reducer.add_observer(self)
        try:
            self._loss.backward()
        finally:
            # Also after an error: a later backward() must not step.
            self._reducer.remove_observer(self)
        if not self._stepped:
            self._reducer.checks.check_complete()
            raise RuntimeError(
                "nothing was averaged, so nothing was stepped: backward_and_step() is inside "
                "no_sync(), or the loss depends on none of the Reducer's parameters"
            )
        return self._loss

    def on_finished(self, iteration: int, bucket: GradientBucket, takes_part: bool) -> None:
        """Steps the runs of the bucket. All other parameters are stepped later, one by one."""
        if takes_part and bucket in self._flat_buckets:
            self._step(bucket)
            self._stepped += 1


def _update_flat(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    momentum: torch.Tensor | None,
    first: bool,
    group: dict[str, Any],
) -> None:
    """Runs `update` on flat tensors; on a CPU in chunks that stay in its cache."""
    if parameter.device.type != "cpu":
        update(parameter, gradient, momentum, first, group)
        return
    # Not torch's fused kernel: it reads memory once, but rounds the last few elements differently.
    cut = partial(torch.split, split_size_or_sections=_CHUNK * torch.get_num_threads())
    parts = cut(parameter)
    momenta = [None] * len(parts) if momentum is None else cut(momentum)
    for p, g, m in zip(parts, cut(gradient), momenta, strict=True):
        update(p, g, m, first, group)


def update(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    momentum: torch.Tensor | None,
    first: bool,
    group: dict[str, Any],
) -> None:
    """Computes one step of SGD, in torch's order of operations. Does not change `gradient`.

    Args:
        parameter: changed in place.
        gradient: of the parameter's shape.
        momentum: changed in place; None without momentum.
        first: True if `momentum` has no values yet. It becomes the gradient, undampened.
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
