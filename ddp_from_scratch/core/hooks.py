"""The hooks on parameters, modules, optimizers and backward passes that call a Reducer."""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from itertools import chain
from operator import itemgetter, setitem
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ddp_from_scratch.core.bucket import FlatBucket
from ddp_from_scratch.core.view_bucket import ViewBucket

Handle = torch.utils.hooks.RemovableHandle
# Autograd's number for the backward pass that this thread executes; -1 outside of backward.
current_pass: Callable[[], int] = torch._C._current_graph_task_id


class Hooks:
    """The hooks of one Reducer, which is held weakly.

    They call `reducer.grad_hook` with a weak reference, an index and the parameter when the `.grad`
    of that parameter is complete (or `bucket_hook`, see `choose`), and the Reducer's observers
    around an optimizer's step.

    Attributes:
        nodes: the autograd nodes that accumulate the gradients.
        handles: those of the parameters, and then those of the module, which the Reducer adds.
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
        self._reducer = me = weakref.ref(reducer)
        self._grad_hooks = [
            partial(reducer.grad_hook, me, index) for index in range(len(parameters))
        ]
        self.handles: list[Handle] = [
            parameter.register_post_accumulate_grad_hook(hook)
            for parameter, hook in zip(parameters, self._grad_hooks, strict=True)
        ]
        _ours.update(handle.id for handle in self.handles)
        # Each parameter's hooks by number, in the order in which autograd calls them.
        self._tables = [handle.hooks_dict_ref() or {} for handle in self.handles]
        for table in self._tables:  # an earlier Reducer may be gone
            for number in [number for number in table if table[number] is _raise_forgotten]:
                del table[number]
        self._known = sum(map(len, self._tables))  # how many hooks there are
        # Parameters whose gradient autograd has just left undefined; only those with hooks of the
        # program's that run before ours, which may have cleared it instead.
        self._undefined = set[int]()
        for index in range(len(self.nodes)):
            if self._has_foreign(index, before_ours=True):
                self._watch_undefined(index)
        # Module hooks run only if the program calls the whole module; this check always runs.
        self.ids: frozenset[int] = frozenset(map(id, parameters))
        self.per_bucket: bool = False  # True if autograd does not call for every gradient
        self._chosen: tuple[bool, tuple[FlatBucket, ...]] = (True, ())
        _watch_steps()
        _hooked[id(reducer)] = reducer
        # The parameters may outlive the Reducer, but hooks that call it must not.
        weakref.finalize(self, _refuse_gradients, self.handles, len(parameters))

    def _watch_undefined(self, index: int) -> None:
        note = partial(_note_undefined, self._undefined, index)
        self.handles.append(self.nodes[index].register_prehook(note))

    def keep_last(self) -> set[int]:
        """Has autograd call our hooks after those that the program has registered meanwhile.

        These may change gradients, as torch's DDP allows. Returns the indices of their parameters:
        if autograd is calling the hooks of one now, the others still come after ours this time.
        """
        known, self._known = self._known, sum(map(len, self._tables))
        late = set[int]()
        if self._known == known:
            return late
        for index, table in enumerate(self._tables):
            number = self.handles[index].id
            keys = [*table]
            if number in table and not _ours.issuperset(keys[keys.index(number) :]):
                if not self._has_foreign(index, before_ours=True):
                    self._watch_undefined(index)
                table[number] = table.pop(number)  # `move_to_end` has no effect on autograd
                late.add(index)
        return late

    def choose(self, reducer: Any, per_gradient: bool) -> None:
        """Calls `grad_hook` for each gradient, or `bucket_hook` once for a bucket. Idempotent.

        With many small layers, a Python call for each gradient is the largest cost. Autograd stores
        the other parameters in their bucket (`Bucket.deferred`), without a Python frame. The first
        gradient of a pass keeps its hook, since it begins the pass.
        """
        if self._chosen == (per_gradient, reducer.flat_buckets):
            return
        self._chosen = per_gradient, reducer.flat_buckets
        reducer.flush_deferred()
        hooks: dict[int, Callable[[torch.Tensor], None]] = {}
        self.per_bucket = False
        if not per_gradient:
            first = reducer.layout.index_of[reducer.ready_order[0]]
            for bucket in reducer.flat_buckets:
                # Not a parameter with a hook of the program's, which may clear the gradient.
                others = filter(self._has_foreign, bucket.members)
                last, deferred = bucket.members[-1], {*bucket.members[:-1]} - {first, *others}
                if isinstance(bucket, ViewBucket) and bucket.packs_early:
                    continue
                hooks |= {index: partial(setitem, bucket.deferred, index) for index in deferred}
                hooks[last] = partial(reducer.bucket_hook, self._reducer, last)
                self.per_bucket |= bool(deferred)
        for index, table in enumerate(self._tables):
            number = self.handles[index].id
            if number in table:
                # In place, because hooks run in the order of registration.
                table[number] = hooks.get(index, self._grad_hooks[index])

    def was_cleared(self, index: int, deferred: bool) -> bool:
        """True if the program has cleared this `.grad`; False if autograd has left it undefined.

        `deferred`: our hook has run earlier.
        """
        if deferred:
            return self._has_foreign(index)
        return self._has_foreign(index, before_ours=True) and index not in self._undefined

    def _has_foreign(self, index: int, before_ours: bool = False) -> bool:
        for key in self._tables[index]:
            if key == self.handles[index].id and before_ours:
                return False
            if key not in _ours:
                return True
        return False

    def remove(self, reducer: Any) -> None:
        """Removes all hooks. Idempotent."""
        _remove_all(self.handles)
        _hooked.pop(id(reducer), None)


# The numbers of all Reducers' hooks on parameters.
_ours: set[int] = set()


def _note_undefined(undefined: set[int], index: int, gradients: Sequence[Any]) -> None:
    """Called before autograd accumulates a gradient, or leaves it undefined."""
    (undefined.add if gradients[0] is None else undefined.discard)(index)


# One hook of torch's serves all Reducers. torch iterates over its hooks without a copy, and the
# garbage collector may remove a Reducer's hook during that.
_hooked: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


@cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_tell_of_step)
    register_optimizer_step_post_hook(_tell_of_end)


def _tell_of_step(optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:
    for reducer in _stepped(optimizer):
        for on_step in reducer.calls.on_step:
            on_step(optimizer)


def _tell_of_end(optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:
    for reducer in _stepped(optimizer):
        for on_stepped in reducer.calls.on_stepped:
            on_stepped(optimizer)


def _stepped(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Returns the Reducers that have a parameter of this optimizer."""
    # No Python call for each parameter: every step of every optimizer comes here.
    groups = [*map(itemgetter("params"), optimizer.param_groups)]
    return [
        reducer
        for reducer in [*_hooked.values()]
        if not reducer.hooks.ids.isdisjoint(map(id, chain.from_iterable(groups)))
    ]


def _remove_all(handles: Iterable[Handle]) -> None:
    for handle in handles:
        handle.remove()
        _ours.discard(handle.id)


def _refuse_gradients(handles: Sequence[Handle], count: int) -> None:
    """Has the next gradient raise: its Reducer is gone with its module, and nobody averages it.

    Unless another Reducer does. The first `count` hooks are those of parameters.
    """
    tables = [(handle.id, handle.hooks_dict_ref() or {}) for handle in handles[:count]]
    hooked = [(number, table) for number, table in tables if number in table]
    _remove_all(handles)
    for number, table in hooked:
        if _ours.isdisjoint(table):
            table[number] = _raise_forgotten


def _raise_forgotten(parameter: torch.Tensor) -> None:
    raise RuntimeError(
        f"the Reducer of a parameter of shape {tuple(parameter.shape)} is gone, because nothing "
        f"refers to it or to its module, such as a temporary ModuleList: keep the Reducer for as "
        f"long as you train, or call its remove() if this gradient is to stay local"
    )


def nothing() -> tuple[Any, ...]:
    """What a hook is reduced to: a function that does nothing.

    It can be loaded where this package is not installed.
    """
    return getattr, (nullcontext(), "__exit__")


class ModuleHook:
    """Calls a Reducer's observers before a forward pass. A copy of the module has no such hook."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __call__(self, module: torch.nn.Module, inputs: object) -> None:
        # Traced, this would break a compiled model's graph. The check before a step still runs.
        if not torch.compiler.is_compiling():
            for call in self._reducer.calls.on_forward:
                call()

    def __reduce__(self) -> tuple[Any, ...]:
        return nothing()  # only where `_HookTable` is not the table


class ModuleEndHook(ModuleHook):
    """Calls a Reducer's observers after a forward pass."""

    def __call__(self, module: torch.nn.Module, inputs: object, outputs: object = None) -> None:
        if not torch.compiler.is_compiling():
            for call in self._reducer.calls.on_forwarded:
                call(outputs)


class _HookTable(OrderedDict[int, Any]):
    """A module's table of hooks, whose `ModuleHook`s only calls of the module find.

    A module with hooks cannot be scripted, and a pickled one names their classes. So neither
    TorchScript, which looks at `values()`, nor copies and pickles see them. torch's class has no
    such hooks, since its own `forward` does their work.
    """

    def values(self) -> Any:
        return [hook for hook in super().values() if not isinstance(hook, ModuleHook)]

    def __reduce__(self) -> tuple[Any, ...]:
        kept = [(key, hook) for key, hook in self.items() if not isinstance(hook, ModuleHook)]
        return OrderedDict, (), None, None, iter(kept)


def hook_module(module: torch.nn.Module, reducer: Any) -> list[Handle]:
    """Calls a Reducer's observers around each forward pass of its module, from now on."""
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        # A table with hooks stays: their handles refer to it.
        if not getattr(module, name):
            setattr(module, name, _HookTable())
    # As functions of the base class: a ScriptModule, which calls hooks, refuses the methods.
    return [
        torch.nn.Module.register_forward_pre_hook(module, ModuleHook(reducer)),
        torch.nn.Module.register_forward_hook(module, ModuleEndHook(reducer)),
    ]


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
            reducer.on_backward_error(self._number)
