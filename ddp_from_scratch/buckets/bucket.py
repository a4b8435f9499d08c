"""A flat buffer for the gradients of several parameters: pack, launch, wait, unpack."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ddp_from_scratch import gpu
from ddp_from_scratch.buckets.gradient_bucket import BucketState, LaunchArgs
from ddp_from_scratch.buckets.layout import BucketLayout
from ddp_from_scratch.buckets.memory import in_huge_pages
from ddp_from_scratch.buckets.packing import Packing


class Bucket:
    """A `GradientBucket` of dense gradients, averaged as one flat tensor.

    - ready: `mark_ready` is called once per member, as its gradient arrives; `mark_unused` for a
      member that gets none.
    - pack and launch: `launch` copies the gradients into the buffer and hands it to the comm hook.
    - wait and unpack: `finish` waits for the average and puts it into `.grad`.

    Comm hooks call the methods that torch's `dist.GradBucket` has, too: `index`, `is_last`,
    `buffer`, `set_buffer`, `gradients`, `parameters`.

    Args:
        layout: the members and their offsets.
        parameters: the members' parameters, in the layout's order; all of one dtype and device.
        gradient_as_bucket_view: True makes each `.grad` a window of the buffer.
        index: its place in the order of launch.
        is_last: True if no bucket comes after this one.
        flat: the buffer, of the layout's size; None allocates one.
        strides: the strides of the members' windows; None takes the parameters' own.

    Attributes:
        views: a window of the buffer for each member, where `.grad` lies with bucket views.
        name: for errors.
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
        self.name = f"bucket {index}"
        first = self._parameters[0]
        if flat is None:
            flat = torch.zeros(layout.numel, dtype=first.dtype, device=first.device)
        self._flat = flat
        # The tensor that the comm hook sends. The hook may replace it; packing always uses `_flat`.
        self._sent = flat
        self._packing = Packing(layout, self._parameters, flat, gradient_as_bucket_view, strides)
        self.views = self._packing.views
        self.early = self._packing if self._packing.one_by_one else None
        self.state = BucketState.FILLING
        self.missing = set(layout.members)
        # Neither missing nor ready: members that have no gradient in this pass.
        self._unused: set[int] = set()
        # Kept from pass to pass: compressing then allocates no temporary tensors.
        self._scratch: torch.Tensor | None = None
        # None unless LAUNCHED or LANDED.
        self._future: torch.futures.Future[Any] | None = None
        # Comes after the kernels of a comm hook that ran on a stream of its own.
        self._launched: torch.Event | None = None

    # For comm hooks -----------------------------------------------------------------------------

    def index(self) -> int:
        """Returns its place in the order of launch, 0 for the first."""
        return self._index

    def is_last(self) -> bool:
        """True if it is the last to be launched in a backward pass."""
        return self._is_last

    def buffer(self) -> torch.Tensor:
        """Returns the flat tensor of all its gradients, or its replacement from `set_buffer`."""
        return self._sent

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replaces the tensor that `buffer()` returns, until the next launch."""
        if buffer.numel() != self._flat.numel():
            raise ValueError(f"the buffer must have {self._flat.numel()}, got {buffer.numel()}")
        self._sent = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Returns a window of `buffer()` for each member, with the shape of its parameter."""
        return self._packing.windows_of(self._sent)

    def windows_of(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Returns a window of another flat tensor of its size for each member."""
        return self._packing.windows_of(buffer)

    def scratch(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor to compress the buffer into, the same one in every pass."""
        if self._scratch is None or (self._scratch.shape, self._scratch.dtype) != (shape, dtype):
            self._scratch = in_huge_pages(torch.empty(shape, dtype=dtype, device=self._flat.device))
        return self._scratch

    def parameters(self) -> list[torch.nn.Parameter]:
        """Returns the members' parameters, in the order of their gradients in the buffer."""
        return list(self._parameters)

    # Ready --------------------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """True if a member has been marked ready or unused."""
        return len(self.missing) < len(self._parameters)

    def mark_ready(self, index: int) -> bool:
        """Marks the gradient of parameter `index` ready; True if no other is missing. Idempotent.

        If `.grad` changes again before the launch, the launch packs the later value.
        """
        self.missing.discard(index)
        if self._unused:
            self._unused.discard(index)
        return not self.missing

    def mark_unused(self, index: int) -> None:
        """Marks parameter `index` as one without a gradient in this pass. A no-op if it is ready.

        It contributes the `.grad` that earlier passes have left, or zeros.
        """
        if index in self.missing:
            self.missing.discard(index)
            self._unused.add(index)

    @torch.no_grad()
    def restore_grads(self) -> None:
        """Moves packed gradients back to `.grad`, up to rounding. For a pass without a launch."""
        if self.state is BucketState.FILLING:
            self._packing.restore_grads()

    # Pack, launch -------------------------------------------------------------------------------

    @torch.no_grad()
    def launch(self, args: LaunchArgs, on_packed: Callable[[Any], None] | None = None) -> None:
        """Packs the gradients and calls the comm hook; returns before the average is there.

        Args:
            args: see `LaunchArgs`.
            on_packed: see `GradientBucket`.

        Raises:
            RuntimeError: the bucket is launched already, or a gradient is gone.
            TypeError: the hook returned no future.
        """
        if self.state is not BucketState.FILLING:
            raise RuntimeError(f"bucket {self._index} is launched a second time")
        self._packing.pack(args.scale, self._unused)
        if args.weight == 0:
            # Not a multiplication by 0: the loss of an empty batch gives NaN, and 0 * NaN is NaN.
            self._flat.zero_()
        self._sent = self._flat
        if on_packed is not None:
            on_packed(self)
        future = self._call(args)
        if not isinstance(future, torch._C.Future):
            raise TypeError(
                f"a comm hook must return a torch.futures.Future, "
                f"{getattr(args.hook, '__name__', args.hook)} returned {type(future).__name__}"
            )
        self._future = future
        self.state = BucketState.LAUNCHED

    def _call(self, args: LaunchArgs) -> torch.futures.Future[Any]:
        if not (args.aside and gpu.is_gpu(self._flat.device)):
            return args.hook(args.state, self)
        # From torch 2.15 on, `get_future` of NCCL makes the current stream wait for the collective.
        # On backward's stream that would end the overlap.
        with gpu.aside(self._flat.device) as stream:
            future = args.hook(args.state, self)
            self._launched = stream.record_event()
        return future

    # Wait ---------------------------------------------------------------------------------------

    @property
    def arrived(self) -> bool:
        """True if this bucket waits for no other rank. Safe to call from any thread."""
        # Read once: `finish` in another thread may set it to None.
        future = self._future
        return future is None or future.done()

    def when_landed(self, callback: Callable[[], None]) -> None:
        """Calls back, in whatever thread, when the launched average is there or has failed."""
        if self._future is not None:
            self._future.then(lambda _: callback())

    def wait(self) -> None:
        """Waits for the average and leaves it in the buffer. A no-op if nothing was launched.

        Raises:
            RuntimeError: the all-reduce failed (a peer died, a timeout).
            TypeError: the comm hook's future holds something else than a tensor.
        """
        if self._future is None or self.state is BucketState.LANDED:
            return
        average = self._future.wait()
        if self._launched is not None:
            torch.accelerator.current_stream(self._flat.device).wait_event(self._launched)
        if isinstance(average, (list, tuple)) and len(average) == 1:
            average = average[0]
        if not isinstance(average, torch.Tensor):
            raise TypeError(
                f"the future of a comm hook must give a tensor, got {type(average).__name__}"
            )
        # Most hooks average in place. Others return a tensor of their own, perhaps of another
        # dtype.
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
        """Waits for the average, unpacks it, and empties the bucket.

        Idempotent: unpacks nothing if nothing was launched.

        Args:
            used: the parameters that got a gradient on some rank. The `.grad` of others stays as it
                is. None means all.

        Raises: as `wait`.
        """
        if self._future is not None:
            self.wait()
            self._packing.unpack(used, self._unused)
        self._future = self._launched = None
        self._sent = self._flat
        self.state = BucketState.FILLING
        self.missing = set(self.layout.members)
        self._unused.clear()

    def reset(self) -> None:
        """Empties the bucket, whatever has become of its launch. Idempotent."""
        self._packing.forget()
        self._future = None
        self.finish()

    # To other windows ---------------------------------------------------------------------------

    def held(self, copy: torch.Tensor) -> dict[int, torch.Tensor]:
        """Returns the window of `copy`, a copy of the buffer, for each `.grad` that is a window."""
        return self._packing.held(copy)

    @torch.no_grad()
    def hold(self, held: Mapping[int, torch.Tensor]) -> None:
        """Copies these gradients of members in, and makes each `.grad` its window."""
        self._packing.hold(held)
