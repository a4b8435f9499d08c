"""Walks the graph of a forward pass to find the parameters that it does not reach."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch


def find_tensors(value: object) -> Iterator[torch.Tensor]:
    """The tensors in what a module returned: in tuples, lists, dicts, dataclasses, at any depth."""
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
    """The leaves that a backward pass from `outputs` would give a gradient.

    None where that is not known: reentrant checkpointing builds a part of the graph only during
    the backward pass.
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
        elif node.name() == "CheckpointFunctionBackward":
            return None
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                ahead.append(following)
    return leaves


class _Forward:
    """One forward pass.

    Attributes:
        reached: the parameters that its graph reaches; None if that is not known.
        others: the other leaves that it reaches.
    """

    def __init__(self, reached: set[int] | None, others: Iterable[torch.Tensor] = ()) -> None:
        self.reached = reached
        self.others = [weakref.ref(leaf) for leaf in others]


class GraphWatch:
    """Walks the graph of each forward pass, and notices when a backward pass enters it.

    `on_forward` walks from the module's outputs to the parameters. When a backward pass comes to
    one of these outputs, `on_enter` is called with the indices of parameters that get no gradient
    in it. These are the ones that the walk did not reach and that autograd, which knows by now what
    this pass will execute, leaves out as well: the pass may cover other forward passes, or more.
    Where a walk met reentrant checkpointing, which hides parameters, none are reported.

    A pass that accumulates nothing, `torch.autograd.grad`, is not reported.

    Args:
        parameters: those whose indices are meant.
        on_enter: called in the backward pass, before the gradients of what the graph reaches.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], on_enter: Callable[[set[int]], None]
    ) -> None:
        self._parameters = parameters
        self._index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._on_enter = weakref.WeakMethod(on_enter)
        # A graph owns its record: what was never entered goes when the graph does.
        self._forwards: weakref.WeakSet[_Forward] = weakref.WeakSet()
        self._last: _Forward | None = None
        self._stopped = False

    def on_forward(self, outputs: object, as_before: bool = False) -> None:
        """Walks from all tensors in `outputs`; not again where all is as it was before."""
        # Inside a transform of torch.func nothing is accumulated in `.grad`, and graphs are not
        # those of parameters.
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
            node.register_prehook(partial(_enter, weakref.ref(self), forward))

    def _record(self, leaves: list[torch.Tensor] | None) -> _Forward:
        if leaves is None:
            return _Forward(None)
        known = self._index_of
        ours = {known[id(leaf)] for leaf in leaves if id(leaf) in known}
        return _Forward(ours, (leaf for leaf in leaves if id(leaf) not in known))

    def stop(self) -> None:
        """Calls nothing from now on, whatever graphs are still alive. Idempotent."""
        self._forwards.clear()
        self._stopped = True

    def enter(self, forward: _Forward) -> None:
        """Called by autograd: a backward pass has come to an output of this forward pass."""
        on_enter = self._on_enter()
        if on_enter is None or self._stopped:
            return
        if any(other.reached is None for other in self._forwards):
            on_enter(set())
            return
        reached = forward.reached or set()
        if not self._accumulates(reached, forward):
            return
        rest = set(self._index_of.values()) - reached
        on_enter({i for i in rest if not _will_accumulate(self._parameters[i])})

    def _accumulates(self, reached: set[int], forward: _Forward) -> bool:
        """Whether the pass is one of `backward()`, and not of `torch.autograd.grad`."""
        if reached:
            return any(_will_accumulate(self._parameters[i]) for i in reached)
        # Of an earlier step, where the walk was not made again, they have gone.
        others = [other() for other in forward.others]
        return None in others or any(leaf is not None and _will_accumulate(leaf) for leaf in others)


def _will_accumulate(parameter: torch.Tensor) -> bool:
    """Whether the backward pass under way will add to this parameter's `.grad`."""
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
