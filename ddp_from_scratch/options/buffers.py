"""Synchronises buffers at the end of backward, which every rank is known to reach."""

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _NormBase

from ddp_from_scratch.common.group import of_member, wait
from ddp_from_scratch.common.memory import split_like
from ddp_from_scratch.core.extension import Extension
from ddp_from_scratch.sync.broadcast import check_buffers, messages


class BufferSync(Extension):
    """Broadcasts one rank's buffers at the end of each synchronised backward pass.

    Sent after the last launch, written after every bucket has landed. Inside `join()` a rank with
    data sends them before forward.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        process_group: dist.ProcessGroup | None,
        ignore: Collection[str],
    ) -> None:
        self._module, self._process_group, self._ignore = module, process_group, ignore
        self.enabled: bool = False
        self.joining = False  # inside `join()`
        # In flight between `_launch` and `_finish`; whether this rank sends them.
        self._sent: list[tuple[list[torch.Tensor], torch.Tensor, dist.Work]] = []
        self._is_source = False

    def enable(self, enabled: bool) -> None:
        """Sets `enabled`, on every rank. Raises a ValueError for an expanded buffer."""
        if enabled:
            check_buffers(self._module, self._ignore)
        self.enabled = enabled

    def will_send(self) -> bool:
        return self.enabled and bool(self.named())

    # At the end of a backward pass --------------------------------------------------------------

    def on_all_launched(self) -> None:
        # Not before forward as in torch's DDP, because one rank may run forward alone (an
        # evaluation). Training sees the same buffers either way.
        if self.enabled and not self.joining:
            self._launch(0)

    def on_average(self, iteration: int, takes_part: bool) -> None:
        self._finish()

    def on_abort(self) -> None:
        self._sent = []

    @torch.no_grad()
    def _launch(self, src: int) -> None:
        self._is_source = dist.get_rank(self._process_group) == src
        self._sent = []
        for buffers in messages(list(self.named().values())):
            if self._is_source:
                flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            else:
                flat = buffers[0].new_empty(sum(buffer.numel() for buffer in buffers))
            wire = flat.view(torch.uint8)  # every backend can send bytes
            # Asynchronous, so that it overlaps with the wait for the buckets.
            work = dist.broadcast(wire, group=self._process_group, group_src=src, async_op=True)
            self._sent.append((buffers, flat, of_member(work)))

    def _finish(self) -> None:
        """Waits for buffers in flight, and writes them. Idempotent."""
        sent, self._sent = self._sent, []
        for buffers, flat, work in sent:
            wait(work)
            if not self._is_source:
                self._write(list(zip(buffers, split_like(flat, buffers), strict=True)))

    @torch.no_grad()
    def _write(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Writes values to buffers. A graph that saved an old value stays right, or raises."""
        uncounted: tuple[torch.Tensor, ...] = ()
        # Autograd counts writes to a tensor, and backward raises if a saved tensor was written.
        # A use count above 1 means that something besides Python, perhaps a graph, holds a buffer.
        if any(b._use_count() > 1 for b, _ in pairs):  # type: ignore[attr-defined, unused-ignore]
            norms = [m for m in self._module.modules() if isinstance(m, _NormBase)]
            statistics = {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}
            # As in batch norm's kernel, running statistics are not counted: no backward reads them.
            uncounted = tuple(buffer for buffer, _ in pairs if id(buffer) in statistics)
            # Others, such as position tables, are written only if their values change.
            pairs = [(b, v) for b, v in pairs if id(b) in statistics or not torch.equal(b, v)]
        if pairs:
            buffers, values = map(list, zip(*pairs, strict=True))
            with torch.autograd._unsafe_preserve_version_counter(uncounted):  # type: ignore[attr-defined]
                torch._foreach_copy_(buffers, values)

    def send(self, src: int) -> None:
        """Broadcasts rank `src`'s buffers before a forward pass in `join()`. Collective."""
        self._launch(src)
        self._finish()

    def named(self) -> dict[str, torch.Tensor]:
        return {n: b for n, b in self._module.named_buffers() if n not in self._ignore}
