"""Buffers made equal on all ranks, at a point that every rank is known to come to.

reducer = ddp.Reducer(model, broadcast_buffers=True)
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _NormBase

from ddp_from_scratch.buckets.observer import Observer
from ddp_from_scratch.group import of_member
from ddp_from_scratch.sync.broadcast import messages, send_tensors


class BufferHook(NamedTuple):
    """Synchronises buffers in place of rank 0's.

    Attributes:
        state: handed to the hook.
        call: called with `state` and `{name: buffer}`; returns None or futures, which the end of
            backward waits for.
        before: whether it is called before the forward pass or after it.
    """

    state: Any
    call: Callable[[Any, dict[str, torch.Tensor]], Any]
    before: bool


class _Message(NamedTuple):
    """Buffers of one dtype and device on their way."""

    buffers: list[torch.Tensor]
    flat: torch.Tensor
    work: dist.Work


class BufferSync(Observer):
    """Gives all ranks one rank's buffers at the end of each backward pass that averages.

    They are launched behind the last bucket, and written when every bucket has landed.

    Not before a forward pass, as in torch's DDP: that may be one rank's own (an evaluation). A
    forward pass finds the same buffers either way. Inside `join()`, where the rank that sends is
    agreed on from step to step, they are sent before forward, by `in_join`.

    A hook takes the place of all that: `before_forward` or `after_forward` calls it.

    Args:
        module: its buffers are sent, those that it has at the time.
        process_group: the ranks that take part.
        enabled: False never sends any.
        ignore: names of buffers that are left alone.

    Attributes:
        enabled, hook: changed by `enable` and `set_hook`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        process_group: dist.ProcessGroup | None,
        enabled: bool,
        ignore: Collection[str],
    ) -> None:
        self._module, self._process_group, self._ignore = module, process_group, ignore
        self.enabled = enabled
        self.hook: BufferHook | None = None
        self._hook_is_due = True
        self._joining = False
        self._futures: list[torch.futures.Future[Any]] = []
        self._sent: list[_Message] = []
        self._src = 0

    def enable(self, enabled: bool) -> None:
        """Sends buffers from now on, or none. On all ranks alike."""
        self.enabled = enabled

    def set_hook(self, hook: BufferHook | None) -> None:
        """Lets a hook synchronise buffers in place of rank 0's; None takes it away."""
        self.hook = hook

    def set_joining(self, joining: bool) -> None:
        """Leaves the sending to `in_join`, or takes it back."""
        self._joining = joining

    def will_send(self) -> bool:
        """Whether there are buffers to send, by the hook or without."""
        return self.enabled and any(True for _ in self._named())

    # At the end of a backward pass --------------------------------------------------------------

    def on_all_launched(self) -> None:
        """Sends rank 0's buffers to all. Collective."""
        if self.hook is None and not self._joining:
            self._launch(0)

    def on_average(self, iteration: int, takes_part: bool) -> None:
        """Writes the buffers that came."""
        self._finish()

    @torch.no_grad()
    def _launch(self, src: int) -> None:
        self._src = src
        self._sent = [self._begin(some) for some in messages([b for _, b in self._named()])]

    def _begin(self, buffers: list[torch.Tensor]) -> _Message:
        if self._is_source():
            flat = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
        else:
            flat = buffers[0].new_empty(sum(buffer.numel() for buffer in buffers))
        wire = flat.view(torch.uint8)  # bytes, which every backend can send, whatever the dtype
        work = dist.broadcast(wire, group=self._process_group, group_src=self._src, async_op=True)
        return _Message(buffers, flat, of_member(work))

    def _finish(self) -> None:
        """Waits for buffers under way, and for the futures of hooks. Idempotent."""
        sent, self._sent = self._sent, []
        for message in sent:
            message.work.wait()
            if not self._is_source():
                sizes = [buffer.numel() for buffer in message.buffers]
                values = zip(message.buffers, message.flat.split(sizes), strict=True)
                self._write([(buffer, v.view(buffer.shape)) for buffer, v in values])
        futures, self._futures = self._futures, []
        for future in futures:
            future.wait()

    def _is_source(self) -> bool:
        return dist.get_rank(self._process_group) == self._src

    @torch.no_grad()
    def _write(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Writes values to buffers. A graph that is still alive is right, or raises in backward.

        Autograd counts writes, and raises where a value that was saved for backward has changed. So
        what may be saved (held by more than Python) is not written where it would stay the same, as
        tables of positions do. Running statistics are written uncounted, as batch norm's own kernel
        writes them: no backward pass in training reads them.
        """
        uncounted: tuple[torch.Tensor, ...] = ()
        if any(buffer._use_count() > 1 for buffer, _ in pairs):
            norms = [m for m in self._module.modules() if isinstance(m, _NormBase)]
            statistics = {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}
            uncounted = tuple(buffer for buffer, _ in pairs if id(buffer) in statistics)
            pairs = [(b, v) for b, v in pairs if id(b) in statistics or not torch.equal(b, v)]
        if pairs:
            buffers, values = map(list, zip(*pairs, strict=True))
            with torch.autograd._unsafe_preserve_version_counter(uncounted):  # type: ignore[attr-defined]
                torch._foreach_copy_(buffers, values)

    # Around a forward pass ----------------------------------------------------------------------

    def in_join(self, src: int) -> None:
        """Before a forward pass inside `join()`: rank `src`'s buffers to all. Collective."""
        if self.hook is None:
            if self.enabled:
                self._launch(src)
                self._finish()
        elif self.hook.before:
            self._run(self.hook)

    def before_forward(self) -> None:
        """Calls a hook that comes before forward. Collective, as the hook is."""
        if self.hook is not None and self.hook.before and self._hook_is_due and self.enabled:
            self._run(self.hook)

    def after_forward(self, averages: bool) -> None:
        """Calls a hook that comes after forward. Collective, as the hook is.

        Args:
            averages: whether this forward pass is followed by an average. Hooks are called in the
                first forward pass after an average, as torch calls them.
        """
        if self.hook is not None and not self.hook.before and self._hook_is_due and self.enabled:
            self._run(self.hook)
        self._hook_is_due = averages

    def send(self, src: int, tensors: Sequence[torch.Tensor] | None = None) -> None:
        """Rank `src`'s buffers, or these tensors, to all, at once; for hooks. Collective."""
        buffers = [buffer for _, buffer in self._named()] if tensors is None else list(tensors)
        send_tensors(buffers, src, self._process_group)

    def _named(self) -> Any:
        return ((n, b) for n, b in self._module.named_buffers() if n not in self._ignore)

    def _run(self, hook: BufferHook) -> None:
        futures = hook.call(hook.state, dict(self._named()))
        if futures is not None:
            self._futures += futures if isinstance(futures, list) else [futures]
