"""`gradient_as_bucket_view`: a parameter's `.grad` is a window of its bucket, not a copy."""

from collections.abc import Collection, Mapping, Sequence
from itertools import repeat
from operator import is_
from typing import Any

import torch

from ddp_from_scratch.common.memory import same_memory
from ddp_from_scratch.core.bucket import AveragePlan, BucketState, FlatBucket, gradient_of


class ViewBucket(FlatBucket):
    """A bucket whose windows are the gradients between backward passes.

    Large gradients on a CPU are packed as they become ready, while they are in the cache.
    """

    no_graph_reason = "a window of a bucket: use gradient_as_bucket_view=False"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # True if `pack_one` must be called for each gradient as it arrives.
        self.packs_early: bool = not self._together
        # The tensors that become `.grad`. They are not `views`, whose memory must never change:
        # `module.half()` gives a `.grad` other memory.
        self._grad_windows = self.views_of(self.flat)
        self._position = {index: position for position, index in enumerate(self.members)}
        self._addresses = [view.data_ptr() for view in self.views]  # compared in every pass
        # The address of each window, and its parameter, of all buckets that share the memory.
        self._windows: Mapping[int, str] = dict.fromkeys(self._addresses, "a parameter")
        # Members whose gradient is already in the buffer, multiplied by `_scale`.
        self._packed, self._scale = set[int](), 1.0

    def window_names(self, names: Sequence[str]) -> dict[int, str]:
        """Maps the addresses of the windows to these names of all parameters."""
        named = zip(self._addresses, self.members, self.views, strict=True)
        return {address: names[index] for address, index, view in named if view.numel()}

    def know_windows(self, windows: Mapping[int, str]) -> None:
        """Notes which parameter's window lies where, in all buckets."""
        self._windows = windows

    def grad_view(self, index: int) -> torch.Tensor | None:
        """Returns the window for a missing gradient; None if the parameter has a `.grad`."""
        position = self._position[index]
        is_free = index not in self.shared and self._parameters[position].grad is None
        return self.views[position] if is_free else None

    @torch.no_grad()
    def pack_one(self, index: int, plan: AveragePlan) -> None:
        """Copies parameter `index`'s gradient in, scaled; adds it if one was packed.

        Does nothing if the plan keeps gradients.
        """
        position = self._position[index]
        parameter, view = self._parameters[position], self.views[position]
        gradient, scale = parameter.grad, plan.scale
        if gradient is None or plan.keeps_gradients or index in self.shared:
            return
        if index in self._packed:
            view.add_(gradient, alpha=scale)
        elif gradient.data_ptr() == self._addresses[position] and same_memory(gradient, view):
            _multiply(view, scale)  # autograd has accumulated in place
        else:
            if gradient.data_ptr() in self._windows:
                self._check_source(position, gradient)
            if scale == 1:
                view.copy_(gradient)
            else:
                torch.mul(gradient, scale, out=view)
        # Otherwise autograd would add its next contribution, unscaled, to this scaled gradient.
        parameter.grad = None
        self._packed.add(index)
        self._scale = scale

    @torch.no_grad()
    def restore_grads(self) -> None:
        """Moves gradients that `pack_one` packed back to `.grad`, up to rounding."""
        if self.state is BucketState.FILLING:
            for index in self._packed:
                position = self._position[index]
                _multiply(self.views[position], 1 / self._scale)
                self._parameters[position].grad = self._grad_window(position)
            self._packed.clear()

    def pack(self, plan: AveragePlan) -> Collection[int]:
        if self.state is not BucketState.FILLING:
            raise self._relaunch_error()
        self.op = plan.op
        gone: Collection[int] = ()
        if len(self._packed) < len(self.members):  # else each was packed when it was ready
            gone = self._pack_rest(plan.scale)
        if plan.sends_zeros:
            self.flat.zero_()  # scaling by 0 would keep NaN
        return gone

    def _pack_rest(self, scale: float) -> Collection[int]:
        """Packs what `pack_one` has not packed."""
        gradients = [*map(gradient_of, self._parameters)]
        if not (self._packed or self.unused or self.shared) and self._are_new(gradients):
            self._copy_scaled(self.views, gradients, scale)
            for parameter, window in zip(self._parameters, self._grad_windows, strict=True):
                parameter.grad = window
            return ()
        return self._pack_each(gradients, scale)

    def _pack_each(self, gradients: Sequence[torch.Tensor | None], scale: float) -> set[int]:
        """Packs gradients of which some are in the buffer, unused, shared or missing."""
        sources, windows, in_place, gone = [], [], [], set[int]()
        # The `.grad` of a shared member is not in the buffer until the average is there: the other
        # Reducer packs it later, and must not find what is in flight.
        packed, unused, stays = self._packed, self.unused, self.unused | self.shared
        for position, (index, parameter, view) in enumerate(self._rows):
            if index in packed:
                continue
            gradient = gradients[position]
            if gradient is None:
                gone.add(index)
                view.zero_()
            elif same_memory(gradient, view):
                in_place.append(view)
                if index in stays:
                    # If no rank uses this parameter, `.grad` must keep its value.
                    parameter.grad = view.clone()
            else:
                self._check_source(position, gradient)
                sources.append(gradient)
                windows.append(view)
                if index not in stays:
                    parameter.grad = self._grad_window(
                        position
                    )  # frees the gradient's memory early
        self._copy_scaled(windows, sources, scale)
        if not (self._together or scale == 1):
            for view in in_place:
                view.mul_(scale)
        gone -= unused
        self.unused |= gone
        return gone

    def taken(self) -> set[int]:
        return super().taken() - self._packed

    def _are_new(self, gradients: Sequence[Any]) -> bool:
        """True, as in most passes, if no gradient is in a bucket and each window is."""
        if any(map(is_, gradients, repeat(None))):
            return False
        intact = [*map(torch.Tensor.data_ptr, self._grad_windows)] == self._addresses
        in_buckets = self._windows.keys()
        return intact and in_buckets.isdisjoint(map(torch.Tensor.data_ptr, gradients))

    def _check_source(self, position: int, gradient: torch.Tensor) -> None:
        """Raises a RuntimeError if a gradient is in the window of another parameter."""
        other = self._windows.get(gradient.data_ptr())
        own = self._windows.get(self._addresses[position])
        if other is not None and other != own:
            raise RuntimeError(
                f"the .grad of {own} is that of {other}, which is a part of a bucket: .grad was "
                f"swapped or shared between parameters. Copy its values, {own}.grad.copy_(...), or "
                f"call zero_grad() after the step"
            )

    def unpack(self, used: Collection[int] | None = None) -> None:
        if self.state is BucketState.LANDED:
            # In most passes each `.grad` is its window since `pack`, or can become it.
            intact = [*map(torch.Tensor.data_ptr, self._grad_windows)] == self._addresses
            there = intact and all(map(is_, map(gradient_of, self._parameters), self._grad_windows))
            if used is None and intact and not there:
                for parameter, window in zip(self._parameters, self._grad_windows, strict=True):
                    parameter.grad = window
            elif not there:
                for position, (index, parameter, _) in enumerate(self._rows):
                    if used is None or index in used:
                        parameter.grad = self._grad_window(position)
        self.reset()

    def reset(self) -> None:
        super().reset()
        self._packed.clear()

    def snapshot(self) -> dict[int, torch.Tensor]:
        """Returns a copy of each `.grad` that is a window; new buckets reuse the memory."""
        # One large tensor, because the C library does not return small blocks to the system.
        copies = self.views_of(self.flat.clone())
        return {
            index: copy
            for (index, parameter, view), copy in zip(self._rows, copies, strict=True)
            if parameter.grad is not None and same_memory(parameter.grad, view)
        }

    @torch.no_grad()
    def restore(self, saved: Mapping[int, torch.Tensor]) -> None:
        """Copies these gradients in, and makes each `.grad` its window."""
        for position, (index, parameter, view) in enumerate(self._rows):
            if index in saved:
                view.copy_(saved[index])
                parameter.grad = self._grad_window(position)

    def _grad_window(self, position: int) -> torch.Tensor:
        # The program may have given the tensor other memory.
        if self._grad_windows[position].data_ptr() != self._addresses[position]:
            view = self.views[position]
            window = view.as_strided(view.shape, view.stride(), view.storage_offset())
            self._grad_windows[position] = window
        return self._grad_windows[position]


def _multiply(tensor: torch.Tensor, factor: float) -> None:
    if factor != 1:
        tensor.mul_(factor)
