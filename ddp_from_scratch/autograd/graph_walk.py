"""Finds the parameters that a forward pass did not use, by a walk over its autograd graph."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch


def find_tensors(value: object) -> Iterator[torch.Tensor]:
    """Yields the tensors in a module's output: tuples, lists, dicts, dataclasses, any depth."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from find_tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from find_tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from find_tensors(getattr(value, field.name))


def reached(outputs: Iterable[torch.Tensor]) -> list[torch.Tensor] | None:
    """Lists the leaves to which a backward pass from `outputs` would bring a gradient.

    None means unknown: the graph holds a reentrant checkpoint.
    """
    leaves: list[torch.Tensor] = []
    ahead = []
    for output in outputs:
        if output.grad_fn is not None:
            ahead.append(output.grad_fn)
        elif output.requires_grad:
            leaves.append(output)
    seen = set(ahead)
    while ahead:
        node = ahead.pop()
        if isinstance(node, torch._C._functions.AccumulateGrad):
            leaves.append(node.variable)
        # Reentrant checkpointing builds this part of the graph only during the backward pass.
        elif node.name() == "CheckpointFunctionBackward":
            return None
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                ahead.append(following)
    return leaves


class _Forward:
    """The leaves that the graph of one forward pass reaches.

    Attributes:
        reached: indices of the Reducer's parameters; None means unknown.
        others: all other leaves.
    """

    def __init__(self, reached: set[int] | None, others: Iterable[torch.Tensor] = ()) -> None:
        self.reached = reached
        self.others = [weakref.ref(leaf) for leaf in others]


class GraphWatch:
    """Walks the graph of each forward pass, and calls back when a backward pass enters it.

    `on_forward` walks from the module's outputs to the parameters. When a backward pass reaches one
    of these outputs, `on_enter` is called with the indices of the parameters that get no gradient
    in this pass. The set is empty if a walk met a reentrant checkpoint, which hides parameters.
    `torch.autograd.grad` accumulates nothing in `.grad` and is not reported.

    Args:
        parameters: their indices are passed to `on_enter`.
        on_enter: a bound method, held weakly. Called during the backward pass, before any gradient
            of this graph is ready.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], on_enter: Callable[[set[int]], None]
    ) -> None:
        self._parameters = parameters
        self._index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._on_enter = weakref.WeakMethod(on_enter)
        # Each graph owns its record, through its hooks. So the record of a forward pass that never
        # goes backward disappears with its graph.
        self._forwards: weakref.WeakSet[_Forward] = weakref.WeakSet()
        # The record of the last walk. A static graph uses it again instead of another walk.
        self._last: _Forward | None = None
        self._stopped = False

    @property
    def hides_parameters(self) -> bool:
        """True if the graph of a forward pass that is alive holds a reentrant checkpoint."""
        return any(forward.reached is None for forward in self._forwards)

    def on_forward(self, outputs: object, as_before: bool = False) -> None:
        """Walks from all tensors in `outputs`, and puts a hook on the node of each.

        Args:
            outputs: the return value of the module.
            as_before: True takes the result of the last walk: the graph is static.
        """
        # Inside a transform of torch.func nothing is accumulated in `.grad`, and the graph does not
        # lead to the parameters themselves.
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return
        tensors = [tensor for tensor in find_tensors(outputs) if tensor.requires_grad]
        nodes = {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}
        if not nodes:
            return
        if self._last is None or not as_before:
            with torch.profiler.record_function("search_unused_parameters"):
                leaves = reached(tensors)
            self._last = self._record(leaves)
        forward = self._last
        self._forwards.add(forward)
        for node in nodes:
            # A strong reference would keep a Reducer alive for as long as some graph is.
            node.register_prehook(partial(_enter, weakref.ref(self), forward))

    def forget(self) -> None:
        """Forgets the last walk: the next forward pass is walked in any case."""
        self._last = None

    def will_enter(self) -> bool:
        """True if the pass that autograd is executing goes through a forward pass of the module."""
        return any(self._accumulates(f.reached or set(), f) for f in self._forwards)

    def _record(self, leaves: list[torch.Tensor] | None) -> _Forward:
        if leaves is None:
            return _Forward(None)
        known = self._index_of
        ours = {known[id(leaf)] for leaf in leaves if id(leaf) in known}
        return _Forward(ours, (leaf for leaf in leaves if id(leaf) not in known))

    def stop(self) -> None:
        """Stops calling `on_enter`, whatever graphs are still alive. Idempotent."""
        self._forwards.clear()
        self._stopped = True

    def enter(self, forward: _Forward) -> None:
        """Reports the unused parameters. Called by autograd at an output of this forward pass."""
        on_enter = self._on_enter()
        if on_enter is None or self._stopped:
            return
        if self.hides_parameters:
            # Some parameter may be used inside the checkpoint: none can be called unused yet.
            on_enter(set())
            return
        reached = forward.reached or set()
        if not self._accumulates(reached, forward):
            return
        # This pass may cover several forward passes, or more of the graph than one walk has seen.
        # By now autograd knows what it will execute, so it has the last word.
        rest = set(range(len(self._parameters))) - reached
        on_enter({i for i in rest if not will_accumulate(self._parameters[i])})

    def _accumulates(self, reached: set[int], forward: _Forward) -> bool:
        """True for a pass of `backward()`, False for one of `torch.autograd.grad`."""
        if reached:
            return any(will_accumulate(self._parameters[i]) for i in reached)
        # A static graph's walk is from an earlier step, whose other leaves may have been freed.
        others = [other() for other in forward.others]
        return None in others or any(leaf is not None and will_accumulate(leaf) for leaf in others)


def will_accumulate(parameter: torch.Tensor) -> bool:
    """True if the backward pass under way will add to this parameter's `.grad`."""
    if not parameter.requires_grad:
        return False
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # autograd.grad with respect to this parameter
        return False


def _enter(watch: "weakref.ref[GraphWatch]", forward: _Forward, gradients: Any) -> None:
    found = watch()
    if found is not None:
        found.enter(forward)
