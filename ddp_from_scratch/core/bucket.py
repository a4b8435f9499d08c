"""A flat buffer for the gradients of several parameters: pack, launch, wait, unpack."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import accumulate, repeat
from operator import attrgetter, is_
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from ddp_from_scratch.common import gpu
from ddp_from_scratch.common.memory import (
    as_real,
    copy_one_by_one,
    dense_strides,
    grad_dtype,
    in_huge_pages,
    overlaps,
)

Future: TypeAlias = torch.futures.Future[Any]
CommHook: TypeAlias = Callable[[Any, Any], Future]

# For `map`, which loops over all gradients in C.
gradient_of: Callable[[torch.Tensor], Any] = attrgetter("grad")
_strides = torch.Tensor.stride
# Below this mean size in bytes of a gradient, a call for each costs more than the copy itself.
_SMALL = 2**15


class BucketState(Enum):
    """Where a bucket is in an average.

    FILLING -- launch --> LAUNCHED -- wait --> LANDED -- unpack --> FILLING

    On one rank nothing is sent:
    FILLING -- keep_gradients --> LAUNCHED -- unpack --> FILLING
    """

    FILLING = auto()  # gradients are marked ready, and nothing has been sent
    LAUNCHED = auto()  # the collective owns the buffer: nothing else may read or write it
    LANDED = auto()  # the buffer holds the average, `.grad` does not yet


@dataclass(frozen=True)
class AveragePlan:
    """How the buckets of an average are packed and sent: the same for all of them.

    Attributes:
        hook: `hook(state, bucket)` starts to average a bucket.
        state: its first argument.
        on_side_stream: True if that runs on a side stream, for buckets on a GPU.
        op: what the collective computes. None: the hook divides.
        scale: the factor with which flat gradients are packed.
        mean: the factor with which sparse gradients are packed.
        sends_zeros: True if this rank has no data.
        keeps_gradients: True if each gradient is its own average, so nothing is packed or sent.
    """

    hook: CommHook
    state: Any = None
    on_side_stream: bool = False
    op: dist.ReduceOp.RedOpType | None = None
    scale: float = 1.0
    mean: float = 1.0
    sends_zeros: bool = False
    keeps_gradients: bool = False


class Bucket(ABC):
    """Gradients that are averaged together.

    Args:
        members: indices of the parameters.
        index: its place in the launch order.
        name: for errors.
        label: for torch.profiler.

    Attributes:
        state: only `launch`, `keep_gradients`, `wait`, `unpack` and `reset` change it.
        missing: members that are neither ready nor unused.
        unused: members without a gradient in this pass. They contribute the `.grad` that earlier
            passes left, or zeros.
        deferred: members whose gradient is ready but not counted yet, with their parameters.
            Autograd stores them here without calling the Reducer.
    """

    # Why a gradient cannot keep its autograd graph here, for an error; empty if it can.
    no_graph_reason = ""

    def __init__(
        self,
        members: Sequence[int],
        parameters: Sequence[torch.nn.Parameter],
        index: int,
        name: str,
        label: str,
    ) -> None:
        self.members: tuple[int, ...] = tuple(members)
        self.name = name
        self.label = label
        self.state: BucketState = BucketState.FILLING
        self.missing: set[int] = set(self.members)
        self.unused: set[int] = set()
        self.deferred: dict[int, torch.Tensor] = {}
        self._parameters, self._index = list(parameters), index

    def index(self) -> int:
        return self._index

    def parameters(self) -> list[torch.nn.Parameter]:
        return list(self._parameters)

    @property
    def begun(self) -> bool:
        """True if a member is ready or unused."""
        return len(self.missing) < len(self._parameters) or bool(self.deferred)

    def mark_unused(self, index: int) -> None:
        """Marks a member that gets no gradient in this pass. A no-op if it is ready."""
        if index in self.missing:
            self.missing.discard(index)
            self.unused.add(index)

    @abstractmethod
    def pack(self, plan: AveragePlan) -> Collection[int]:
        """Copies the gradients, divided if the plan says so. Raises if the bucket is launched.

        Returns members that were ready but whose `.grad` is None. They contribute zeros, as unused.
        """

    @abstractmethod
    def keep_gradients(self) -> bool:
        """Leaves the gradients where they are, as their own average on one rank.

        Instead of `pack` and `launch`; raises as `pack`. Returns False, without effect, if that
        does not give the result of `pack` and `launch`.
        """

    @abstractmethod
    def launch(self, plan: AveragePlan) -> None:
        """Starts to average what `pack` has copied."""

    @property
    @abstractmethod
    def arrived(self) -> bool:
        """True if the host need not wait for the average, as always for collectives on a GPU.

        Safe to call from any thread.
        """

    @abstractmethod
    def when_landed(self, callback: Callable[[], None]) -> None:
        """Calls back, from any thread, when the average has arrived or failed."""

    @abstractmethod
    def wait(self) -> None:
        """Waits for the average. A no-op if nothing was launched."""

    @abstractmethod
    def unpack(self, used: Collection[int] | None = None) -> None:
        """Puts an average that has landed into `.grad`, and empties the bucket. Idempotent.

        Parameters that are not among the `used` keep their `.grad`; None means all.
        """

    @abstractmethod
    def reset(self) -> None:
        """Empties the bucket, whatever became of its launch. Idempotent."""


class FlatBucket(Bucket):
    """Gradients that are averaged together, in one flat tensor.

        gradients   | a |   | b |   | c |        a tensor each
                      |       |       |
        buffer      | a     | b     | c     |    views: windows of it

    - ready: a member leaves `missing` when its gradient is complete, or when it gets none.
    - pack: copies the gradients into the buffer.
    - launch: hands the buffer to the comm hook.
    - wait: the buffer holds the average.
    - unpack: copies the averages into `.grad`, and empties the bucket.

    Comm hooks see the methods of torch's `dist.GradBucket`: `index`, `is_last`, `buffer`,
    `set_buffer`, `gradients`, `parameters`.

    Args:
        members: indices of the parameters, in the order of their gradients in the buffer.
        parameters: all of one dtype and device.
        flat: the buffer; None allocates one.
        strides: of each member's window; None takes the parameters' own.
        index: its place in the launch order.
        is_last: True for the last flat bucket.
        name: for errors.
        label: for torch.profiler.

    Attributes:
        shared: members that another Reducer averages, too.
        op: turns the packed buffer into the average; None leaves the choice to the comm hook.
    """

    shared: frozenset[int] = frozenset()

    def __init__(
        self,
        members: Sequence[int],
        parameters: Sequence[torch.nn.Parameter],
        flat: torch.Tensor | None = None,
        strides: Sequence[tuple[int, ...]] | None = None,
        index: int = 0,
        is_last: bool = True,
        name: str = "a bucket",
        label: str = "ddp.bucket",
    ) -> None:
        super().__init__(members, parameters, index, name, label)
        self._is_last = is_last
        *offsets, numel = accumulate((p.numel() for p in parameters), initial=0)
        self.offsets: tuple[int, ...] = tuple(offsets)  # where each member's gradient begins
        first = self._parameters[0]
        if flat is None:
            flat = torch.zeros(numel, dtype=grad_dtype(first), device=first.device)
        self.flat: torch.Tensor = flat
        # What comm hooks see. Complex numbers are pairs of reals, as in torch's DDP, since hooks
        # cast to 16-bit floats.
        self._real = as_real(flat)
        self._on_gpu = gpu.is_gpu(flat.device)
        # What the comm hook sends, and may replace: `buffer()` for this package's hooks.
        self.sent: torch.Tensor = self._real
        self._strides = strides or [dense_strides(parameter) for parameter in parameters]
        self.views: list[torch.Tensor] = self.views_of(flat)
        self._rows = list(zip(self.members, self._parameters, self.views, strict=True))
        # True if one call copies all members.
        self._together = self._on_gpu or flat.nbytes < _SMALL * len(self._parameters)
        self.op: dist.ReduceOp.RedOpType | None = None
        # Held until the average is there, so that Python need not wrap each `.grad` again.
        self._sources: list[torch.Tensor] = []
        self._scratch: torch.Tensor | None = None  # kept: compression then allocates nothing
        self._future: Future | None = None  # None unless LAUNCHED or LANDED
        # Recorded behind the kernels of a comm hook that ran on a side stream.
        self._launched: torch.Event | None = None

    # For comm hooks -----------------------------------------------------------------------------

    def is_last(self) -> bool:
        return self._is_last

    def buffer(self) -> torch.Tensor:
        """Returns the flat tensor of its gradients, or what `set_buffer` put in its place.

        A complex number is two elements, its real and its imaginary part.
        """
        return self.sent

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replaces what `buffer()` returns, until the next launch."""
        if buffer.numel() != self._real.numel():
            raise ValueError(f"the buffer must have {self._real.numel()}, got {buffer.numel()}")
        self.sent = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Returns a window of `buffer()` for each member, with the shape of its parameter.

        For complex numbers it has one dimension more, of size 2, as in `torch.view_as_real`.
        """
        return self.views_of(self.sent)

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns each member's window of another flat tensor of the size of `flat` or `buffer()`.

        In the latter the windows of complex gradients are those of `gradients()`.
        """
        begin = flat.storage_offset()
        rows = zip(self.offsets, self._parameters, self._strides, strict=True)
        if self.flat.is_complex() and not flat.is_complex():
            return [
                flat.as_strided((*p.shape, 2), (*(2 * s for s in strides), 1), begin + 2 * offset)
                for offset, p, strides in rows
            ]
        return [flat.as_strided(p.shape, strides, begin + offset) for offset, p, strides in rows]

    def scratch(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor for the compressed buffer, the same one in every pass."""
        if self._scratch is None or (self._scratch.shape, self._scratch.dtype) != (shape, dtype):
            self._scratch = in_huge_pages(torch.empty(shape, dtype=dtype, device=self.flat.device))
        return self._scratch

    # Pack ---------------------------------------------------------------------------------------

    def pack(self, plan: AveragePlan) -> Collection[int]:
        if self.state is not BucketState.FILLING:
            raise self._relaunch_error()
        self.op = plan.op
        windows, sources, gone = self.views, [*map(gradient_of, self._parameters)], set[int]()
        if any(map(is_, sources, repeat(None))):
            windows = []
            for index, parameter, view in self._rows:
                if parameter.grad is not None:
                    windows.append(view)
                else:
                    view.zero_()
                    gone.add(index)
            sources = [gradient for gradient in sources if gradient is not None]
            gone -= self.unused
            self.unused |= gone
        self._sources = sources
        self._copy_scaled(windows, sources, plan.scale)
        if plan.sends_zeros:
            self.flat.zero_()  # scaling by 0 would keep NaN
        return gone

    def keep_gradients(self) -> bool:
        if self.state is not BucketState.FILLING:
            raise self._relaunch_error()
        if any(map(is_, map(gradient_of, self._parameters), repeat(None))):
            return False
        self.state = BucketState.LAUNCHED  # without a future: `wait` and `unpack` find nothing
        return True

    def _copy_scaled(
        self, windows: list[torch.Tensor], sources: list[torch.Tensor], scale: float
    ) -> None:
        if self._together or scale == 1:
            if self._on_gpu:
                windows, sources = self._copy_strided(windows, sources)
            if windows:
                try:
                    torch._foreach_copy_(windows, sources)
                except RuntimeError:
                    copy_one_by_one(windows, sources)
            if scale != 1:
                self.flat.mul_(scale)
        else:
            for window, source in zip(windows, sources, strict=True):
                torch.mul(source, scale, out=window)

    def taken(self) -> set[int]:
        """Returns members whose gradient was packed, but whose `.grad` is None since then."""
        return {i for i, parameter, _ in self._rows if parameter.grad is None} - self.unused

    def _relaunch_error(self) -> RuntimeError:
        return RuntimeError(f"bucket {self._index} is launched a second time")

    def _copy_strided(
        self, targets: list[torch.Tensor], sources: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Copies the pairs whose strides differ; returns the others, for one kernel on a GPU."""
        if [*map(_strides, targets)] == [*map(_strides, sources)]:
            return targets, sources
        equal: list[tuple[torch.Tensor, torch.Tensor]] = []
        for target, source in zip(targets, sources, strict=True):
            if target.stride() == source.stride():
                equal.append((target, source))
            else:
                target.copy_(source)
        return [target for target, _ in equal], [source for _, source in equal]

    # Launch -------------------------------------------------------------------------------------

    def launch(self, plan: AveragePlan) -> None:
        self.sent = self._real
        if plan.on_side_stream and self._on_gpu:
            # From torch 2.15 on, NCCL's `get_future` makes the current stream wait for the
            # collective, which would end the overlap if it were backward's stream.
            with gpu.aside(self.flat.device) as stream:
                future = plan.hook(plan.state, self)
                self._launched = stream.record_event()
        else:
            future = plan.hook(plan.state, self)
        if not isinstance(future, torch._C.Future):
            raise TypeError(
                f"a comm hook must return a torch.futures.Future, "
                f"{getattr(plan.hook, '__name__', plan.hook)} returned {type(future).__name__}"
            )
        self._future, self.state = future, BucketState.LAUNCHED

    # Wait ---------------------------------------------------------------------------------------

    @property
    def arrived(self) -> bool:
        future = self._future  # read once: `unpack` in another thread may set it to None
        return future is None or future.done()

    def when_landed(self, callback: Callable[[], None]) -> None:
        if self._future is not None:
            self._future.then(lambda _: callback())

    def wait(self) -> None:
        if self.state is not BucketState.LAUNCHED or self._future is None:
            return
        average = self._future.wait()
        if self._launched is not None:
            torch.accelerator.current_stream(self.flat.device).wait_event(self._launched)
        if isinstance(average, (list, tuple)) and len(average) == 1:
            average = average[0]
        if not isinstance(average, torch.Tensor):
            kind = type(average).__name__
            raise TypeError(f"the future of a comm hook must give a tensor, got {kind}")
        # Most hooks average in place. Others return a new tensor, perhaps of another dtype.
        if average.data_ptr() != self.flat.data_ptr() or average.dtype != self._real.dtype:
            target = self.flat if average.is_complex() else self._real
            target.copy_(average.reshape(target.shape))
        self.state = BucketState.LANDED

    # Unpack -------------------------------------------------------------------------------------

    def unpack(self, used: Collection[int] | None = None) -> None:
        if self.state is BucketState.LANDED:
            windows, gradients = self.views, [*map(gradient_of, self._parameters)]
            if used is not None or any(map(is_, gradients, repeat(None))):
                windows, gradients = [], []
                for index, parameter, view in self._rows:
                    if used is not None and index not in used:
                        continue
                    if (gradient := parameter.grad) is not None:
                        gradients.append(gradient)
                        windows.append(view)
                    else:
                        # Other ranks used it, or the program has dropped it after the launch.
                        parameter.grad = view.clone()
            try:
                if self._on_gpu:
                    gradients, windows = self._copy_strided(gradients, windows)
                if gradients:
                    torch._foreach_copy_(gradients, windows)
            except RuntimeError:
                self._unpack_one_by_one(used)
        self.reset()

    def _unpack_one_by_one(self, used: Collection[int] | None) -> None:
        """Copies the averages into gradients of which one is lazy, or expanded."""
        for index, parameter, view in self._rows:
            gradient = parameter.grad
            if gradient is None or (used is not None and index not in used):
                continue
            if overlaps(gradient):  # torch refuses to write to it
                parameter.grad = view.clone()
            else:
                gradient.copy_(view)

    def reset(self) -> None:
        self._future = self._launched = None
        self._sources = []
        self.deferred.clear()
        self.sent, self.state = self._real, BucketState.FILLING
        self.missing.update(self.members)
        self.unused.clear()
