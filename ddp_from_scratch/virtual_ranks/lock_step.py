"""Runs the virtual ranks of a rank in lock step, up to the next layer that combines their batches.

Lock step is for layers that combine the batches of all virtual ranks. Each virtual rank but the
last has a thread. They run one at a time, up to the next such layer. A virtual rank does not see
what others change in the process (gradients, buffers, generators).
"""

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from ddp_from_scratch.common import gpu
from ddp_from_scratch.common.group import on_gpu_of
from ddp_from_scratch.sync.sync_batch_norm import Gather, several_batches
from ddp_from_scratch.virtual_ranks.tree_reduction import generator_states, set_generator_states

DIFFERENT_LAYERS = (
    "virtual ranks of this rank differ in their synchronised batch norms: each must run the same "
    "ones, as often and in the same order, in forward and in backward"
)


def run_in_lock_step(
    run: Callable[[int], None],
    order: Sequence[int],
    module: torch.nn.Module,
    own_buffers: Mapping[str, torch.Tensor],
    attributes: Sequence[tuple[Any, str]],
    gather_rows: Gather,
) -> None:
    """Calls `run` for each virtual rank; the last one runs in this thread.

    Each has its own gradients, `own_buffers`, `attributes` (objects and names) and generators.
    `gather_rows` gathers the rows of this rank's virtual ranks, and those of all ranks. Collective.
    """
    own = {id(buffer) for buffer in own_buffers.values()}
    buffers = [
        (layer, name)
        for layer in module.modules()
        for name, buffer in layer._buffers.items()
        if id(buffer) in own
    ]
    gradients = [(parameter, "grad") for parameter in module.parameters()]
    # A virtual rank's view of the process, beside the generators.
    places: list[tuple[Any, str]] = [*gradients, *buffers, *attributes]

    def capture() -> tuple[Any, ...]:
        return [getattr(owner, name) for owner, name in places], generator_states()

    def restore(captured: tuple[Any, ...]) -> None:
        values, generators = captured
        for (owner, name), value in zip(places, values, strict=True):
            setattr(owner, name, value)
        set_generator_states(generators)

    outside = capture()
    own_device = next(module.parameters()).device
    device, stream = own_device.type, gpu.current_stream(own_device)
    # Autocast is thread-local.
    dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)

    def take_part(virtual_rank: int, gather: Gather) -> None:
        def gather_outside(row: torch.Tensor) -> torch.Tensor:
            mine = capture()
            restore(outside)
            try:
                return gather(row)
            finally:
                restore(mine)

        several_batches.set(gather_outside)
        # Otherwise all backward passes on a GPU would share a thread, and block each other.
        with torch.autograd.set_multithreading_enabled(False):
            run(virtual_rank)

    def take_turns(virtual_rank: int, turn: Turn) -> None:
        with on_gpu_of(module), gpu.on(stream):
            # New tensors, because autograd counts writes by others to a shared one.
            copies = copy.deepcopy([getattr(layer, name) for layer, name in buffers])
            for (layer, name), buffer in zip(buffers, copies, strict=True):
                setattr(layer, name, buffer)
            try:
                with torch.autocast(device, dtype, enabled):
                    take_part(virtual_rank, turn.gather)
            finally:
                restore(outside)

    def gather_all(row: torch.Tensor) -> torch.Tensor:
        others = [turn.row for turn in reversed(turns) if turn.row is not None]
        if len(others) < len(turns) or any(other.shape != row.shape for other in others):
            raise RuntimeError(DIFFERENT_LAYERS)
        found = gather_rows(torch.stack([row, *others]))
        for turn in turns:
            turn.resume(found)
        return found

    turns = [Turn(partial(take_turns, virtual_rank)) for virtual_rank in order[:-1]]
    try:
        for turn in turns:
            turn.resume()
        copy_context().run(take_part, order[-1], gather_all)
        if any(turn.row is not None for turn in turns):
            raise RuntimeError(DIFFERENT_LAYERS)
    finally:
        for turn in turns:
            turn.end()


class _Over(BaseException):
    """Raised in a thread to end it."""


class Turn:
    """Runs a function in a thread, but only while the caller of `resume` waits."""

    def __init__(self, function: Callable[["Turn"], None]) -> None:
        self.row: torch.Tensor | None = None  # its input at the layer where it waits
        self._error: BaseException | None = None
        self._rows: SimpleQueue[torch.Tensor | _Over | None] = SimpleQueue()
        self._stops: SimpleQueue[None] = SimpleQueue()
        run = partial(copy_context().run, function, self)
        self._thread = threading.Thread(target=self._run, args=[run], daemon=True)
        self._thread.start()

    def resume(self, rows: torch.Tensor | None = None) -> None:
        """Passes in rows, and runs to the next layer or the end. Raises what the thread raised."""
        self._rows.put(rows)
        self._stops.get()
        if self._error is not None:
            raise self._error

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Called by the function: waits for the rows of all virtual ranks."""
        self.row = row
        self._stops.put(None)
        rows = self._rows.get()
        if isinstance(rows, _Over):
            raise rows
        self.row = None
        assert rows is not None, "it has begun"
        return rows

    def end(self) -> None:
        """Ends the thread, even if it waits in a layer. Idempotent."""
        self._rows.put(_Over())
        self._thread.join()

    def _run(self, run: Callable[[], None]) -> None:
        try:
            if not isinstance(self._rows.get(), _Over):
                run()
        except _Over:
            pass
        except BaseException as error:  # noqa: BLE001  # raised again in `resume`
            self._error = error
        finally:
            self._stops.put(None)
