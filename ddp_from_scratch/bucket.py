"""One bucket: a flat buffer, the gradients that lie in it, and its all-reduce under way.

Steps 4 to 6 of a gradient's way: pack, launch, wait, unpack.
"""

from collections.abc import Callable, Sequence

import torch

from .layout import BucketLayout

# What a bucket sends: starts the reduction of a flat buffer in place and returns the handle,
# whose wait() returns when the buffer holds the average.
CommHook = Callable[[torch.Tensor], "torch.distributed.Work"]


class Bucket:
    """A flat buffer and the gradients of its members.

    The phases of one backward pass:

    1. `mark_ready`: once per member, as its gradient arrives. True when the bucket is now full.
    2. `launch`: pack the gradients into the buffer and start its all-reduce.
    3. `finish`: wait for the all-reduce and put the average back into `.grad`.

    `views[i]` is a window of the buffer with the shape and strides of member i's parameter. With
    `gradient_as_bucket_view` that window is the parameter's `.grad`, and packing and unpacking
    copy nothing where autograd accumulated into it.

    Args:
        layout: the members and their offsets.
        parameters: the members' parameters, in the layout's order; all of one dtype and device.
        gradient_as_bucket_view: let `.grad` be the window of the buffer.
    """

    def __init__(
        self,
        layout: BucketLayout,
        parameters: Sequence[torch.nn.Parameter],
        gradient_as_bucket_view: bool,
    ) -> None:
        self.layout = layout
        self.parameters = list(parameters)
        self.gradient_as_bucket_view = gradient_as_bucket_view
        first = self.parameters[0]
        self.buffer = torch.zeros(layout.numel, dtype=first.dtype, device=first.device)
        self.views = [
            _window(self.buffer, offset, parameter)
            for offset, parameter in zip(layout.offsets, self.parameters, strict=True)
        ]
        self._position = {index: position for position, index in enumerate(layout.members)}
        self.missing = set(layout.members)
        self.handle: torch.distributed.Work | None = None

    @property
    def begun(self) -> bool:
        """Whether some of its gradients have been counted in."""
        return len(self.missing) < len(self.parameters)

    @property
    def launched(self) -> bool:
        """Whether its all-reduce is under way."""
        return self.handle is not None

    def mark_ready(self, index: int) -> bool:
        """Counts the gradient of parameter `index` in; True when no other is missing.

        Idempotent: a gradient that changes before the launch is packed as it is then.
        """
        if self.gradient_as_bucket_view:
            # Moved in at once, not when the bucket is full: its own memory is free again.
            position = self._position[index]
            self._move_in(self.parameters[position], self.views[position])
        self.missing.discard(index)
        return not self.missing

    @torch.no_grad()
    def _move_in(self, parameter: torch.nn.Parameter, view: torch.Tensor) -> None:
        if parameter.grad is not None and parameter.grad is not view:
            view.copy_(parameter.grad)
            parameter.grad = view

    def launch(self, comm_hook: CommHook) -> None:
        """Packs the gradients and starts the all-reduce; returns while it is under way."""
        with torch.no_grad():
            self._pack()
            self.handle = comm_hook(self.buffer)

    def finish(self) -> None:
        """Waits for the all-reduce, unpacks, and is ready for the next backward pass.

        Idempotent: a no-op when nothing was launched.

        Raises:
            RuntimeError: the all-reduce failed (a peer died, a timeout).
        """
        if self.handle is None:
            return
        self.handle.wait()
        self.handle = None
        self.missing = set(self.layout.members)
        with torch.no_grad():
            self._unpack()

    def _pack(self) -> None:
        # A gradient that is the window already (accumulated in place) must not be copied: it lies
        # there. One kernel for all others, not one per parameter.
        sources, windows = [], []
        for parameter, view in zip(self.parameters, self.views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                raise RuntimeError(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} was set to "
                    f"None after it was counted in and before it was averaged"
                )
            if gradient is not view:
                sources.append(gradient)
                windows.append(view)
        if sources:
            torch._foreach_copy_(windows, sources)

    def _unpack(self) -> None:
        if self.gradient_as_bucket_view:
            for parameter, view in zip(self.parameters, self.views, strict=True):
                parameter.grad = view
        else:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            torch._foreach_copy_(gradients, self.views)


def _window(buffer: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor:
    """The elements of `buffer` from `offset` on, in the parameter's shape and memory order.

    The parameter's own strides are kept where they leave no hole, so that autograd, which lays a
    gradient out as its parameter, never has to transpose (channels-last models).
    """
    dense = parameter.is_contiguous() or parameter.permute(_memory_order(parameter)).is_contiguous()
    strides = parameter.stride() if dense else torch.empty(parameter.shape, device="meta").stride()
    return buffer.as_strided(parameter.shape, strides, offset)


def _memory_order(tensor: torch.Tensor) -> list[int]:
    return sorted(range(tensor.dim()), key=lambda dim: tensor.stride(dim), reverse=True)
