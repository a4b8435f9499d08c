"""Computes weight gradients into their buckets, so that packing finds them there.

    F.linear, autograd's backward    gradient = output_gradient.t() @ input     then copied
    F.linear, `_Linear`'s            torch.mm(output_gradient.t(), input, out=window of the bucket)
    F.embedding, `_Embedding`'s      window.zero_().index_add_(0, tokens, output_gradient)

Autograd keeps an alias of the window as `.grad`: nothing is copied, and no memory is allocated for
the gradient. Megatron-LM fuses weight gradients in the same way ("gradient_accumulation_fusion").
"""

import weakref
from collections.abc import Callable
from typing import Any, TypeGuard, cast

import torch
from torch.nn import Embedding, Linear, functional

from ddp_from_scratch.core.bucket import BucketState
from ddp_from_scratch.core.extension import Extension
from ddp_from_scratch.core.reducer import CoreReducer

Layer = Linear | Embedding

# Elements of a weight from which on a linear layer is fused; an embedding from so many times more.
# Of smaller ones the saved copy takes less time than the Python code of a backward of our own.
_WORTH, _EMBEDDING = 2**16, 4


class FusedWgrad(Extension):
    """Linear and embedding layers whose backward passes write into the buckets.

    Layers with a weight of at least 65,536 elements (an embedding's: 262,144) of which the Reducer
    has the gradient; of their gradients those that are packed one by one (`Bucket.packs_early`).
    Their `forward` is replaced; copies of a layer have torch's.

    A large embedding saves most: for it autograd fills new memory with zeros, and packing copies
    them all. Convolutions are left to autograd: `aten::convolution_backward.out` computes in memory
    of its own, too, and copies from there.

    Elsewhere gradients are computed as torch does, with the same numbers: parametrized weights,
    complex ones, subclasses of the two classes, a layer with a `forward` of its own; embeddings of
    16-bit floats, or with `sparse`, `scale_grad_by_freq` or `max_norm`; for a pass, hooks on the
    weight, autocast, torch.compile, torch.func, `create_graph`, `torch.autograd.grad`, a weight
    that is not the Reducer's; for a gradient, a second one of its parameter, or a `.grad` that is
    there already.

    Needs the extension `Views`, and all parameters on a CPU.
    """

    def attach(self, reducer: CoreReducer) -> None:
        super().attach(reducer)
        self._index_of = {id(p): index for index, p in enumerate(reducer.parameters)}
        # Claimed and not arrived yet: a second gradient of the parameter must not overwrite it.
        self._claimed: set[int] = set()
        self._layers: list[Layer] = []
        for layer in reducer.module.modules():
            if _is_plain(layer) and id(layer.weight) in self._index_of:
                layer.forward = _Forward(layer, self)  # type: ignore[method-assign]
                self._layers.append(layer)

    def index_of(self, parameter: torch.Tensor | None) -> int | None:
        return self._index_of.get(id(parameter))

    def window(self, index: int | None, accumulation: Any) -> torch.Tensor | None:
        """Returns the window to write a gradient to; None if it may not be written there."""
        if index is None or index in self._claimed:
            return None
        try:
            if not torch._C._will_engine_execute_node(accumulation):
                return None
        except RuntimeError:  # in torch.autograd.grad, whose caller gets the gradient
            return None
        reducer: CoreReducer | None = self._of()
        if reducer is None:  # a graph that has outlived it
            return None
        bucket = reducer.bucket_of[index]
        if bucket.state is not BucketState.FILLING or index not in bucket.missing:
            return None
        window = bucket.claim(index) if bucket.packs_early else None
        if window is not None:
            self._claimed.add(index)
        return window

    def on_gradient(self, index: int) -> None:
        self._claimed.discard(index)

    def on_forward(self) -> None:
        # Claims of a pass that an exception has ended. Not inside of a backward pass, where
        # checkpointed layers run forward again.
        if self._claimed and torch._C._current_graph_task_id() == -1:
            self._claimed.clear()

    def remove(self) -> None:
        # Graphs that are still alive get no window any more.
        self._of = lambda: None
        for layer in self._layers:
            vars(layer).pop("forward", None)
        self._layers.clear()


def _is_plain(layer: Any) -> TypeGuard[Layer]:
    # A parametrized layer is of a class of its own. Complex gradients are made of conjugates.
    return (
        type(layer) in _FUSED
        and "forward" not in vars(layer)
        and layer.weight.is_floating_point()
        and layer.weight.numel() >= _WORTH * (_EMBEDDING if type(layer) is Embedding else 1)
    )


class _Forward:
    """The forward of a fused layer; copies of the layer get torch's."""

    def __init__(self, layer: Layer, fused: FusedWgrad) -> None:
        # Weakly: the layer holds this.
        self._layer, self._fused = weakref.ref(layer), fused

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        layer = self._layer()
        assert layer is not None, "its layer calls it"
        # In each pass: `torch.func.functional_call` puts other tensors in the parameters' places.
        if self._fused.index_of(layer.weight) is None or not _can_fuse(input, layer.weight):
            return cast(torch.Tensor, _own_forward(layer)(input))
        return _FUSED[type(layer)](layer, input, self._fused)

    def __deepcopy__(self, copied: dict[int, Any]) -> Any:
        return _own_forward(copied[id(self._layer())])

    def __reduce__(self) -> Any:
        return _own_forward, (self._layer(),)


def _own_forward(layer: Layer) -> Any:
    return type(layer).forward.__get__(layer)


def _can_fuse(input: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        torch.is_grad_enabled()
        and weight.requires_grad
        and not weight._backward_hooks
        and type(input) is torch.Tensor
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
    ) -> torch.Tensor:
        # The weight only where it is needed, as torch: an optimizer's step may have changed it.
        context.save_for_backward(input, weight if context.needs_input_grad[0] else None)
        context.fused = fused
        context.indices = None, fused.index_of(weight), fused.index_of(bias)
        return functional.linear(input, weight, bias)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        input, weight = context.saved_tensors
        for_input, for_weight, for_bias = context.needs_input_grad[:3]
        outer = gradient.reshape(-1, gradient.shape[-1])
        inner = input.reshape(-1, input.shape[-1])
        return (
            gradient.matmul(weight) if for_input else None,
            _into(_window(context, 1), torch.mm, outer.t(), inner) if for_weight else None,
            _into(_window(context, 2), torch.sum, outer, 0) if for_bias else None,
            None,
        )


class _Embedding(torch.autograd.Function):
    """`F.embedding` whose backward adds the gradients of the tokens' rows up in a window."""

    @staticmethod
    def forward(
        context: Any,
        tokens: torch.Tensor,
        weight: torch.Tensor,
        padding: int | None,
        fused: FusedWgrad,
    ) -> torch.Tensor:
        context.save_for_backward(tokens)
        context.rows, context.padding = len(weight), padding
        context.fused, context.indices = fused, (None, fused.index_of(weight))
        return functional.embedding(tokens, weight, padding)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        (tokens,) = context.saved_tensors
        rows, padding, window = context.rows, context.padding, _window(context, 1)
        if window is None:
            unused = -1 if padding is None else padding % rows
            dense = torch.ops.aten.embedding_dense_backward(gradient, tokens, rows, unused, False)
            return None, dense, None, None
        # In the order of the tokens, as autograd adds the rows.
        window.zero_().index_add_(0, tokens.reshape(-1), gradient.reshape(-1, gradient.shape[-1]))
        if padding is not None:
            window[padding] = 0
        return None, _alias(window), None, None


def _window(context: Any, argument: int) -> torch.Tensor | None:
    """Returns the window for the gradient of a Function's argument; None if there is none now."""
    # With `create_graph` the gradients themselves are differentiated.
    if torch.is_grad_enabled():
        return None
    accumulation, _ = context.next_functions[argument]
    fused: FusedWgrad = context.fused
    return fused.window(context.indices[argument], accumulation)


def _into(
    window: torch.Tensor | None, compute: Callable[..., torch.Tensor], *arguments: Any
) -> torch.Tensor:
    return compute(*arguments) if window is None else _alias(compute(*arguments, out=window))


def _alias(window: torch.Tensor) -> torch.Tensor:
    # One that nobody else has: autograd copies a gradient that it does not own alone.
    return window.view_as(window)


def _embedding(layer: Any, tokens: torch.Tensor, fused: FusedWgrad) -> torch.Tensor:
    # Of 16-bit rows index_add_ rounds the sum once, and autograd after each row.
    exact = layer.weight.dtype in (torch.float32, torch.float64)
    if not exact or layer.sparse or layer.scale_grad_by_freq or layer.max_norm is not None:
        return Embedding.forward(layer, tokens)
    output: torch.Tensor = _Embedding.apply(tokens, layer.weight, layer.padding_idx, fused)
    return output


_FUSED: dict[type, Callable[[Any, torch.Tensor, FusedWgrad], torch.Tensor]] = {
    Linear: lambda layer, input, fused: _Linear.apply(input, layer.weight, layer.bias, fused),
    Embedding: _embedding,
}
