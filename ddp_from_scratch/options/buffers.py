"""Synchronises buffers at the end of backward, a point that every rank is known to reach.

reducer = ddp.Reducer(model, broadcast_buffers=True)
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _NormBase

from ddp_from_scratch.core.extension import Extension
from ddp_from_scratch.core.memory import split_like
from ddp_from_scratch.group import of_member
from ddp_from_scratch.sync.broadcast import check_buffers, messages, send_tensors
from ddp_from_scratch.waiting import wait


class BufferHook(NamedTuple):
    """A hook that synchronises buffers in place of rank 0's."""

    state: Any
    # Called with `state` and `{name: buffer}`; returns None, or futures to wait for.
    call: Callable[[Any, dict[str, torch.Tensor]], Any]
    before: bool  # a forward pass, not after it


class _Message(NamedTuple):
    """Buffers of one dtype and device on their way."""

    buffers: list[torch.Tensor]
    flat: torch.Tensor
    work: dist.Work


class BufferSync(Extension):
    """Gives all ranks one rank's buffers at the end of each synchronised backward pass.

    Buffers are launched behind the last bucket, and written when every bucket has landed. With a
    hook, `before_forward` or `after_forward` calls the hook instead. Inside `join()`, `in_join`
    sends them before forward: the ranks agree in each step on the rank to send from.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        process_group: dist.ProcessGroup | None,
        ignore: Collection[str],
    ) -> None:
        self._module, self._process_group, self._ignore = module, process_group, ignore
        self.enabled = False
        self.hook: BufferHook | None = None
        # Hooks are called in the first forward pass after an average, as torch calls them.
        self._hook_is_due = True
        self._joining = False
        self._futures: list[torch.futures.Future[Any]] = []
        # Buffers under way between `_launch` and `_finish`; below, the rank that sends them.
        self._sent: list[_Message] = []
        self._src = 0

    def enable(self, enabled: bool) -> None:
        """On all ranks alike. Raises a ValueError for an expanded buffer."""
        if enabled:
            check_buffers(self._module, self._ignore)
        self.enabled = enabled

    def set_joining(self, joining: bool) -> None:
        self._joining = joining

    def will_send(self) -> bool:
        return self.enabled and bool(self.named())

    # At the end of a backward pass --------------------------------------------------------------

    def on_all_launched(self) -> None:
        # At the end of backward, not before forward as in torch's DDP: a forward pass may be one
        # rank's own (an evaluation). Forward passes in training find the same buffers either way.
        if self.enabled and self.hook is None and not self._joining:
            self._launch(0)

    def on_average(self, iteration: int, takes_part: bool) -> None:
        self._finish()

    def on_abort(self) -> None:
        self._sent, self._futures = [], []

    @torch.no_grad()
    def _launch(self, src: int) -> None:
        self._src = src
        self._sent = [self._begin(some) for some in messages(list(self.named().values()))]

    def _begin(self, buffers: list[torch.Tensor]) -> _Message:
        if self._is_source():
            flat = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
        else:
            flat = buffers[0].new_empty(sum(buffer.numel() for buffer in buffers))
        # Bytes, which every backend can send, whatever the dtype.
        wire = flat.view(torch.uint8)
        # Asynchronous: it travels while the buckets are waited for.
        work = dist.broadcast(wire, group=self._process_group, group_src=self._src, async_op=True)
        return _Message(buffers, flat, of_member(work))

    def _finish(self) -> None:
        """Waits for buffers under way, and for the futures of hooks. Idempotent."""
        sent, self._sent = self._sent, []
        for message in sent:
            wait(message.work)
            if not self._is_source():
                values = split_like(message.flat, message.buffers)
                self._write(list(zip(message.buffers, values, strict=True)))
        futures, self._futures = self._futures, []
        for future in futures:
            future.wait()

    def _is_source(self) -> bool:
        return dist.get_rank(self._process_group) == self._src

    @torch.no_grad()
    def _write(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Writes values to buffers. A graph that saved an old value is still right, or raises."""
        uncounted: tuple[torch.Tensor, ...] = ()
        # Autograd counts writes, and raises in backward if a value that it saved has changed since.
        # A buffer that more than Python holds may be such a value.
        if any(b._use_count() > 1 for b, _ in pairs):  # type: ignore[attr-defined, unused-ignore]
            norms = [m for m in self._module.modules() if isinstance(m, _NormBase)]
            statistics = {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}
            # Running statistics uncounted, as by batch norm's own kernel: no backward reads them.
            uncounted = tuple(buffer for buffer, _ in pairs if id(buffer) in statistics)
            # Others, such as tables of positions, are not written if they would stay the same.
            pairs = [(b, v) for b, v in pairs if id(b) in statistics or not torch.equal(b, v)]
        if pairs:
            buffers, values = map(list, zip(*pairs, strict=True))
            with torch.autograd._unsafe_preserve_version_counter(uncounted):  # type: ignore[attr-defined]
                torch._foreach_copy_(buffers, values)

    # Around a forward pass ----------------------------------------------------------------------

    def in_join(self, src: int) -> None:
        """Sends rank `src`'s buffers to all, before a forward pass in `join()`. Collective."""
        if self.hook is None:
            if self.enabled:
                self._launch(src)
                self._finish()
        elif self.hook.before:
            self._run(self.hook)

    def before_forward(self) -> None:
        """Calls a hook that is due before forward. Collective, as the hook is."""
        if self.hook is not None and self.hook.before and self._hook_is_due and self.enabled:
            self._run(self.hook)

    def after_forward(self, averages: bool) -> None:
        if self.hook is not None and not self.hook.before and self._hook_is_due and self.enabled:
            self._run(self.hook)
        self._hook_is_due = averages

    def send(self, src: int, tensors: Sequence[torch.Tensor] | None = None) -> None:
        """Sends rank `src`'s buffers, or these tensors, to all; for hooks. Collective."""
        buffers = list(self.named().values()) if tensors is None else tensors
        send_tensors(buffers, src, self._process_group)

    def named(self) -> dict[str, torch.Tensor]:
        return {n: b for n, b in self._module.named_buffers() if n not in self._ignore}

    def _run(self, hook: BufferHook) -> None:
        futures = hook.call(hook.state, self.named())
        if futures is not None:
            self._futures += futures if isinstance(futures, list) else [futures]
