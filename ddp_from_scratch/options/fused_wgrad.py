"""Computes weight gradients directly into their buckets, without a copy.

    F.linear, autograd's backward    gradient = output_gradient.t() @ input     then copied
    F.linear, `_Linear`'s            torch.mm(output_gradient.t(), input, out=window of the bucket)

Megatron-LM does the same ("gradient_accumulation_fusion").
"""

import weakref
from collections.abc import Callable
from typing import Any, TypeGuard, cast

import torch
from torch.nn import Linear, functional

from ddp_from_scratch.core.bucket import BucketState
from ddp_from_scratch.core.observer import Observer
from ddp_from_scratch.core.reducer import CoreReducer
from ddp_from_scratch.core.view_bucket import ViewBucket

# A layer is fused if its weight has at least this many elements. In smaller layers the Python
# backward pass costs more time than the copy that it saves.
_MIN_FUSED_NUMEL = 2**16


class FusedWgrad(Observer):
    """Makes the backward passes of linear layers write into the buckets.

    A fused layer's `forward` is replaced; copies of the layer have torch's. Only gradients that are
    packed one by one (`ViewBucket.packs_early`) are written to buckets. torch computes all others,
    with the same numbers. Convolutions are left to it: `aten::convolution_backward.out` copies,
    too.
    """

    def attach(self, reducer: CoreReducer) -> None:
        super().attach(reducer)
        self._index_of = {id(p): index for index, p in enumerate(reducer.parameters)}
        # Windows given out whose gradient is not complete: a second gradient must not overwrite it.
        self._claimed: set[int] = set()
        self._layers: list[Linear] = []
        for layer in reducer.module.modules():
            if _is_plain(layer) and id(layer.weight) in self._index_of:
                layer.forward = _FusedForward(layer, self)  # type: ignore[method-assign]
                self._layers.append(layer)

    def index_of(self, parameter: torch.Tensor | None) -> int | None:
        return self._index_of.get(id(parameter))

    def window(self, accumulation: Any) -> torch.Tensor | None:
        """Returns the window for the gradient of an autograd node; None if torch must allocate."""
        reducer: CoreReducer | None = self._reducer()  # None if the graph has outlived it
        index = self.index_of(getattr(accumulation, "variable", None))
        if reducer is None or index is None or index in self._claimed:
            return None
        try:
            if not torch._C._will_engine_execute_node(accumulation):
                return None
        except RuntimeError:  # torch.autograd.grad, which returns the gradient to its caller
            return None
        bucket = reducer.bucket_of[index]
        if not isinstance(bucket, ViewBucket) or not bucket.packs_early:
            return None
        # The products have the dtype of the weight, and the gradient may have another one.
        if bucket.flat.dtype != reducer.parameters[index].dtype:
            return None
        if bucket.state is not BucketState.FILLING or index not in bucket.missing:
            return None
        window = bucket.grad_view(index)
        if window is not None:
            self._claimed.add(index)
        return window

    def on_gradient(self, index: int) -> None:
        self._claimed.discard(index)

    def on_forward(self) -> None:
        # Drops claims that an exception has left, but not when a checkpoint recomputes in backward.
        if self._claimed and torch._C._current_graph_task_id() == -1:
            self._claimed.clear()

    def remove(self) -> None:
        self._reducer = lambda: None  # graphs that are still alive must get no window
        for layer in self._layers:
            vars(layer).pop("forward", None)
        self._layers.clear()


def _is_plain(layer: Any) -> TypeGuard[Linear]:
    # Parametrization changes a layer's class. Gradients of complex weights need conjugates.
    return (
        type(layer) is Linear
        and "forward" not in vars(layer)
        and layer.weight.is_floating_point()
        and layer.weight.numel() >= _MIN_FUSED_NUMEL
    )


class _FusedForward:
    def __init__(self, layer: Linear, fused: FusedWgrad) -> None:
        # Weak, because the layer holds this object.
        self._layer, self._fused = weakref.ref(layer), fused

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        layer = self._layer()
        assert layer is not None, "its layer calls it"
        # Looked up in each pass, since `torch.func.functional_call` substitutes parameters.
        # A parametrization changes the layer's class, even if its weight stays the same.
        fuses = type(layer) is Linear and self._fused.index_of(layer.weight) is not None
        if not fuses or not _can_fuse(input, layer.weight):
            return cast(torch.Tensor, _own_forward(layer)(input))
        return cast(torch.Tensor, _Linear.apply(input, layer.weight, layer.bias, self._fused))

    def __deepcopy__(self, copied: dict[int, Any]) -> Any:
        return _own_forward(copied[id(self._layer())])

    def __reduce__(self) -> Any:
        return _own_forward, (self._layer(),)


def _own_forward(layer: Linear) -> Any:
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
    @staticmethod
    def forward(
        context: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        fused: FusedWgrad,
    ) -> torch.Tensor:
        # As in torch, the weight is saved only if needed: an optimizer's step may change it.
        context.save_for_backward(input, weight if context.needs_input_grad[0] else None)
        context.fused = fused
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


def _window(context: Any, argument: int) -> torch.Tensor | None:
    # `create_graph` differentiates the gradients, so they cannot be written in place.
    if torch.is_grad_enabled():
        return None
    fused: FusedWgrad = context.fused
    return fused.window(context.next_functions[argument][0])


def _into(
    window: torch.Tensor | None, compute: Callable[..., torch.Tensor], *arguments: Any
) -> torch.Tensor:
    return compute(*arguments) if window is None else _alias(compute(*arguments, out=window))


def _alias(window: torch.Tensor) -> torch.Tensor:
    # A new tensor object: autograd copies a gradient that anything else references.
    return window.view_as(window)
