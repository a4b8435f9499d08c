"""The hooks on parameters and optimizers that call a Reducer."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from itertools import chain
from operator import setitem
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

Handle = torch.utils.hooks.RemovableHandle


class Hooks:
    """The hooks of one Reducer, which is held weakly.

    `ready` is called with a weak reference to the Reducer, an index and the parameter, when the
    `.grad` of that parameter is complete, and the bound method `step` before any optimizer steps
    one of the parameters. `nodes` are the autograd nodes that accumulate their gradients. `handles`
    are those of the parameters, and then those of its module, which the Reducer adds.
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
        self.ids, self.step = frozenset(map(id, parameters)), weakref.WeakMethod(step)
        _watch_steps()
        _living[id(self)] = self
        # The parameters may outlive the Reducer, but their hooks must not.
        weakref.finalize(self, _remove_all, self.handles)

    def note(self, places: Mapping[int, dict[int, torch.Tensor]]) -> None:
        """Replaces `ready` for these parameters by an entry in a dictionary, without Python."""
        for index, (ready, handle) in enumerate(zip(self._ready, self.handles, strict=False)):
            hooks = handle.hooks_dict_ref()
            if hooks is not None and handle.id in hooks:
                # In place, because hooks run in the order of registration.
                note = partial(setitem, places[index], index) if index in places else ready
                hooks[handle.id] = note

    def remove(self) -> None:
        """Removes all hooks. Idempotent."""
        _remove_all(self.handles)
        _living.pop(id(self), None)


# One hook of torch's serves all Reducers. torch iterates over its hooks without a copy, and the
# garbage collector may remove a Reducer's hook during that.
_living: "weakref.WeakValueDictionary[int, Hooks]" = weakref.WeakValueDictionary()


@cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
    for hooks in [*_living.values()]:
        # No Python call for each parameter: every Reducer checks every step of every optimizer.
        steps = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        if not hooks.ids.isdisjoint(map(id, steps)) and (step := hooks.step()) is not None:
            step(optimizer)


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
