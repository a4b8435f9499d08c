"""Computes weight gradients into their buckets, so that packing finds them there.

    F.linear, autograd's backward    gradient = output_gradient.t() @ input     then copied
    F.linear, `_Linear`'s            torch.mm(output_gradient.t(), input, out=window of the bucket)

Autograd keeps an alias of the window as `.grad`: nothing is copied, and no memory is allocated for
the gradient. Megatron-LM fuses weight gradients in the same way ("gradient_accumulation_fusion").
"""

import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import torch
from torch.nn import Linear, functional

# Returns the window of a parameter's gradient, by index; None where it must not be written to.
Claim = Callable[[int], torch.Tensor | None]

# Elements of a weight from which on a layer is fused. For smaller ones the copy that is saved takes
# less time than the Python code of a backward of our own.
_WORTH = 2**16


class FusedWgrad:
    """Linear layers whose backward passes write into the buckets.

    Layers with a weight of at least 65,536 elements of which the Reducer has the gradient; of their
    gradients those that are packed one by one (`Packing.one_by_one`). Their `forward` is replaced;
    copies of a layer have torch's.

    Elsewhere gradients are computed as torch does, with the same numbers: parametrized weights,
    subclasses of `nn.Linear`, a layer with a `forward` of its own; for a pass, hooks on the weight,
    autocast, torch.compile, torch.func, `create_graph`, `torch.autograd.grad`; for a gradient, a
    second one of its parameter, or a `.grad` that is there already.

    Args:
        module: owner of the layers.
        index_of: the index of each parameter, by its id.
        claim: asked once for each gradient, during backward.
    """

    def __init__(self, module: torch.nn.Module, index_of: Mapping[int, int], claim: Claim) -> None:
        self._claim = claim
        # Claimed and not arrived yet: a second gradient of the parameter must not overwrite it.
        self._claimed: set[int] = set()
        self._layers: list[Linear] = []
        for layer in module.modules():
            if _is_plain(layer) and id(layer.weight) in index_of:
                bias = None if layer.bias is None else index_of.get(id(layer.bias))
                forward = _Forward(layer, self, index_of[id(layer.weight)], bias)
                layer.forward = forward  # type: ignore[method-assign]
                self._layers.append(layer)

    def window(self, index: int | None, parameter: torch.Tensor | None) -> torch.Tensor | None:
        """Returns the window to write the parameter's gradient to, if it may be written there."""
        if index is None or parameter is None or index in self._claimed:
            return None
        if not _will_accumulate(parameter):
            return None
        window = self._claim(index)
        if window is not None:
            self._claimed.add(index)
        return window

    def on_gradient(self, index: int) -> None:
        """Notes that the gradient of this parameter is in `.grad`."""
        self._claimed.discard(index)

    def before_forward(self) -> None:
        """Forgets the claims of a pass that an exception has ended."""
        # Not inside of a backward pass, where checkpointed layers run forward again.
        if self._claimed and torch._C._current_graph_task_id() == -1:
            self._claimed.clear()

    def remove(self) -> None:
        """Gives the layers their own forward back. Idempotent."""
        # Graphs that are still alive get no window any more.
        self._claim = _no_window
        for layer in self._layers:
            vars(layer).pop("forward", None)
        self._layers.clear()


def _no_window(index: int) -> None:
    return None


def _is_plain(layer: torch.nn.Module) -> TypeGuard[Linear]:
    # A parametrized layer is of a class of its own.
    return type(layer) is Linear and "forward" not in vars(layer) and layer.weight.numel() >= _WORTH


def _will_accumulate(parameter: torch.Tensor) -> bool:
    """True if the gradient goes to `.grad`, and not to a caller of `torch.autograd.grad`."""
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # raised in torch.autograd.grad
        return False


class _Forward:
    """The forward of a fused layer; copies of the layer get torch's."""

    def __init__(self, layer: Linear, fused: FusedWgrad, weight: int, bias: int | None) -> None:
        # Weakly: the layer holds this.
        self._layer, self._fused = weakref.ref(layer), fused
        self._weight, self._bias = weight, bias

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        layer = self._layer()
        assert layer is not None, "its layer calls it"
        weight, bias = layer.weight, layer.bias
        if not _can_fuse(input, weight):
            return functional.linear(input, weight, bias)
        output: torch.Tensor = _Linear.apply(
            input, weight, bias, self._fused, self._weight, self._bias
        )
        return output

    def __deepcopy__(self, copied: dict[int, Any]) -> Any:
        return _own_forward(copied[id(self._layer())])

    def __reduce__(self) -> Any:
        return _own_forward, (self._layer(),)


def _own_forward(layer: Linear) -> Any:
    return Linear.forward.__get__(layer)


def _can_fuse(input: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        torch.is_grad_enabled()
        and weight.requires_grad
        and not weight._backward_hooks
        and type(input) is torch.Tensor
        and input.dtype == weight.dtype
        and not torch.is_autocast_enabled(weight.device.type)
        and not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch._C._len_torch_dispatch_stack()
    )


class _Linear(torch.autograd.Function):
    """`F.linear` whose backward writes the weight's and the bias' gradient to windows."""

    @staticmethod
    def forward(
        context: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        fused: FusedWgrad,
        *indices: int | None,
    ) -> torch.Tensor:
        context.save_for_backward(input, weight, bias)
        context.fused, context.indices = fused, indices
        return functional.linear(input, weight, bias)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        input, weight, bias = context.saved_tensors
        for_input, for_weight, for_bias = context.needs_input_grad[:3]
        outer = gradient.reshape(-1, weight.shape[0])
        inner = input.reshape(-1, weight.shape[1])
        windows: list[torch.Tensor | None] = [None, None]
        # With `create_graph` the gradients themselves are differentiated.
        if not torch.is_grad_enabled():
            needed = ((for_weight, weight), (for_bias, bias))
            windows = [
                context.fused.window(index, parameter) if needs else None
                for index, (needs, parameter) in zip(context.indices, needed, strict=True)
            ]
        results = (
            gradient.matmul(weight) if for_input else None,
            _into(windows[0], torch.mm, outer.t(), inner) if for_weight else None,
            _into(windows[1], torch.sum, outer, 0) if for_bias else None,
        )
        return *results, None, None, None


def _into(
    window: torch.Tensor | None, compute: Callable[..., torch.Tensor], *arguments: Any
) -> torch.Tensor:
    if window is None:
        return compute(*arguments)
    # An alias that nobody else has: autograd copies a gradient that it does not own alone.
    return compute(*arguments, out=window).view_as(window)
