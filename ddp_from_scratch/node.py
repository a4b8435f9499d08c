"""The "node" backend: shared memory within a machine, and gloo for everything else."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial, partialmethod
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ddp_from_scratch.backend.call_watch import sequence_number, watch
from ddp_from_scratch.backend.calls import names_of
from ddp_from_scratch.backend.process_group import SharedMemoryGroup, Tensors, register_backend
from ddp_from_scratch.backend.shared_memory import SEMAPHORES_AVAILABLE
from ddp_from_scratch.backend.transport import GlooTransport
from ddp_from_scratch.common.group import may_be_in_flight, open_gloo, substore, timeout_of

# mypy: disable-error-code="override"

Gloo = Callable[[], dist.ProcessGroup | None]


class ProcessGroupNode(SharedMemoryGroup):
    """A group that reduces in shared memory within a machine, and sends the rest through gloo."""

    backend: ClassVar[str] = "node"

    def __init__(self, transport: GlooTransport, timeout: timedelta, gloo: Gloo) -> None:
        super().__init__(transport, timeout)
        self._transport = transport
        self._gloo: Gloo | None = gloo

    @classmethod
    def open(
        cls, store: dist.Store, rank: int, world_ranks: list[int], timeout: timedelta
    ) -> ProcessGroupNode:
        """Opens a group of these ranks and its gloo group, through a store that only they use."""
        gloo = open_gloo(store, rank, len(world_ranks), timeout)
        own = dist.PrefixStore("node", store)
        return cls(GlooTransport(own, rank, world_ranks, timeout), timeout, lambda: gloo)

    def compare_calls(self, gloo: dist.ProcessGroup) -> None:
        """Makes ranks compare how many collectives they have called on the gloo group, too."""
        if (before := sequence_number(gloo)) is not None:
            self._beside = weakref.ref(gloo)
            name_calls = partial(names_of, str(gloo.group_name))
            self.checked_barrier.compare_others(before, name_calls)

    @property
    def gloo(self) -> dist.ProcessGroup:
        group = None if self._gloo is None else self._gloo()
        if group is None:
            raise RuntimeError("the process group is closed")
        return group

    @property
    def options(self) -> Any:
        # torch and `cpu_group` read a backend's timeout from its options.
        return self.gloo._get_backend(torch.device("cpu")).options

    def get_group_store(self) -> dist.Store:
        return self._transport.store

    def _part(self, ranks: Sequence[int], timeout: timedelta, name: str) -> ProcessGroupNode:
        store = dist.PrefixStore(f"{name}/", self.get_group_store())
        world_ranks = [self._transport.world_ranks[rank] for rank in ranks]
        return self.open(store, list(ranks).index(self.rank()), world_ranks, timeout)

    def _all_reduce_elsewhere(self, tensors: Tensors, opts: Any) -> dist.Work:
        return self.gloo.allreduce(list(tensors), opts or dist.AllreduceOptions())

    def _by_gloo(self, name: str, *arguments: Any, **options: Any) -> Any:
        return getattr(self.gloo, name)(*arguments, **options)

    monitored_barrier: partialmethod[Any] = partialmethod(_by_gloo, "monitored_barrier")
    recv: partialmethod[Any] = partialmethod(_by_gloo, "recv")
    recv_anysource: partialmethod[Any] = partialmethod(_by_gloo, "recv_anysource")
    send: partialmethod[Any] = partialmethod(_by_gloo, "send")

    def abandon(self) -> None:
        """Shuts down and fails operations in flight: afterwards nothing writes to their tensors."""
        self.checked_barrier.abandon()
        self.shutdown()

    def shutdown(self) -> None:
        """Ends the worker thread and frees the memory. Idempotent."""
        if self._gloo is None:
            return
        self._gloo = None  # first, so a second call has nothing to do even if this one fails
        self.checked_barrier.leave()  # not collective: each rank has its own mapping
        if self._worker.close(self._timeout.total_seconds()):
            self._free_memory()
            self._topology.free()
            self._topology.world.free()


_CPU = torch.device("cpu")


def _create(options: Any, _group_options: object) -> ProcessGroupNode:
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return ProcessGroupNode.open(options.store, options.group_rank, ranks, options.timeout)


def register() -> None:
    """Registers the backend under its name. The package's entry point for torch."""
    register_backend(ProcessGroupNode.backend, _create)


register()


# By gloo group, the node group that reduces in its place; None if no ranks share memory.
_beside = weakref.WeakKeyDictionary[dist.ProcessGroup, ProcessGroupNode | None]()


def shared_memory_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns the group through which the ranks of `group` reduce CPU tensors. Collective.

    If `group` is a gloo group with one rank, or with two ranks that share memory, this is a node
    group of the same ranks, otherwise `group` itself. The node group is opened at the first call
    and closed with `group`; torch.distributed does not list it.
    """
    if (
        not SEMAPHORES_AVAILABLE
        or isinstance(group, SharedMemoryGroup)
        or _CPU not in group._device_types
        or group._get_backend(_CPU).name() != "gloo"
    ):
        return group
    if group not in _beside:
        _beside[group] = _open_beside(group)
    return _beside[group] or group


def gloo_alone(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns `group`. Ranks of a gloo group notice that they call different collectives."""
    watch(group)
    return group


def _open_beside(group: dist.ProcessGroup) -> ProcessGroupNode | None:
    timeout, ranks = timeout_of(group), dist.get_process_group_ranks(group)
    transport = GlooTransport(substore(group), group.rank(), ranks, timeout)
    # Weak, since a strong reference to the gloo group would keep its threads alive.
    opened = ProcessGroupNode(transport, timeout, weakref.ref(group))
    # Across machines, a wait for a lost rank might never end, and its thread could not be ended.
    left_behind = may_be_in_flight() and opened.machines > 1
    if (not opened.shares_memory and group.size() > 1) or left_behind:
        opened.shutdown()
        watch(group)
        return None
    opened.compare_calls(group)
    watch(group, opened)
    # Not at exit: closing waits for operations in flight, while other ranks may wait for this one.
    weakref.finalize(group, opened.shutdown).atexit = False
    return opened


def abandon_beside(group: dist.ProcessGroup) -> None:
    """Fails what is in flight on the node group beside `group`, which is about to be closed."""
    if (beside := _beside.pop(group, None)) is not None:
        beside.abandon()
