"""Copies gradients into a flat buffer (pack), and averages out of it (unpack)."""

from collections.abc import Collection, Mapping, Sequence

import torch

from ddp_from_scratch import gpu
from ddp_from_scratch.buckets.layout import BucketLayout
from ddp_from_scratch.buckets.memory import dense_strides, lies_at, window

# Mean size in bytes of a bucket's gradients. Below it a call for each costs more than the copy.
_SMALL = 2**15


class Packing:
    """The windows of a bucket's members in the flat buffer.

        gradients   | a |   | b |   | c |        a tensor each
                      |       |       |
        buffer      | a     | b     | c     |    views: windows of it

    With `gradient_as_bucket_view` a parameter's `.grad` is such a window between backward passes.
    Large gradients on a CPU are then packed one by one as they become ready, while they are in the
    cache, and `.grad` is None until the average is there.

    Args:
        layout: the members and their offsets.
        parameters: the members' parameters, in the layout's order.
        flat: the buffer.
        gradient_as_bucket_view: True makes `.grad` the window.
        strides: the strides of the members' windows; None takes the parameters' own.

    Attributes:
        views: a window for each member, with the shape of its parameter. Never used as a `.grad`.
        one_by_one: True if `pack_one` must be called with each gradient.
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
        # The tensors that become `.grad`. Not `views` themselves: `module.half()` gives a `.grad`
        # other memory, and the window must stay where it is.
        self._lent = self.windows_of(flat) if gradient_as_bucket_view else []
        self._position = {index: position for position, index in enumerate(layout.members)}
        # Addresses are compared in every pass. A view's never changes, so it is asked for once.
        addresses = [view.data_ptr() for view in self.views]
        self._rows = list(zip(layout.members, parameters, self.views, addresses, strict=True))
        # One call copies all members if a call for each would cost more than the copy itself.
        self._together = flat.device.type != "cpu" or flat.nbytes < _SMALL * len(parameters)
        self.one_by_one = gradient_as_bucket_view and not self._together
        # Members whose gradient is in the buffer already, multiplied by `_scale`.
        self._packed: set[int] = set()
        self._scale = 1.0

    def windows_of(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Returns a window of `buffer` for each member."""
        return [
            window(buffer, offset, parameter, strides)
            for offset, parameter, strides in zip(
                self._layout.offsets, self._parameters, self._strides, strict=True
            )
        ]

    def claim(self, index: int) -> torch.Tensor | None:
        """Returns the window for a missing gradient; None if one has been accumulated before."""
        position = self._position[index]
        return self.views[position] if self._parameters[position].grad is None else None

    def pack_one(self, index: int, scale: float) -> None:
        """Copies the gradient of parameter `index` in, times `scale`. Adds it if one is there."""
        position = self._position[index]
        parameter, view = self._parameters[position], self.views[position]
        gradient = parameter.grad
        if gradient is None:
            return
        if index in self._packed:
            view.add_(gradient, alpha=scale)
        elif lies_at(gradient, view):
            # Autograd has accumulated in place: it lies there, but unscaled.
            _multiply(view, scale)
        elif scale == 1:
            view.copy_(gradient)
        else:
            torch.mul(gradient, scale, out=view)
        # Without a `.grad`, autograd's next contribution comes as a gradient of its own. Otherwise
        # autograd would add it, unscaled, to this scaled one.
        parameter.grad = None
        self._packed.add(index)
        self._scale = scale

    def restore_grads(self) -> None:
        """Moves gradients that `pack_one` has packed back to `.grad`, up to rounding."""
        for index in self._packed:
            position = self._position[index]
            _multiply(self.views[position], 1 / self._scale)
            self._parameters[position].grad = self._lend(position)
        self._packed.clear()

    def forget(self) -> None:
        """Forgets which members are packed. Idempotent."""
        self._packed.clear()

    def pack(self, scale: float, unused: Collection[int]) -> None:
        """Copies the rest of the gradients in, multiplied by `scale`.

        Args:
            scale: factor of each gradient.
            unused: members without a gradient in this pass. They contribute the `.grad` that
                earlier passes have left, or zeros.

        Raises:
            RuntimeError: the gradient of a member that is not unused is gone.
        """
        sources, windows, in_place = [], [], []
        packed, as_view = self._packed, self._as_view
        for position, (index, parameter, view, address) in enumerate(self._rows):
            if packed and index in packed:
                continue
            gradient = parameter.grad
            if gradient is None:
                if index not in unused:
                    raise RuntimeError(
                        f"the gradient of a parameter of shape {tuple(parameter.shape)} was set "
                        f"to None after it was counted in and before it was averaged"
                    )
                view.zero_()
            elif gradient.data_ptr() == address and gradient.stride() == view.stride():
                in_place.append(view)
                if index in unused:
                    # The buffer will hold the average. If no rank has used this parameter, `.grad`
                    # must keep its own value.
                    parameter.grad = view.clone()
            else:
                sources.append(gradient)
                windows.append(view)
                if as_view and not (unused and index in unused):
                    # Frees the memory of the gradient before the average is there. `_lend` is only
                    # called where it has more to do: this runs once for every gradient.
                    lent = self._lent[position]
                    parameter.grad = lent if lent.data_ptr() == address else self._lend(position)
        if self._together or scale == 1:
            _copy(windows, sources)
            if scale != 1:
                self._flat.mul_(scale)
        else:
            for into, source in zip(windows, sources, strict=True):
                torch.mul(source, scale, out=into)
            for view in in_place:
                view.mul_(scale)

    def unpack(self, used: Collection[int] | None, unused: Collection[int]) -> None:
        """Puts the averages in the buffer into `.grad`, and forgets the packed members.

        Args:
            used: the members to unpack; None means all.
            unused: see `pack`. These get a `.grad` even if they have none.
        """
        self._packed.clear()
        gradients, windows = [], []
        as_view = self._as_view
        for position, (index, parameter, view, address) in enumerate(self._rows):
            if used is not None and index not in used:
                continue
            gradient = parameter.grad
            if as_view:
                # `pack` has put most of them there. Looking costs less than putting them again.
                if gradient is None or gradient.data_ptr() != address:
                    parameter.grad = self._lend(position)
            elif gradient is not None:
                gradients.append(gradient)
                windows.append(view)
            elif index in unused:
                # A used member had a gradient at the launch. If it has none now, the user has
                # dropped it since.
                parameter.grad = view.clone()
        _copy(gradients, windows)

    def held(self, copy: torch.Tensor) -> dict[int, torch.Tensor]:
        """Returns the window of `copy`, a copy of the buffer, for each `.grad` that is a window."""
        rows = zip(self._rows, self.windows_of(copy), strict=True)
        return {
            index: own
            for (index, parameter, view, _), own in rows
            if parameter.grad is not None and lies_at(parameter.grad, view)
        }

    def hold(self, held: Mapping[int, torch.Tensor]) -> None:
        """Copies these gradients of members in, and makes each `.grad` its window."""
        for position, (index, parameter, view, _) in enumerate(self._rows):
            if index in held:
                view.copy_(held[index])
                parameter.grad = self._lend(position)

    def _lend(self, position: int) -> torch.Tensor:
        """Returns the window as a tensor that may become `.grad`."""
        lent = self._lent[position]
        # The same object in every pass, unless the program has given it other memory.
        if lent.data_ptr() != self._rows[position][3]:
            view = self.views[position]
            lent = self._lent[position] = view.as_strided(
                view.shape, view.stride(), view.storage_offset()
            )
        return lent


def _multiply(tensor: torch.Tensor, factor: float) -> None:
    if factor != 1:
        tensor.mul_(factor)


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if not targets:
        return
    if not gpu.is_gpu(targets[0].device):
        torch._foreach_copy_(targets, sources)
        return
    # One kernel copies them all, unless the strides of a single pair differ: then each pair takes a
    # kernel of its own.
    into, out_of = [], []
    for target, source in zip(targets, sources, strict=True):
        if target.stride() == source.stride():
            into.append(target)
            out_of.append(source)
        else:
            target.copy_(source)
    torch._foreach_copy_(into, out_of)
