"""A flat buffer for the gradients of several parameters: pack, launch, wait, unpack."""

from collections.abc import Collection, Sequence
from typing import Any

import torch

from ddp_from_scratch.buckets.gradient_bucket import BucketState, LaunchArgs
from ddp_from_scratch.buckets.layout import BucketLayout
from ddp_from_scratch.buckets.memory import in_huge_pages
from ddp_from_scratch.buckets.packing import Packing


class Bucket:
    """A `GradientBucket` of dense gradients, averaged as one flat tensor.

    - ready: `mark_ready` once per member, as its gradient arrives; `mark_unused` for a member
      that gets none.
    - pack and launch: `launch` copies the gradients into the buffer and hands it to the comm hook.
    - wait and unpack: `finish` waits for the average and puts it into `.grad`.

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

    is_sparse = False

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
        self._sent = flat  # the comm hook's buffer: it may put another tensor in its place
        self._packing = Packing(layout, self._parameters, flat, gradient_as_bucket_view, strides)
        self.packs_early = self._packing.one_by_one
        self.state = BucketState.FILLING
        self.missing = set(layout.members)
        self._unused: set[int] = set()  # counted in, without a gradient
        self._scratch: torch.Tensor | None = None
        self._future: torch.futures.Future[Any] | None = None

    # For comm hooks -----------------------------------------------------------------------------

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

    def scratch(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A tensor to compress the buffer into, the same one in every pass."""
        if self._scratch is None or (self._scratch.shape, self._scratch.dtype) != (shape, dtype):
            self._scratch = in_huge_pages(torch.empty(shape, dtype=dtype, device=self._flat.device))
        return self._scratch

    def parameters(self) -> list[torch.nn.Parameter]:
        """The members' parameters, in the order in which their gradients lie in the buffer."""
        return list(self._parameters)

    @property
    def views(self) -> list[torch.Tensor]:
        """A window of the flat buffer for each member: with views its `.grad` lies there."""
        return self._packing.views

    # Ready --------------------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """Whether a member has been marked ready or unused."""
        return len(self.missing) < len(self._parameters)

    def pack_one(self, index: int, scale: float) -> None:
        """Packs one gradient, times `scale`, as soon as it is there; adds one that comes again."""
        self._packing.pack_one(index, scale)

    def mark_ready(self, index: int) -> bool:
        """Marks the gradient of parameter `index` ready; True if no other is missing.

        A gradient that changes before the launch is packed as it is then. Idempotent.
        """
        self.missing.discard(index)
        if self._unused:
            self._unused.discard(index)
        return not self.missing

    def mark_unused(self, index: int) -> None:
        """Marks parameter `index` as one without a gradient in this pass.

        It contributes what `.grad` holds from earlier passes, or zeros. A no-op once it is ready.
        """
        if index in self.missing:
            self.missing.discard(index)
            self._unused.add(index)

    @torch.no_grad()
    def restore_grads(self) -> None:
        """Gives packed gradients back to `.grad`, to rounding: the pass ended before the launch."""
        if self.state is BucketState.FILLING:
            self._packing.restore_grads()

    # Pack, launch -------------------------------------------------------------------------------

    @torch.no_grad()
    def launch(self, args: LaunchArgs) -> None:
        """Packs the gradients and lets the comm hook send them; returns while they are under way.

        Raises:
            RuntimeError: it is under way already, or a gradient is gone.
            TypeError: the hook returned no future.
        """
        if self.state is not BucketState.FILLING:
            raise RuntimeError(f"bucket {self._index} is launched a second time")
        self._packing.pack(args.scale, self._unused)
        if args.weight == 0:
            self._flat.zero_()  # also what is not a number: the loss of an empty batch
        self._sent = self._flat
        future = args.hook(args.state, self)
        if not isinstance(future, torch._C.Future):
            raise TypeError(
                f"a comm hook must return a torch.futures.Future, "
                f"{getattr(args.hook, '__name__', args.hook)} returned {type(future).__name__}"
            )
        self._future = future
        self.state = BucketState.LAUNCHED

    # Wait ---------------------------------------------------------------------------------------

    @property
    def arrived(self) -> bool:
        """Whether no other rank is waited for. May be asked in any thread."""
        future = self._future
        return future is None or future.done()

    def wait(self) -> None:
        """Waits for the average, if the bucket was launched, and leaves it in the buffer.

        Raises:
            RuntimeError: the all-reduce failed (a peer died, a timeout).
            TypeError: the comm hook's future gave something else than a tensor.
        """
        if self._future is None or self.state is BucketState.LANDED:
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
        self.state = BucketState.LANDED

    # Unpack -------------------------------------------------------------------------------------

    @torch.no_grad()
    def finish(self, used: Collection[int] | None = None) -> None:
        """Waits for the average, unpacks, and is empty again.

        Idempotent: nothing is unpacked where nothing was launched.

        Args:
            used: the parameters that got a gradient on some rank; the `.grad` of others stays as
                it is. None means all.

        Raises: as `wait`.
        """
        if self._future is not None:
            self.wait()
            self._packing.unpack(used, self._unused)
        self._future = None
        self._sent = self._flat
        self.state = BucketState.FILLING
        self.missing = set(self.layout.members)
        self._unused.clear()

    @torch.no_grad()
    def detach_grads(self) -> None:
        """Gives every `.grad` that is a window of the buffer memory of its own."""
        self._packing.detach_grads()
