"""Runs a rank's virtual ranks in descending order, one by one or in lock step.

- Each starts with the buffers from the beginning of the step, with `.grad` None, and with
  generators seeded by the step and the virtual rank.
- After each but the last, its gradients go to the partial sums (`tree_reduction.py`).
- In the last, backward packs and launches as usual, and the comm hook adds the partial sums.

Lock step is for layers that combine the batches of all virtual ranks. Each virtual rank but the
last has a thread. They run one at a time, up to the next such layer. A virtual rank does not see
what others change in the process (gradients, buffers, generators).
"""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from ddp_from_scratch.common import gpu
from ddp_from_scratch.common.errors import shortened
from ddp_from_scratch.common.group import all_gather_single, on_gpu_of, wait
from ddp_from_scratch.core.bucket import Bucket
from ddp_from_scratch.core.extension import Extension
from ddp_from_scratch.core.reducer import CoreReducer
from ddp_from_scratch.options.checks import sync_batch_norms
from ddp_from_scratch.sync.sync_batch_norm import Gather, SyncBatchNorm, several_batches
from ddp_from_scratch.virtual_ranks.tree_reduction import (
    TreeReduction,
    generator_states,
    seeded,
    set_generator_states,
    virtual_rank_range,
)

_DIFFERENT_LAYERS = (
    "virtual ranks of this rank differ in their synchronised batch norms: each must run the same "
    "ones, as often and in the same order, in forward and in backward"
)


class VirtualRanks(Extension):
    """This rank's share of the `count` virtual ranks, and the state of their step."""

    def __init__(
        self, count: int, buffers: Callable[[], Mapping[str, torch.Tensor]], windows: bool
    ) -> None:
        if count < 1 or count & (count - 1):
            raise ValueError(f"virtual ranks must be a power of two, got {count}")
        self.count, self._buffers, self._windows = count, buffers, windows
        self.step, self._seed = 0, 0  # both seed the generators, with the virtual rank
        self.reduction = TreeReduction(count, windows)
        # The step's virtual ranks that have not ended, and those not begun. Empty between steps.
        self._due: list[int] = []
        self._ahead: list[int] = []
        self.inside: int | None = None  # the virtual rank that is running
        self.in_lock_step = False
        # The buffers at the start of the step, and its number; None after the optimizer's step.
        self._before: tuple[dict[str, torch.Tensor], int] | None = None

    def attach(self, reducer: CoreReducer) -> None:
        if len(reducer.flat_buckets) < len(reducer.all_buckets):
            raise ValueError(
                "sparse gradients cannot be summed over virtual ranks: use sparse=False"
            )
        super().attach(reducer)
        reducer.needs_each = True  # several backward passes may run at a time
        self._process_group = reducer.process_group
        self._check()
        reducer.sender.set_hook(self.reduction.average, reducer.process_group)

    def _check(self) -> None:
        self.range()
        ours = self._process_group or dist.group.WORLD
        for layer in sync_batch_norms(self._of().module):
            if not isinstance(layer, SyncBatchNorm):
                raise ValueError(
                    "torch.nn.SyncBatchNorm cannot be used with virtual_ranks=V: convert the "
                    "module with ddp.convert_sync_batchnorm"
                )
            if (layer.process_group or dist.group.WORLD) is not ours:
                raise ValueError(
                    "with virtual_ranks=V synchronised batch norm needs the Reducer's process "
                    "group, and a layer has another one"
                )
            if self._windows:
                raise ValueError(
                    "fuse_wgrad cannot be used with virtual_ranks=V and synchronised batch norm: "
                    "leave it out"
                )

    def range(self) -> range:
        """Returns this rank's virtual ranks in the current group, in the order to run them."""
        group = self._process_group
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        if ranks > self.count:
            raise ValueError(f"{ranks} ranks need at least as many virtual ranks, got {self.count}")
        # Descending, so that rank 0 ends with the buffers of virtual rank 0, which it broadcasts.
        return virtual_rank_range(self.count, rank, ranks)[::-1]

    def set_step(self, step: int, seed: int | None) -> None:
        self.step = step
        if seed is not None:
            self._seed = seed

    @contextmanager
    def run(self, index: int) -> Iterator[None]:
        """A context for one virtual rank. An exception drops the step and propagates."""
        reducer: CoreReducer = self._of()
        try:
            if sync_batch_norms(reducer.module):
                raise RuntimeError(
                    "the module has synchronised batch norm, which takes all virtual ranks at "
                    "once: use reducer.run_virtual_ranks(function) and not "
                    "`with reducer.virtual_rank(i)`"
                )
            with self._virtual_rank(index, reducer):
                yield
        except BaseException:
            reducer.abort_step()
            raise

    def run_all(self, function: Callable[[int], object]) -> None:
        """Calls a function for each virtual rank. An exception drops the step and propagates."""
        reducer: CoreReducer = self._of()

        def run(index: int) -> None:
            with self._virtual_rank(index, reducer):
                function(index)

        if self.inside is not None:  # outside of the `try`, which would drop that one's step
            raise RuntimeError(f"run_virtual_ranks was called inside virtual rank {self.inside}")
        order = self.range()
        try:
            if not sync_batch_norms(reducer.module):
                for index in order:
                    run(index)
                return
            self.in_lock_step = True
            self._run_in_lock_step(run, order)
        except BaseException:
            reducer.abort_step()
            raise
        finally:
            self.in_lock_step = False

    def _run_in_lock_step(self, run: Callable[[int], None], order: Sequence[int]) -> None:
        """Calls `run` for each virtual rank; the last one runs in this thread."""
        reducer: CoreReducer = self._of()
        module, own = reducer.module, {id(buffer) for buffer in self._buffers().values()}
        buffers = [
            (layer, name)
            for layer in module.modules()
            for name, buffer in layer._buffers.items()
            if id(buffer) in own
        ]
        gradients = [(parameter, "grad") for parameter in module.parameters()]
        # A virtual rank's view of the process, beside the generators.
        places: list[tuple[Any, str]] = [*gradients, *buffers, (self, "inside"), (reducer, "sync")]

        def capture() -> tuple[Any, ...]:
            return [getattr(owner, name) for owner, name in places], generator_states()

        def restore(captured: tuple[Any, ...]) -> None:
            values, generators = captured
            for (owner, name), value in zip(places, values, strict=True):
                setattr(owner, name, value)
            set_generator_states(generators)

        outside = capture()
        device, stream = reducer.device.type, gpu.current_stream(reducer.device)
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

        def take_turns(virtual_rank: int, turn: _Turn) -> None:
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
                raise RuntimeError(_DIFFERENT_LAYERS)
            found = self._gather(torch.stack([row, *others]))
            for turn in turns:
                turn.resume(found)
            return found

        turns = [_Turn(partial(take_turns, virtual_rank)) for virtual_rank in order[:-1]]
        try:
            for turn in turns:
                turn.resume()
            copy_context().run(take_part, order[-1], gather_all)
            if any(turn.row is not None for turn in turns):
                raise RuntimeError(_DIFFERENT_LAYERS)
        finally:
            for turn in turns:
                turn.end()

    def _gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Gathers one row for each virtual rank; `rows` are this rank's. Collective."""
        group, ranks = self._process_group, dist.get_world_size(self._process_group)
        if ranks == 1:
            return rows
        counts = [len(virtual_rank_range(self.count, rank, ranks)) for rank in range(ranks)]
        mine = pad(rows, (0, 0, 0, max(counts) - len(rows)))
        everyone = rows.new_empty(ranks, *mine.shape)
        work = all_gather_single(everyone.view(-1), mine.view(-1), group=group, async_op=True)
        wait(work)
        return torch.cat([one[:count] for one, count in zip(everyone, counts, strict=True)])

    @contextmanager
    def _virtual_rank(self, index: int, reducer: CoreReducer) -> Iterator[None]:
        self._enter(index)
        last = index == self.range()[-1]
        with seeded(self._seed, self.step, index), nullcontext() if last else reducer.no_sync():
            yield
        if self.inside != index:
            raise RuntimeError(f"the step was dropped inside virtual rank {index}")
        if not last:
            self.reduction.add(index, self._take_gradients())
            self._due.remove(index)
        elif self._due:
            raise RuntimeError(
                f"virtual rank {index} ended without gradients of {shortened(reducer.missing())}: "
                f"one backward pass of it must be outside of no_sync(), and parameters that it "
                f"does not use need find_unused_parameters=True"
            )
        self.inside = None

    def _enter(self, index: int) -> None:
        order = self.range()
        if self.inside is not None:
            raise RuntimeError(f"virtual rank {index} begins inside virtual rank {self.inside}")
        if index not in order:
            own = list(order)
            raise ValueError(f"virtual rank {index} is not one of this rank's, which are {own}")
        if not self._due:
            self._check()  # a layer may have been converted since the last step
            self._due, self._ahead = list(order), list(order)
            # Also with a single virtual rank, because a step that fails is repeated.
            before = {name: buffer.clone() for name, buffer in self._buffers().items()}
            self._before = before, self.step
        if self._ahead[:1] != [index]:
            how, due = "twice" if index not in self._ahead else "out of order", self._ahead[0]
            raise RuntimeError(f"virtual rank {index} runs {how}: the next one is {due}")
        self._ahead.remove(index)
        self.inside = index
        self._put_back()
        self._take_gradients()

    def _take_gradients(self) -> dict[int, torch.Tensor]:
        parameters = self._of().parameters
        found = {index: p.grad for index, p in enumerate(parameters) if p.grad is not None}
        for index in found:
            parameters[index].grad = None
        return found

    @torch.no_grad()
    def _put_back(self) -> None:
        if self._before is not None:
            # By name: a module may give a buffer another tensor.
            for name, buffer in self._buffers().items():
                buffer.copy_(self._before[0][name])

    # As an extension ----------------------------------------------------------------------------

    def may_launch(self) -> bool:
        return not self.in_lock_step  # in lock step other virtual ranks are in backward, too

    def on_launch(self, bucket: Bucket) -> None:
        # Outside of the last virtual rank, gradients would be lost.
        if self._due != [self.inside]:
            place = "`with reducer.virtual_rank(i)`"
            outside = f"with virtual_ranks=V every backward pass goes into {place}"
            raise RuntimeError(_DIFFERENT_LAYERS if self.in_lock_step else outside)

    def on_average(self, iteration: int, takes_part: bool) -> None:
        self.reduction.clear()
        self._due, self.step = [], self.step + 1

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        # `backward_and_step` steps buckets inside the last virtual rank.
        if self._due and self._due != [self.inside]:
            raise RuntimeError(
                f"the optimizer steps before virtual ranks {self._due} of this rank have run"
            )

    def on_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._due:
            self._before = None

    def on_abort(self) -> None:
        """Drops the step and restores the buffers, even after the average."""
        self.reduction.clear()
        self._take_gradients()
        self._put_back()
        if self._before is not None:
            self.step = self._before[1]
        self._due, self._ahead, self.inside, self._before = [], [], None, None


class _Over(BaseException):
    """Raised in a thread to end it."""


class _Turn:
    """Runs a function in a thread, but only while the caller of `resume` waits."""

    def __init__(self, function: Callable[["_Turn"], None]) -> None:
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
