"""Registers a Reducer's hooks on the module, its parameters and their optimizers."""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from types import MethodType
from typing import Any, cast

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

Handle = torch.utils.hooks.RemovableHandle


class Hooks:
    """The hooks that call a Reducer.

    Args:
        module: `before_forward` and `after_forward` are called around its forward pass, with the
            arguments of torch's hooks.
        parameters: `on_gradient(index)` is called as soon as a parameter's `.grad` is complete.
            `before_step(optimizer)` is called before any optimizer steps one of them.
        on_gradient, before_forward, after_forward, before_step: bound methods of the Reducer. The
            module's hooks keep the Reducer alive; the other hooks hold it weakly.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        parameters: Sequence[torch.Tensor],
        on_gradient: Callable[[int], None],
        before_forward: Callable[..., None],
        after_forward: Callable[..., None],
        before_step: Callable[[torch.optim.Optimizer], None],
    ) -> None:
        # Held weakly: the garbage collector cannot see a cycle through a parameter's hooks, and the
        # parameters may outlive the module. Not a WeakMethod: it is slow Python code, and this hook
        # runs for every gradient.
        bound = cast(MethodType, on_gradient)
        # A node that accumulates a gradient runs on the stream that was current when the node was
        # made. All are made here and kept, so that all of them, and our hooks, run on one stream:
        # a full bucket is packed behind all its gradients, whatever streams forward used. torch's
        # DDP does the same.
        self._nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in parameters]
        reducer, function = weakref.ref(bound.__self__), bound.__func__
        self._handles: list[Handle] = [
            parameter.register_post_accumulate_grad_hook(partial(_call, reducer, function, index))
            for index, parameter in enumerate(parameters)
        ]
        ours = frozenset(id(parameter) for parameter in parameters)
        self._handles += [
            module.register_forward_pre_hook(ModuleHook(before_forward)),
            module.register_forward_hook(ModuleHook(after_forward)),
            # Module hooks run only if the model is called as a whole; this check always runs.
            _before_steps(partial(_on_step, weakref.WeakMethod(before_step), ours)),
        ]
        # The parameters may live on without the Reducer. Then their hooks go with it.
        weakref.finalize(self, _remove_all, self._handles)

    def remove(self) -> None:
        """Removes all hooks. Idempotent."""
        _remove_all(self._handles)


class ModuleHook:
    """A hook on a module's forward that does nothing in a copy of the module, deep or pickled.

    Args:
        function: called with the hook's arguments, and kept alive: a Reducer lives as long as its
            module.
    """

    def __init__(self, function: Callable[..., None] | None = None) -> None:
        self._function = function

    def __call__(self, *arguments: object) -> None:
        """Calls the function, but not while torch.compile traces the module."""
        # Traced, it would break a compiled model's graph in two. The check before an optimizer's
        # step still runs.
        if self._function is not None and not torch.compiler.is_compiling():
            self._function(*arguments)

    def __reduce__(self) -> "tuple[type[ModuleHook], tuple[()]]":
        # Copies get an inert hook: their gradients are not this Reducer's.
        return ModuleHook, ()


def _call(
    reducer: weakref.ref[Any], function: Callable[[Any, int], None], index: int, _: torch.Tensor
) -> None:
    # `_` is the parameter, not its gradient. Its index says all that `on_gradient` needs.
    found = reducer()
    if found is not None:
        function(found, index)


def _on_step(
    method: "weakref.WeakMethod[Callable[[torch.optim.Optimizer], None]]",
    ours: frozenset[int],
    optimizer: torch.optim.Optimizer,
    *arguments: Any,
) -> None:
    found = method()
    if found is not None and any(
        id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"]
    ):
        found(optimizer)


# One hook with torch serves all Reducers. torch iterates over its hooks without a copy, and a
# Reducer may be collected, and its own hook removed, in the middle of that.
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
