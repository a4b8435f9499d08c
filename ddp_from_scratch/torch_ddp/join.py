"""Uneven data: ranks that run out of batches keep taking part in the other ranks' collectives.

With torch's protocol one context may also join other objects that communicate in every step, such
as ZeroRedundancyOptimizer.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ddp_from_scratch.common.arguments import known_names
from ddp_from_scratch.common.group import cpu_group, gather_objects, on_gpu_of
from ddp_from_scratch.core.observer import Observer
from ddp_from_scratch.core.reducer import CoreReducer
from ddp_from_scratch.core.wrapped import reducer_of
from ddp_from_scratch.options.checks import sync_batch_norms
from ddp_from_scratch.options.launch_order import check_current
from ddp_from_scratch.options.unused import Unused
from ddp_from_scratch.options.weight import GradientWeight, agree_weight
from ddp_from_scratch.reducer import Reducer
from ddp_from_scratch.sync.broadcast import broadcast_parameters


class JoinableReducer(Joinable, JoinHook, Observer):
    """A Reducer that takes part in a `Join` context.

    In each step, ranks with and without data take the same actions in the same order:

    - report to torch's protocol: with `notify` before a forward pass, or without data in
      `main_hook`.
    - broadcast the buffers of the highest rank with data, if the last step averaged.
    - agree on the number of ranks that average in this step.
    - all-reduce the buckets: in backward, or without data in `main_hook`, with weight 0.

    When no rank has data left, the highest of the ranks that ended last sends its parameters and
    buffers to all.
    """

    def __init__(self, reducer: Reducer) -> None:
        super().__init__()
        self.reducer: Reducer = reducer_of(reducer)
        self.by_initial_world_size: bool = True
        self._scalers: Sequence[torch.amp.GradScaler] = ()
        self.last_rank: int | None = None  # all ranks got its parameters when a context ended
        self._outside = self._join_config  # disabled, and again after a context
        self._averaged = True  # the last step averaged, so buffers are due before the next one

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Returns the hook for a rank without data; called by torch's `Join`."""
        self.by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        scalers = kwargs.get("grad_scaler") or ()
        self._scalers = (scalers,) if isinstance(scalers, torch.amp.GradScaler) else [*scalers]
        if self.reducer.core.comm.sums and not self.by_initial_world_size:
            raise ValueError(
                "divide_by_initial_world_size=False divides by the number of ranks with data, and "
                'reduce="sum" divides by nothing: leave it out'
            )
        self._averaged = True
        return self

    @property
    def join_device(self) -> torch.device:
        """The device of the tensors that ranks exchange through `Join`."""
        return self.reducer.core.device

    @property
    def join_process_group(self) -> Any:
        """The ranks that take part."""
        return self.reducer.process_group or dist.group.WORLD

    def notify(self) -> None:
        """Begins a step on a rank with data, before each forward pass in training.

        Collective inside a `Join` context. Raises what `join` does.
        """
        if not self._join_config.enable:
            return
        self.reducer.core.joining = True
        # The order is that of `main_hook`. Otherwise ranks with and without data would deadlock.
        Join.notify_join_context(self)
        weight = self._begin_step(has_data=True)
        self._averaged = will_average(self.reducer.core)
        if self._averaged:
            self.reducer.core.set_weight(None if self.by_initial_world_size else weight.value)

    def on_forward(self) -> None:
        """Calls `notify` in training, not where a checkpoint recomputes a forward pass."""
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self.notify()

    def main_hook(self) -> None:
        """Takes part in a step of the other ranks without data."""
        nothing = self._begin_step(has_data=False)
        # 0 if all other ranks are under no_sync() or have frozen the module: no bucket is sent.
        self._averaged = nothing.total() != 0
        if self._averaged:
            self.reducer.core.joining = True
            _shadow_average(self.reducer.core, nothing)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Ends the context: no rank has data left."""
        reducer = self.reducer
        self.last_rank = self._highest_rank(is_last_joiner)
        module = reducer.module
        ignore = known_names(reducer.ignore, module)  # an ignored one may be gone by now
        broadcast_parameters(module, self.last_rank, reducer.process_group, ignore)
        # torch's `Join` does not announce its end. Without this, later forward passes would still
        # agree on ranks and weights, and overrule `Reducer.weight`.
        self._join_config = self._outside
        reducer.core.joining = False
        self._agree_on_scales(is_last_joiner)

    def _agree_on_scales(self, is_last_joiner: bool) -> None:
        """Gives all ranks the scales of the rank that ended last. Collective.

        A rank without data missed updates of its GradScaler. Raises a RuntimeError on all ranks if
        that leaves the scales of any GradScaler different, in which case gradients would, too.
        """
        reducer, group = self.reducer, self.reducer.process_group
        with on_gpu_of(reducer.module):
            ended = gather_objects((is_last_joiner, len(self._scalers)), group)
            if all(last for last, _ in ended):
                return
            counts = [count for _, count in ended]
            if len(set(counts)) > 1:
                raise RuntimeError(f"ranks gave join() different numbers of grad_scaler: {counts}")
            states = gather_objects([scaler.state_dict() for scaler in self._scalers], group)
            for scaler, state in zip(self._scalers, states[self.last_rank or 0], strict=True):
                scaler.load_state_dict(state)
            everyone = gather_objects(_scales(), group)
        differs = next((rank for rank, own in enumerate(everyone) if own != everyone[0]), None)
        if differs is not None:
            scales = [[scale for scale, _ in everyone[rank]] for rank in (0, differs)]
            raise RuntimeError(
                f"ranks without data missed updates of a GradScaler inside join(), so scales or "
                f"the steps until they grow differ: scale {scales[0]} on rank 0, {scales[1]} on "
                f"rank {differs}. Pass it on every rank: join(..., grad_scaler=scaler)"
            )

    def _begin_step(self, has_data: bool) -> GradientWeight:
        """Agrees on the ranks that average in this step, and sends buffers. Collective."""
        reducer = self.reducer
        if (unused := reducer.core.observer(Unused)) is not None and unused.skip:
            raise RuntimeError(
                "skip_unused=True needs ranks that use the same parameters, and inside join() a "
                "rank without data uses none: leave it out"
            )
        if sync_batch_norms(reducer.module):
            with_data = agree_weight(reducer.core, float(has_data)).total()
            if with_data < dist.get_world_size(reducer.process_group):
                raise RuntimeError(
                    "a rank has run out of data inside join(), and synchronised batch norm needs "
                    "all ranks in every forward pass: give all ranks equally many batches"
                )
        if self._averaged and reducer.buffer_sync.will_send():
            reducer.buffer_sync.send(self._highest_rank(has_data))
        # Weight 0 under no_sync() tells ranks without data whether any rank averages in this step.
        return agree_weight(reducer.core, float(has_data and will_average(reducer.core)))

    def _highest_rank(self, candidate: bool) -> int:
        """Returns the highest rank among the candidates. Collective."""
        group = cpu_group(self.reducer.process_group)  # the host must not wait for a GPU
        mine = group.rank() if candidate else -1
        highest = torch.tensor([mine], dtype=torch.int64, device="cpu")
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        return int(highest.item())


def will_average(reducer: CoreReducer) -> bool:
    """True if backward passes average: not in `no_sync()`, nor while the module is frozen."""
    return reducer.sync and any(parameter.requires_grad for parameter in reducer.parameters)


def _shadow_average(reducer: CoreReducer, weight: GradientWeight) -> None:
    """Joins the other ranks' next average with weight 0; keeps `.grad`. Raises as theirs."""
    reducer.set_weight(weight.value)
    reducer.mark_unused(range(len(reducer.parameters)))
    reducer.launch_full_buckets()
    reducer.await_hook()
    if (error := reducer.finish(takes_part=False)) is not None:
        raise error


def _scales() -> list[tuple[float, int]]:
    """Returns the scale and the growth tracker of each GradScaler that is enabled, in order."""
    # Programs do not tell which scaler is theirs. Only ranks that end apart pay for this search.
    gc.collect()  # one that its program has dropped may still be part of a cycle
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.amp.GradScaler)]
    states = [scaler.state_dict() for scaler in found if scaler.is_enabled()]
    return sorted((state["scale"], state["_growth_tracker"]) for state in states)


@contextmanager
def join(
    reducer: Reducer,
    *,
    divide_by_initial_world_size: bool = True,
    enable: bool = True,
    throw_on_early_termination: bool = False,
    grad_scaler: torch.amp.GradScaler | Sequence[torch.amp.GradScaler] | None = None,
) -> Iterator[None]:
    """Allows ranks to have different numbers of batches.

    A rank that leaves the block early takes part in the other ranks' collectives until all have
    left. At the end all ranks get the parameters and buffers of a rank that finished last. In a
    step under `no_sync()`, forward must run under it, too.

    Args:
        reducer: averages the gradients; a `DistributedDataParallel` stands for its own.
        divide_by_initial_world_size: True divides by the world size, as if ranks without data had
            zero gradients. False divides by the number of ranks that still have data, and raises a
            ValueError with `reduce="sum"`.
        enable: False if you know that all ranks have the same number of batches.
        throw_on_early_termination: True raises on every rank as soon as one has no data left.
        grad_scaler: the GradScaler of the loss, or several. At the end all ranks get the scale of a
            rank that finished last, because ranks without data do not update theirs.

    Raises:
        RuntimeError: a rank has no data left, and `throw_on_early_termination` is set or the module
            has synchronised batch norm; the Reducer has `skip_unused`; at the end a GradScaler that
            is not in `grad_scaler` differs between ranks; or the ranks' buffers differ.

    Follows: `torch.nn.parallel.DistributedDataParallel.join`.
    """
    reducer = reducer_of(reducer)
    check_current(reducer.core)
    joinable = JoinableReducer(reducer)
    reducer.add_observer(joinable)
    options = {
        "divide_by_initial_world_size": divide_by_initial_world_size,
        "grad_scaler": grad_scaler,
    }
    context = Join([joinable], enable, throw_on_early_termination, **options)
    reducer.core.joining = enable
    try:
        with context:
            yield
    finally:
        reducer.core.joining = False
        reducer.remove_observer(joinable)
