"""A module's buffers, made equal on all ranks where every rank is known to take part.

    reducer = ddp.Reducer(model, broadcast_buffers=True)

They set off behind the last bucket of a backward pass that averages, and are written when it ends.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _NormBase

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


class BufferSync:
    """Gives all ranks one rank's buffers.

    1. `launch`, at the end of a backward pass that averages, when each bucket has been launched.
    2. `finish`, when each bucket has landed: the buffers are rank 0's.

    Not before a forward pass, as torch's DDP: that may be one rank's own (an evaluation). What a
    forward pass finds is the same. Inside `join()`, where the rank that sends is agreed on from
    step to step, they are sent before forward, by `in_join`.

    A hook takes the place of all that: `before_forward` or `after_forward` calls it.

    Args:
        module: whose buffers, those that it has at the time.
        process_group: the ranks that take part.
        enabled: False never sends any; may be set later, on all ranks alike.
        ignore: names of buffers that are left alone.
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
        self._futures: list[torch.futures.Future[Any]] = []
        self._sent: list[_Message] = []
        self._src = 0

    def will_send(self) -> bool:
        """Whether there are buffers to send, by the hook or without."""
        return self.enabled and any(True for _ in self._named())

    # At the end of a backward pass ----------------------------------------------------------------

    @torch.no_grad()
    def launch(self, src: int = 0) -> None:
        """Rank `src`'s buffers set off to all. Collective."""
        if not self.enabled or self.hook is not None:
            return
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

    def finish(self) -> None:
        """Waits for what has been launched, and for what hooks have begun. Idempotent."""
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

    # Around a forward pass ------------------------------------------------------------------------

    def in_join(self, src: int) -> None:
        """Before a forward pass inside `join()`: rank `src`'s buffers to all. Collective."""
        if self.hook is None:
            self.launch(src)
            self.finish()
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
