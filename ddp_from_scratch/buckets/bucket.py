"""One bucket: a flat buffer, the gradients that lie in it, and its all-reduce under way.

Steps 4 to 6 of a gradient's way: pack, launch, wait, unpack.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from ddp_from_scratch.buckets.layout import BucketLayout
from ddp_from_scratch.buckets.memory import in_huge_pages
from ddp_from_scratch.buckets.packing import Packing

CommHook = Callable[[Any, Any], torch.futures.Future[Any]]


class Bucket:
    """A flat buffer and the gradients of its members.

    The phases of one backward pass:

    1. `mark_ready`: once per member, as its gradient arrives; `mark_absent` for a member that
       gets none. True when the bucket is now full.
    2. `launch`: pack the gradients into the buffer and hand it to the comm hook.
    3. `finish`: wait for the average and put it back into `.grad`.

    A comm hook sees it as torch's `dist.GradBucket`: `index`, `is_last`, `buffer`, `set_buffer`,
    `gradients`, `parameters`.

    Args:
        layout: the members and their offsets.
        parameters: the members' parameters, in the layout's order; all of one dtype and device.
        gradient_as_bucket_view: let `.grad` be the window of the buffer.
        index: its place in the order of launch.
        is_last: whether no bucket comes after it.
        flat: the buffer, of the layout's size; None makes one.
        strides: of the members' windows; None takes their parameters' own.
    """

    def __init__(
        self,
        layout: BucketLayout,
        parameters: Sequence[torch.nn.Parameter],
        gradient_as_bucket_view: bool,
        index: int = 0,
        is_last: bool = True,
        flat: torch.Tensor | None = None,
        strides: Sequence[tuple[int, ...]] | None = None,
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
        self._packing = Packing(layout, self._parameters, flat, gradient_as_bucket_view, strides)
        self.missing = set(layout.members)
        self._absent: set[int] = set()  # counted in, without a gradient
        self._room: torch.Tensor | None = None
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
        return self._packing.windows_of(self._sent)

    def room(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A tensor to compress the buffer into, the same one in every pass."""
        if self._room is None or (self._room.shape, self._room.dtype) != (shape, dtype):
            self._room = in_huge_pages(torch.empty(shape, dtype=dtype, device=self._flat.device))
        return self._room

    def parameters(self) -> list[torch.nn.Parameter]:
        """The members' parameters, in the order in which their gradients lie in the buffer."""
        return list(self._parameters)

    @property
    def views(self) -> list[torch.Tensor]:
        """A window of the flat buffer for each member: with views its `.grad` lies there."""
        return self._packing.views

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
        if self._packing.one_by_one:
            self._packing.pack_one(index, factor)
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

    @torch.no_grad()
    def hold(self) -> None:
        """Gives packed gradients back to `.grad`, to rounding: the pass ended before the launch."""
        if not self.launched:
            self._packing.hold()

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
        self._packing.pack(share * factor, self._absent)
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
            self._packing.unpack(used, self._absent)
        self.reset()

    @torch.no_grad()
    def leave(self) -> None:
        """Gives every `.grad` that is a window of the buffer memory of its own."""
        self._packing.leave()

    def reset(self) -> None:
        """Forgets what was counted in and launched. Idempotent."""
        self._future = None
        self._sent = self._flat
        self.missing = set(self.layout.members)
        self._absent.clear()
        self._packing.reset()
