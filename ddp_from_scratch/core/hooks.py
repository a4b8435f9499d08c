"""The hooks on parameters and optimizers that call a Reducer."""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from itertools import chain
from operator import setitem
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

Handle = torch.utils.hooks.RemovableHandle


class Hooks:
    """The hooks of one Reducer.

    Args:
        reducer: held weakly.
        ready: called with a weak reference to the Reducer, an index and the parameter, when the
            `.grad` of that parameter is complete.
        step: a bound method, called before any optimizer steps one of the parameters.

    Attributes:
        nodes: for each parameter, the autograd node that accumulates its gradient.
        handles: all hooks, first those of the parameters; the Reducer adds those of its module.
    """

    def __init__(
        self,
        reducer: Any,
        ready: Callable[[Any, int, torch.Tensor], None],
        step: Callable[[torch.optim.Optimizer], None],
    ) -> None:
        parameters: list[torch.Tensor] = reducer.parameters
        # An AccumulateGrad node runs on the stream that was current when it was made. Making all
        # nodes here, and keeping them, has all of them and our hooks run on one stream. So a bucket
        # is packed after all its gradients, whatever streams forward used. As in torch's DDP.
        self.nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in parameters]
        # Weak, because the garbage collector cannot see a cycle through a parameter's hooks, and
        # parameters may outlive the module. A WeakMethod would be slow Python code in each hook.
        found = weakref.ref(reducer)
        self._ready = [partial(ready, found, index) for index in range(len(parameters))]
        self.handles: list[Handle] = [
            parameter.register_post_accumulate_grad_hook(hook)
            for parameter, hook in zip(parameters, self._ready, strict=True)
        ]
        # Module hooks run only if the program calls the whole module; this check always runs.
        ours = frozenset(id(parameter) for parameter in parameters)
        self.handles.append(_before_steps(partial(_on_step, weakref.WeakMethod(step), ours)))
        # The parameters may outlive the Reducer, but their hooks must not.
        weakref.finalize(self, _remove_all, self.handles)

    def note(self, places: Mapping[int, dict[int, torch.Tensor]]) -> None:
        """Replaces `ready`, for the parameters in `places`, by an entry in a dictionary.

        Their hook is then `setitem`, which runs no Python code.
        """
        for index, (ready, handle) in enumerate(zip(self._ready, self.handles, strict=False)):
            hooks = handle.hooks_dict_ref()
            if hooks is not None and handle.id in hooks:
                # In place, because hooks run in the order of registration.
                note = partial(setitem, places[index], index) if index in places else ready
                hooks[handle.id] = note

    def remove(self) -> None:
        """Removes all hooks. Idempotent."""
        _remove_all(self.handles)


def _on_step(
    method: "weakref.WeakMethod[Callable[[torch.optim.Optimizer], None]]",
    ours: frozenset[int],
    optimizer: torch.optim.Optimizer,
    *arguments: Any,
) -> None:
    # No Python call for each parameter: every Reducer checks every step of every optimizer.
    steps = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    if (found := method()) is not None and not ours.isdisjoint(map(id, steps)):
        found(optimizer)


# One hook of torch's serves all Reducers. torch iterates over its hooks without a copy, and the
# garbage collector may remove a Reducer's hook during that.
_step_checks: "OrderedDict[int, Callable[..., None]]" = OrderedDict()


def _before_steps(check: Callable[..., None]) -> Handle:
    """Calls `check` before every step of any optimizer."""
    _watch_steps()
    handle = Handle(_step_checks)
    _step_checks[handle.id] = check
    return handle


@cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_on_any_step)


def _on_any_step(*arguments: Any) -> None:
    for check in tuple(_step_checks.values()):
        check(*arguments)


def _remove_all(handles: Iterable[Handle]) -> None:
    for handle in handles:
        handle.remove()


def will_accumulate_any(reducer: Any) -> bool:
    """True if the backward pass under way will add to the `.grad` of one of its parameters."""
    try:
        # No Python call for each parameter: there may be thousands.
        return any(map(torch._C._will_engine_execute_node, reducer.hooks.nodes))
    except RuntimeError:  # autograd.grad with respect to one of them
        return any(map(will_accumulate, reducer.parameters))


def will_accumulate(parameter: torch.Tensor) -> bool:
    """True if the backward pass under way will add to this parameter's `.grad`."""
    if not parameter.requires_grad:
        return False
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # autograd.grad with respect to this parameter
        return False
