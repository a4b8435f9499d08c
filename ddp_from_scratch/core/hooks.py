"""The hooks on parameters, modules, optimizers and backward passes that call a Reducer."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

Handle = torch.utils.hooks.RemovableHandle
# Autograd's number for the backward pass that this thread executes; -1 outside of backward.
current_pass: Callable[[], int] = torch._C._current_graph_task_id


class Hooks:
    """The hooks of one Reducer, which is held weakly.

    They call `reducer.ready` with a weak reference, an index and the parameter when the `.grad` of
    that parameter is complete, and its extensions around an optimizer's step. `nodes` are the
    autograd nodes that accumulate the gradients. `handles` are those of the parameters, and then
    those of the module, which the Reducer adds.
    """

    def __init__(self, reducer: Any) -> None:
        parameters: list[torch.Tensor] = reducer.parameters
        # An AccumulateGrad node runs on the stream that was current when it was made. Made here and
        # kept, all of them and our hooks run on one stream. So a bucket is packed after all its
        # gradients, whatever streams forward used. As in torch's DDP.
        edges = map(torch.autograd.graph.get_gradient_edge, parameters)
        self.nodes: list[torch.autograd.graph.Node] = [edge.node for edge in edges]
        # Weak, because the garbage collector cannot see a cycle through a parameter's hooks, and
        # parameters may outlive the module. A WeakMethod would be slow Python code in each hook.
        found = weakref.ref(reducer)
        self._ready = [partial(reducer.ready, found, index) for index in range(len(parameters))]
        self.handles: list[Handle] = [
            parameter.register_post_accumulate_grad_hook(hook)
            for parameter, hook in zip(parameters, self._ready, strict=True)
        ]
        # Module hooks run only if the program calls the whole module; this check always runs.
        self.ids: frozenset[int] = frozenset(map(id, parameters))
        _watch_steps()
        _living[id(reducer)] = reducer
        # The parameters may outlive the Reducer, but their hooks must not.
        weakref.finalize(self, _remove_all, self.handles)

    def replace(self, hooks: Mapping[int, Callable[[torch.Tensor], None]]) -> None:
        """Calls these for their parameters, and `ready` for all others."""
        for index, (ready, handle) in enumerate(zip(self._ready, self.handles, strict=False)):
            table = handle.hooks_dict_ref()
            if table is not None and handle.id in table:
                # In place, because hooks run in the order of registration.
                table[handle.id] = hooks.get(index, ready)

    def remove(self, reducer: Any) -> None:
        """Removes all hooks. Idempotent."""
        _remove_all(self.handles)
        _living.pop(id(reducer), None)


# One hook of torch's serves all Reducers. torch iterates over its hooks without a copy, and the
# garbage collector may remove a Reducer's hook during that.
_living: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


@cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(partial(_tell, "on_step"))
    register_optimizer_step_post_hook(partial(_tell, "on_stepped"))


def _tell(phase: str, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
    for reducer in [*_living.values()]:
        if not reducer.calls[phase]:
            continue
        # No Python call for each parameter: every Reducer checks every step of every optimizer.
        steps = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        if not reducer.hooks.ids.isdisjoint(map(id, steps)):
            for call in reducer.calls[phase]:
                call(optimizer)


def _remove_all(handles: Iterable[Handle]) -> None:
    for handle in handles:
        handle.remove()


class ModuleHook:
    """Calls a Reducer's extensions around a forward pass. A copy of the module calls none."""

    def __init__(self, reducer: Any = None, phase: str = "") -> None:
        self._reducer, self._phase = reducer, phase

    def __call__(self, module: torch.nn.Module, inputs: object, *outputs: object) -> None:
        # Traced, this would break a compiled model's graph. The check before a step still runs.
        if self._reducer is not None and not torch.compiler.is_compiling():
            for call in self._reducer.calls[self._phase]:
                call(*outputs)

    def __reduce__(self) -> "tuple[type[ModuleHook], tuple[()]]":
        return ModuleHook, ()  # this Reducer does not average the gradients of a copy


class EndOfPass:
    """Autograd's callback at the end of a pass, which also notices a pass that failed."""

    def __init__(self, reducer: Any) -> None:
        # The bound method keeps the Reducer alive until autograd drops this object.
        self._end_pass, self._reducer = reducer.end_pass, weakref.ref(reducer)
        self._number, self._called = current_pass(), False

    def __call__(self) -> None:
        self._called = True
        self._end_pass()

    # If an exception ends the pass, autograd drops its callbacks without calling them.
    def __del__(self) -> None:
        if not self._called and (reducer := self._reducer()) is not None:
            reducer.break_off(self._number)
