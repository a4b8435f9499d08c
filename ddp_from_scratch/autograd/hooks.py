"""Hooks that call a Reducer: autograd's with each gradient, the module's, and optimizers'.

They neither keep the Reducer alive for ever nor act in a copy of the module.
"""

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
    """The hooks that a Reducer has put on a module, its parameters and their optimizers.

    The parameters' hooks know the Reducer weakly and the module's hooks keep it alive: the garbage
    collector cannot see a cycle that goes through a parameter's hooks. The parameters may live on
    without the module, and are then like any other.

    Args:
        module: `before_forward` is called before its forward pass, `after_forward` after it, with
            what it returns.
        parameters: `on_gradient` is called with a parameter's index as soon as its `.grad` is
            complete, and `before_step` with any optimizer that is about to step one of them.
        on_gradient, before_forward, after_forward, before_step: bound methods; the first and the
            last are held weakly.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        parameters: Sequence[torch.Tensor],
        on_gradient: Callable[[int], None],
        before_forward: Callable[[], None],
        after_forward: Callable[[object], None],
        before_step: Callable[[torch.optim.Optimizer], None],
    ) -> None:
        # Not a WeakMethod, which is made in Python: this is called with every gradient.
        bound = cast(MethodType, on_gradient)
        # The node that accumulates a gradient runs on the stream that was current when the node was
        # made. Made now and kept, all of them, and so our hooks, run on one stream, and a bucket is
        # packed when all its gradients are there, on whatever streams forward runs. As torch's DDP.
        self._nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in parameters]
        reducer, function = weakref.ref(bound.__self__), bound.__func__
        self._handles: list[Handle] = [
            parameter.register_post_accumulate_grad_hook(partial(_call, reducer, function, index))
            for index, parameter in enumerate(parameters)
        ]
        ours = frozenset(id(parameter) for parameter in parameters)
        self._handles += [
            module.register_forward_pre_hook(ModuleHook(lambda *_: before_forward())),
            module.register_forward_hook(ModuleHook(lambda *args: after_forward(args[-1]))),
            # Unlike a check before a forward pass, independent of how the model is called.
            _before_steps(partial(_on_step, weakref.WeakMethod(before_step), ours)),
        ]
        weakref.finalize(self, _remove_all, self._handles)

    def remove(self) -> None:
        """Takes all of them off. Idempotent."""
        _remove_all(self._handles)


class ModuleHook:
    """A hook on a module's forward. In a copy of the module, deep or pickled, it does nothing.

    It keeps what it calls alive: a Reducer lives as long as its module.

    Args:
        function: called with the arguments of the hook.
    """

    def __init__(self, function: Callable[..., None] | None = None) -> None:
        self._function = function

    def __call__(self, *arguments: object) -> None:
        """Called by the module."""
        # A compiled model is one graph, without this; the optimizer's step has a check, too.
        if self._function is not None and not torch.compiler.is_compiling():
            self._function(*arguments)

    def __reduce__(self) -> "tuple[type[ModuleHook], tuple[()]]":
        return ModuleHook, ()


def _call(
    reducer: weakref.ref[Any], function: Callable[[Any, int], None], index: int, _: torch.Tensor
) -> None:
    # The tensor is the parameter, not its gradient; `on_gradient` knows it by its index.
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


_step_checks: "OrderedDict[int, Callable[..., None]]" = OrderedDict()


def _before_steps(check: Callable[..., None]) -> Handle:
    """Calls `check` before every step of any optimizer.

    Not as a hook of its own with torch, which iterates over those: a Reducer may be collected, and
    its hook removed, in the middle of it.
    """
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
