"""One bucket: a flat buffer, the gradients that lie in it, and its all-reduce under way.

Steps 4 to 6 of a gradient's way: pack, launch, wait, unpack.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from .layout import BucketLayout
from .memory import in_huge_pages, window

_SMALL = 2**15  # bytes of a gradient

CommHook = Callable[[Any, Any], torch.futures.Future[Any]]


class Bucket:
    """A flat buffer and the gradients of its members.

    The phases of one backward pass:

    1. `mark_ready`: once per member, as its gradient arrives; `mark_absent` for a member that
       gets none. True when the bucket is now full.
    2. `launch`: pack the gradients into the buffer and hand it to the comm hook.
    3. `finish`: wait for the average and put it back into `.grad`.

    `views[i]` is a window of the buffer with the shape and strides of member i's parameter. With
    `gradient_as_bucket_view` that window is the parameter's `.grad` between backward passes. Large
    gradients on a CPU are packed by `mark_ready` then, while they are in the cache, and `.grad` is
    None until the average is there: what autograd adds meanwhile comes as a gradient of its own.

    A comm hook sees it as torch's `dist.GradBucket`: `index`, `is_last`, `buffer`, `set_buffer`,
    `gradients`, `parameters`.

    Args:
        layout: the members and their offsets.
        parameters: the members' parameters, in the layout's order; all of one dtype and device.
        gradient_as_bucket_view: let `.grad` be the window of the buffer.
        index: its place in the order of launch.
        is_last: whether no bucket comes after it.
        flat: the buffer, of the layout's size; None makes one.
    """

    def __init__(
        self,
        layout: BucketLayout,
        parameters: Sequence[torch.nn.Parameter],
        gradient_as_bucket_view: bool,
        index: int = 0,
        is_last: bool = True,
        flat: torch.Tensor | None = None,
    ) -> None:
        self.layout = layout
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self._parameters = list(parameters)
        self._index, self._is_last = index, is_last
        first = self._parameters[0]
        if flat is None:
            flat = torch.zeros(layout.numel, dtype=first.dtype, device=first.device)
        self._flat = flat
        self._sent = self._flat  # what a comm hook sees: it may put another tensor in its place
        self.views = [
            window(self._flat, offset, parameter)
            for offset, parameter in zip(layout.offsets, self._parameters, strict=True)
        ]
        self._position = {index: position for position, index in enumerate(layout.members)}
        self.missing = set(layout.members)
        self._absent: set[int] = set()  # counted in, without a gradient
        self._room: torch.Tensor | None = None
        # One call for all members, where each by itself would cost more than its elements.
        small = self._flat.nbytes < _SMALL * len(self._parameters)
        self._grouped = small or self._flat.device.type != "cpu"
        self._packs_at_once = gradient_as_bucket_view and not self._grouped
        self._packed: set[int] = set()  # in the buffer already, multiplied by:
        self._factor = 1.0
        self._future: torch.futures.Future[Any] | None = None

    # What a comm hook sees ----------------------------------------------------------------------

    def index(self) -> int:
        """Its place in the order of launch, 0 for the first."""
        return self._index

    def is_last(self) -> bool:
        """Whether it is the last to be launched in a backward pass."""
        return self._is_last

    def buffer(self) -> torch.Tensor:
        """The flat tensor of all its gradients, or what `set_buffer` put in its place."""
        return self._sent

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Lets `buffer()` give another tensor of as many elements, until the next launch."""
        if buffer.numel() != self._flat.numel():
            raise ValueError(f"the buffer must have {self._flat.numel()}, got {buffer.numel()}")
        self._sent = buffer

    def gradients(self) -> list[torch.Tensor]:
        """One window of `buffer()` for each member, with the shape of its parameter."""
        return [
            window(self._sent, offset, parameter)
            for offset, parameter in zip(self.layout.offsets, self._parameters, strict=True)
        ]

    def room(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A tensor to compress the buffer into, the same one in every pass."""
        if self._room is None or (self._room.shape, self._room.dtype) != (shape, dtype):
            self._room = in_huge_pages(torch.empty(shape, dtype=dtype, device=self._flat.device))
        return self._room

    def parameters(self) -> list[torch.nn.Parameter]:
        """The members' parameters, in the order in which their gradients lie in the buffer."""
        return list(self._parameters)

    # 1. ready -----------------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """Whether some of its gradients have been counted in."""
        return len(self.missing) < len(self._parameters)

    @property
    def launched(self) -> bool:
        """Whether its all-reduce is under way."""
        return self._future is not None

    @property
    def landed(self) -> bool:
        """Whether it waits for no other rank: its average is there, or nothing was launched."""
        return self._future is None or self._future.done()

    def mark_ready(self, index: int, factor: float = 1.0) -> bool:
        """Counts the gradient of parameter `index` in; True when no other is missing.

        A gradient that changes before the launch is packed as it is then. Where it is packed at
        once, one that comes again is added.

        Args:
            index: of a member.
            factor: what `launch` will be told.
        """
        if self._packs_at_once:
            self._pack_one(index, factor)
        self.missing.discard(index)
        self._absent.discard(index)
        return not self.missing

    def mark_absent(self, index: int) -> bool:
        """Counts parameter `index` in without a gradient; True when no other is missing.

        It contributes what `.grad` holds from earlier passes, or zeros. A no-op for one that has
        been counted in.
        """
        if index in self.missing:
            self.missing.discard(index)
            self._absent.add(index)
        return not self.missing

    def _pack_one(self, index: int, factor: float) -> None:
        position = self._position[index]
        parameter, view = self._parameters[position], self.views[position]
        gradient = parameter.grad
        if gradient is None:
            return
        if index in self._packed:
            view.add_(gradient, alpha=factor)
        elif gradient is view:  # accumulated in place
            _scale(view, factor)
        elif factor == 1:
            view.copy_(gradient)
        else:
            torch.mul(gradient, factor, out=view)
        parameter.grad = None
        self._packed.add(index)
        self._factor = factor

    @torch.no_grad()
    def hold(self) -> None:
        """Gives packed gradients back to `.grad`, to rounding: the pass ended before the launch."""
        if self.launched:
            return
        for index, parameter, view in self._members():
            if index in self._packed:
                parameter.grad = _scale(view, 1 / self._factor)
        self._packed.clear()

    # 2. launch ----------------------------------------------------------------------------------

    @torch.no_grad()
    def launch(
        self,
        comm_hook: CommHook,
        state: Any = None,
        share: float = 1.0,
        factor: float = 1.0,
    ) -> None:
        """Packs the gradients and lets `comm_hook` send them; returns while they are under way.

        Args:
            comm_hook: averages `buffer()` over ranks; see comm_hooks.py.
            state: handed to the hook.
            share: the gradients are multiplied by it first. The shares of all ranks add up to the
                world size, so that the hook's average over ranks is weighted by them.
            factor: they are multiplied by it, too.
        """
        self._pack(share * factor)
        if share == 0:
            self._flat.zero_()  # also what is not a number: the loss of an empty batch
        self._sent = self._flat
        future = comm_hook(state, self)
        if not isinstance(future, torch._C.Future):
            raise TypeError(
                f"a comm hook must return a torch.futures.Future, "
                f"{getattr(comm_hook, '__name__', comm_hook)} returned {type(future).__name__}"
            )
        self._future = future

    def wait(self) -> None:
        """Waits for the average, if the bucket was launched, and leaves it in the buffer.

        Raises:
            RuntimeError: the all-reduce failed (a peer died, a timeout).
            TypeError: the comm hook's future gave something else than a tensor.
        """
        if self._future is None:
            return
        average = self._future.wait()
        if isinstance(average, (list, tuple)) and len(average) == 1:
            average = average[0]
        if not isinstance(average, torch.Tensor):
            raise TypeError(
                f"the future of a comm hook must give a tensor, got {type(average).__name__}"
            )
        if average.data_ptr() != self._flat.data_ptr() or average.dtype != self._flat.dtype:
            target = self._flat
            if target.is_complex() and not average.is_complex():
                target = torch.view_as_real(target)
            with torch.no_grad():
                target.copy_(average.view(target.shape))

    # 3. finish ----------------------------------------------------------------------------------

    @torch.no_grad()
    def finish(self, used: Collection[int] | None = None) -> None:
        """Waits for the average, unpacks, and is ready for the next backward pass.

        Idempotent: nothing is unpacked when nothing was launched.

        Args:
            used: the parameters that got a gradient on some rank; the `.grad` of others stays as
                it is. None means all.

        Raises: as `wait`.
        """
        if self._future is not None:
            self.wait()
            self._unpack(used)
        self.reset()

    @torch.no_grad()
    def leave(self) -> None:
        """Gives every `.grad` that is a window of the buffer memory of its own."""
        for _, parameter, view in self._members():
            if parameter.grad is view:
                parameter.grad = view.clone()

    def reset(self) -> None:
        """Forgets what was counted in and launched. Idempotent."""
        self._future = None
        self._sent = self._flat
        self.missing = set(self.layout.members)
        self._absent.clear()
        self._packed.clear()

    def _pack(self, factor: float) -> None:
        """Copies the gradients in, multiplied by `factor`."""
        # A gradient that is the window already (accumulated in place) lies there.
        sources, windows, in_place = [], [], []
        for index, parameter, view in self._members():
            if index in self._packed:
                continue
            gradient = parameter.grad
            if gradient is None:
                if index not in self._absent:
                    raise RuntimeError(
                        f"the gradient of a parameter of shape {tuple(parameter.shape)} was set "
                        f"to None after it was counted in and before it was averaged"
                    )
                view.zero_()
                continue
            if gradient is view:
                in_place.append(view)
                if index in self._absent:
                    parameter.grad = view.clone()  # stays as it is if no rank has used it
                continue
            sources.append(gradient)
            windows.append(view)
            if self.gradient_as_bucket_view and index not in self._absent:
                parameter.grad = view  # its own memory is free again
        if self._grouped or factor == 1:
            _copy(windows, sources)
            _scale(self._flat, factor)
        else:
            for window, source in zip(windows, sources, strict=True):
                torch.mul(source, factor, out=window)
            for view in in_place:
                view.mul_(factor)

    def _unpack(self, used: Collection[int] | None) -> None:
        gradients, windows = [], []
        for index, parameter, view in self._members():
            if used is not None and index not in used:
                continue
            if self.gradient_as_bucket_view:
                parameter.grad = view
            elif parameter.grad is None:
                if index in self._absent:  # else set to None by the user while it was under way
                    parameter.grad = view.clone()
            else:
                gradients.append(parameter.grad)
                windows.append(view)
        _copy(gradients, windows)

    def _members(self) -> list[tuple[int, torch.nn.Parameter, torch.Tensor]]:
        return list(zip(self.layout.members, self._parameters, self.views, strict=True))


def _scale(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return tensor if factor == 1 else tensor.mul_(factor)


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)
