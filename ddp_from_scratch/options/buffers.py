"""Synchronises buffers at the end of backward, which every rank is known to reach."""

from collections.abc import Collection, Mapping
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _NormBase

from ddp_from_scratch.common import gpu
from ddp_from_scratch.common.group import of_member, on_gpu_of, wait
from ddp_from_scratch.core.observer import Check
from ddp_from_scratch.sync.broadcast import (
    Packing,
    buffer_difference,
    check_buffers,
    describe_buffers,
    messages,
    unsendable,
    write,
)

# Messages up to this size are all-reduced, so that the flag of every rank travels in them.
_SMALL = 64 * 1024
_HEADER = 16  # bytes; the first is the flag, and the others align what follows
# If no rank had a buffer, the ranks exchange nothing, and compare again in every hundredth average.
_COMPARE_EVERY = 100


class BufferSync(Check):
    """Broadcasts one rank's buffers at the end of each synchronised backward pass.

    Sent after the last launch, written after every bucket has landed. Inside `join()` a rank with
    data sends them before forward.

    The size of a message never depends on what one rank alone knows. In the first average all ranks
    compare their buffers, and the result is the layout of each later message. A rank whose
    buffers have changed sets a flag, which is all-reduced with the buffers (in the same message if
    it is small). Then all ranks compare again, and raise one error or send in the new layout.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        process_group: dist.ProcessGroup | None,
        ignore: Collection[str],
    ) -> None:
        self._module, self._process_group, self._ignore = module, process_group, ignore
        self.enabled: bool = False
        self._layout: _Layout | None = None  # what all ranks have agreed on
        # In flight between `_launch` and `_finish`: messages, and the buffers to write them to.
        self._sent: list[tuple[_Message, torch.Tensor, dist.Work]] = []
        self._receivers: list[torch.Tensor] = []  # empty on the source
        # On a GPU the host reads the flag in the next average, since it runs ahead of the device.
        self._flag: gpu.HostCopy | None = None
        self._error: RuntimeError | None = None

    def enable(self, enabled: bool) -> None:
        """Sets `enabled`, on every rank. Raises a ValueError for a buffer that cannot be sent."""
        if enabled:
            check_buffers(self._module, self._ignore)
        self.enabled = enabled

    def will_send(self) -> bool:
        """True if ranks exchange something in `send`; the same on all ranks."""
        return self.enabled and (self._layout is None or bool(self._layout))

    # At the end of a backward pass --------------------------------------------------------------

    def verdict(self) -> RuntimeError | None:
        # Not before forward as in torch's DDP, because one rank may run forward alone (an
        # evaluation). Training sees the same buffers either way.
        self._error = None
        if not self.enabled or self._reducer().joining:
            return None
        if not self._layout and self._reducer().iteration % _COMPARE_EVERY == 0:
            self._layout = None
        return self._launch(0)

    def on_average(self, iteration: int, takes_part: bool) -> None:
        if self._finish():
            # Every rank knows, and joins the comparison.
            self._error = self._launch(0)
            self._finish()

    def late_verdict(self) -> RuntimeError | None:
        error, self._error = self._error, None
        return error

    def on_abort(self) -> None:
        self._sent, self._error = [], None

    def on_set_step(self) -> None:
        self.on_abort()
        self._layout = self._flag = None  # ranks that join know of no layout

    def send(self, src: int) -> None:
        """Broadcasts rank `src`'s buffers before a forward pass in `join()`. Collective.

        Raises a RuntimeError on every rank if the ranks' buffers differ.
        """
        error = self._launch(src)
        if error is None and self._finish():
            error = self._launch(src)
            self._finish()
        if error is not None:
            raise error

    def named(self) -> dict[str, torch.Tensor]:
        return {n: b for n, b in self._module.named_buffers() if n not in self._ignore}

    def snapshot(self) -> "BufferSnapshot":
        return BufferSnapshot(self._module, self._ignore)

    @torch.no_grad()
    def _launch(self, src: int) -> RuntimeError | None:
        """Starts to send rank `src`'s buffers; returns the error of all ranks if they differ."""
        named, self._sent, self._receivers = self.named(), [], []
        if self._was_set():
            self._layout = None
        if self._layout is None and (error := self._agree(named)) is not None:
            return error
        layout, is_source = self._layout, dist.get_rank(self._process_group) == src
        assert layout is not None
        changed, buffers = layout.changed(named), [*named.values()]
        if not (is_source or changed):
            self._receivers = buffers
        for message in layout.messages:
            if is_source and (values := buffers if not changed else layout.last()):
                wire = message.pack(values)
            else:  # zeros, which do not change the maximum
                wire = torch.zeros(message.nbytes, dtype=torch.uint8, device=message.device)
            start: Any = dist.broadcast
            options: dict[str, Any] = {"group_src": src}
            if message.has_flag:
                wire[0] = changed
                start, options = dist.all_reduce, {"op": dist.ReduceOp.MAX}
            # Asynchronous, so that it overlaps with the wait for the buckets.
            work = start(wire, group=self._process_group, async_op=True, **options)
            self._sent.append((message, wire, of_member(work)))
        return None

    def _agree(self, named: Mapping[str, torch.Tensor]) -> RuntimeError | None:
        """Compares the ranks' buffers, and lays the messages out. Collective."""
        lines, self._flag = describe_buffers(named), None
        with on_gpu_of(self._module):
            text = buffer_difference(lines, self._process_group) or unsendable(lines)
        if text is None:
            self._layout = _Layout(named, lines)
        return None if text is None else RuntimeError(text)

    def _finish(self) -> bool:
        """Waits for buffers in flight and writes them; True if a rank's have changed instead.

        Idempotent.
        """
        sent, self._sent = self._sent, []
        for *_, work in sent:
            wait(work)
        if sent and self._flag_of(sent[0][1]):
            self._layout = None
            return True
        if self._receivers:
            unpacked = (message.unpack(wire, self._receivers) for message, wire, _ in sent)
            self._write([*chain.from_iterable(unpacked)])
        self._receivers = []
        return False

    def _flag_of(self, wire: torch.Tensor) -> bool:
        """True if a rank has set the flag, as far as the host knows."""
        if not gpu.is_gpu(wire.device):
            return bool(wire[0])
        if gpu.is_capturing():
            return False
        self._flag = gpu.HostCopy(wire[:1])
        return False

    def _was_set(self) -> bool:
        """True if the flag that a GPU has copied to the host is set."""
        flag = self._flag
        if flag is None or gpu.is_capturing():
            return False
        self._flag = None
        return bool(flag.wait())

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
            uncounted = tuple(b for b, _ in pairs if id(b) in statistics and not b.is_inference())
            # Others, such as position tables, are written only if their values change.
            pairs = [(b, v) for b, v in pairs if id(b) in statistics or not torch.equal(b, v)]
        if pairs:
            buffers, values = map(list, zip(*pairs, strict=True))
            with torch.autograd._unsafe_preserve_version_counter(uncounted):  # type: ignore[attr-defined]
                write(buffers, values)


class BufferSnapshot:
    """The buffers of a module at one moment."""

    def __init__(self, module: torch.nn.Module, ignore: Collection[str]) -> None:
        # Of each submodule: its table of buffers, what the table held, and names to ignore.
        self._tables: list[tuple[dict[str, Any], dict[str, Any], set[str]]] = []
        for owner, part in module.named_modules():
            names = (name.rpartition(".") for name in ignore)
            ignored = {name for path, _, name in names if path == owner}
            self._tables.append((part._buffers, dict(part._buffers), ignored))
        buffers = {
            id(buffer): buffer
            for _, then, ignored in self._tables
            for name, buffer in then.items()
            if buffer is not None and name not in ignored
        }
        self._buffers = [*buffers.values()]
        self._values = [buffer.clone() for buffer in self._buffers]

    def restore(self) -> None:
        """Gives the module these buffers with their values, and removes those made since."""
        for now, then, ignored in self._tables:
            own = {name: now[name] for name in ignored & now.keys()}
            now.clear()
            now.update(then | own)
        write(self._buffers, self._values)


class _Message:
    """Some of the buffers, in one message of bytes, or the flag alone."""

    def __init__(
        self, members: list[int], buffers: list[torch.Tensor], device: torch.device, has_flag: bool
    ) -> None:
        self.has_flag, self.device = has_flag, device
        self._members = members  # indices into the buffers
        self._packing = Packing([buffers[i] for i in members], _HEADER if has_flag else 0)
        self.nbytes: int = self._packing.nbytes

    def pack(self, buffers: list[torch.Tensor]) -> torch.Tensor:
        return self._packing.pack([buffers[i] for i in self._members], self.device)

    def unpack(
        self, wire: torch.Tensor, buffers: list[torch.Tensor]
    ) -> "zip[tuple[torch.Tensor, torch.Tensor]]":
        members = (buffers[i] for i in self._members)
        return zip(members, self._packing.unpack(wire), strict=True)


class _Layout:
    """The buffers that all ranks have, and the messages that carry them. False without any."""

    def __init__(self, named: Mapping[str, torch.Tensor], lines: list[str]) -> None:
        self._names, self._lines = [*named], lines
        self._look(named)
        buffers, index_of = [*named.values()], {id(b): i for i, b in enumerate(named.values())}
        groups = [[index_of[id(b)] for b in members] for members in messages(buffers)]
        devices = [buffers[members[0]].device for members in groups]
        fits = bool(groups) and sum(buffers[i].nbytes for i in groups[0]) <= _SMALL
        self.messages: list[_Message] = [
            _Message(members, buffers, device, has_flag=fits and index == 0)
            for index, (members, device) in enumerate(zip(groups, devices, strict=True))
        ]
        if groups and not fits:
            self.messages.insert(0, _Message([], buffers, devices[0], has_flag=True))

    def __bool__(self) -> bool:
        return bool(self._names)

    def _look(self, named: Mapping[str, torch.Tensor]) -> None:
        self._seen = [*named.values()]
        self._kinds = [*map(_kind, self._seen)]

    def last(self) -> list[torch.Tensor]:
        """Returns the buffers that were last seen in this layout, if they still have it.

        On a GPU the other ranks write what comes before they read the flag.
        """
        return self._seen if [*map(_kind, self._seen)] == self._kinds else []

    def changed(self, named: Mapping[str, torch.Tensor]) -> bool:
        """True if this rank's buffers are not those of the layout."""
        buffers = named.values()
        # Without a line of text for each buffer while they stay the same tensors.
        if (
            len(named) == len(self._seen)
            and all(map(is_, buffers, self._seen))
            and [*map(_kind, buffers)] == self._kinds
        ):
            return False
        if describe_buffers(named) != self._lines:
            return True
        self._look(named)
        return False


_kind = attrgetter("shape", "dtype")
