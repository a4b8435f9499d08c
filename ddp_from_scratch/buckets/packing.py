"""How the gradients of a bucket get into its flat buffer, and the averages out of it."""

from collections.abc import Collection, Sequence

import torch

from ddp_from_scratch.buckets.layout import BucketLayout
from ddp_from_scratch.buckets.memory import dense_strides, lies_at, window

_SMALL = 2**15  # bytes of a gradient


class Packing:
    """The members of a bucket, each with a window of the flat buffer.

        gradients   | a |   | b |   | c |        a tensor each
                      |       |       |
        buffer      | a     | b     | c     |    views: windows of it

    With `gradient_as_bucket_view` the parameter's `.grad` is such a window between backward passes,
    another tensor object over the same memory: what happens to that one (`module.half()` gives it
    other memory) leaves the window where it is.

    Large gradients on a CPU are packed one by one then, as they come, while they are in the cache,
    and `.grad` is None until the average is there: what autograd adds meanwhile comes as a gradient
    of its own.

    Args:
        layout: the members and their offsets.
        parameters: the members' parameters, in the layout's order.
        flat: the buffer.
        gradient_as_bucket_view: let `.grad` be the window.
        strides: of the members' windows; None takes their parameters' own.

    Attributes:
        views: a window for each member, with the shape of its parameter. Never somebody's `.grad`.
        one_by_one: whether `pack_one` is to be called with each gradient.
    """

    def __init__(
        self,
        layout: BucketLayout,
        parameters: Sequence[torch.nn.Parameter],
        flat: torch.Tensor,
        gradient_as_bucket_view: bool,
        strides: Sequence[tuple[int, ...]] | None = None,
    ) -> None:
        self._layout, self._parameters, self._flat = layout, parameters, flat
        self._strides = strides or [dense_strides(parameter) for parameter in parameters]
        self._as_view = gradient_as_bucket_view
        self.views = self.windows_of(flat)
        self._lent = self.windows_of(flat) if gradient_as_bucket_view else []
        self._position = {index: position for position, index in enumerate(layout.members)}
        # One call for all members, where each by itself would cost more than its elements.
        self._together = flat.device.type != "cpu" or flat.nbytes < _SMALL * len(parameters)
        self.one_by_one = gradient_as_bucket_view and not self._together
        self._packed: set[int] = set()  # in the buffer already, multiplied by:
        self._factor = 1.0

    def windows_of(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """A window of `buffer` for each member."""
        return [
            window(buffer, offset, parameter, strides)
            for offset, parameter, strides in zip(
                self._layout.offsets, self._parameters, self._strides, strict=True
            )
        ]

    def pack_one(self, index: int, factor: float) -> None:
        """Copies the gradient of parameter `index` in, multiplied; adds it if it comes again."""
        position = self._position[index]
        parameter, view = self._parameters[position], self.views[position]
        gradient = parameter.grad
        if gradient is None:
            return
        if index in self._packed:
            view.add_(gradient, alpha=factor)
        elif lies_at(gradient, view):  # accumulated in place
            _scale(view, factor)
        elif factor == 1:
            view.copy_(gradient)
        else:
            torch.mul(gradient, factor, out=view)
        parameter.grad = None
        self._packed.add(index)
        self._factor = factor

    def hold(self) -> None:
        """Gives what `pack_one` has packed back to `.grad`, to rounding."""
        for index in self._packed:
            position = self._position[index]
            _scale(self.views[position], 1 / self._factor)
            self._parameters[position].grad = self._lend(position)
        self._packed.clear()

    def pack(self, factor: float, absent: Collection[int]) -> None:
        """Copies the rest of the gradients in, multiplied by `factor`.

        Args:
            factor: what gradients are multiplied by.
            absent: got no gradient in this pass, and contribute what `.grad` holds, or zeros.

        Raises:
            RuntimeError: the gradient of a member that is not absent is gone.
        """
        # A gradient that is the window already (accumulated in place) lies there.
        sources, windows, in_place = [], [], []
        for position, (index, parameter, view) in enumerate(self._members()):
            if index in self._packed:
                continue
            gradient = parameter.grad
            if gradient is None:
                if index not in absent:
                    raise RuntimeError(
                        f"the gradient of a parameter of shape {tuple(parameter.shape)} was set "
                        f"to None after it was counted in and before it was averaged"
                    )
                view.zero_()
                continue
            if lies_at(gradient, view):
                in_place.append(view)
                if index in absent:
                    parameter.grad = view.clone()  # stays as it is if no rank has used it
                continue
            sources.append(gradient)
            windows.append(view)
            if self._as_view and index not in absent:
                parameter.grad = self._lend(position)  # its own memory is free again
        if self._together or factor == 1:
            _copy(windows, sources)
            _scale(self._flat, factor)
        else:
            for into, source in zip(windows, sources, strict=True):
                torch.mul(source, factor, out=into)
            for view in in_place:
                view.mul_(factor)

    def unpack(self, used: Collection[int] | None, absent: Collection[int]) -> None:
        """Puts what the buffer holds into `.grad`.

        Args:
            used: the members that are meant; None means all.
            absent: as of `pack`: they get a `.grad` even where they have none.
        """
        gradients, windows = [], []
        for position, (index, parameter, view) in enumerate(self._members()):
            if used is not None and index not in used:
                continue
            if self._as_view:
                parameter.grad = self._lend(position)
            elif parameter.grad is None:
                if index in absent:  # else set to None by the user while it was under way
                    parameter.grad = view.clone()
            else:
                gradients.append(parameter.grad)
                windows.append(view)
        _copy(gradients, windows)

    def reset(self) -> None:
        """Forgets what has been packed."""
        self._packed.clear()

    def leave(self) -> None:
        """Gives every `.grad` that is a window of the buffer memory of its own."""
        for _, parameter, view in self._members():
            if parameter.grad is not None and lies_at(parameter.grad, view):
                parameter.grad = view.clone()

    def _lend(self, position: int) -> torch.Tensor:
        """The window as a tensor that may become `.grad`: the same one as long as it lies there."""
        lent = self._lent[position]
        if lent.data_ptr() != self.views[position].data_ptr():
            view = self.views[position]
            lent = self._lent[position] = view.as_strided(
                view.shape, view.stride(), view.storage_offset()
            )
        return lent

    def _members(self) -> list[tuple[int, torch.nn.Parameter, torch.Tensor]]:
        return list(zip(self._layout.members, self._parameters, self.views, strict=True))


def _scale(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return tensor if factor == 1 else tensor.mul_(factor)


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)
