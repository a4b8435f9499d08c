"""The base class of process groups whose ranks share a machine's memory.

A collective returns a work handle at once and runs on the group's thread, in order (`work.py`).
`collectives.py` adds the other collectives; a backend adds a `Transport` that sends messages.
"""

# torch.distributed calls only one overload of each C++ method.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import lru_cache, partial
from types import NoneType, SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ddp_from_scratch.backend.all_reduce import AllReduce, Receive
from ddp_from_scratch.backend.barrier import CheckedBarrier, Progress
from ddp_from_scratch.backend.operations import PLAIN, caller, check_memory, size_of
from ddp_from_scratch.backend.reduction import REDUCED, ReduceOp, Reduction
from ddp_from_scratch.backend.shared_memory import Topology
from ddp_from_scratch.backend.stage import Exchange, SharedTensors, Stage
from ddp_from_scratch.backend.transport import Transport
from ddp_from_scratch.backend.work import NodeWork, Operation, Outputs, Worker, run_in_turn
from ddp_from_scratch.common.errors import CommunicationError, NoSharedMemory
from ddp_from_scratch.common.numbers import is_power_of_two

Tensors = Sequence[torch.Tensor]

# torch's options for a call with `async_op=False`: the caller waits at once.
_AT_ONCE = SimpleNamespace(asyncOp=False)


class SharedMemoryGroup(dist.ProcessGroup):
    """A process group that reduces in shared memory; threads that wait call `progress`."""

    backend: ClassVar[str]
    # Each backend defines this: makes the group of `ranks`, which are ranks in this group.
    _part: Callable[[Sequence[int], timedelta, str], SharedMemoryGroup]

    def __init__(
        self, transport: Transport, timeout: timedelta, progress: Progress = lambda: math.inf
    ) -> None:
        super().__init__(transport.rank, transport.size)  # type: ignore[call-arg, unused-ignore]
        # These constructors are collective, so all ranks must call them in this order.
        self._topology = Topology.of(transport)
        self.machines: int = self._topology.count  # a rank that shares no memory counts as one
        self.checked_barrier: CheckedBarrier = CheckedBarrier(self._topology, progress)
        self._shared = SharedTensors(self._topology.intra_node)
        self._stage = Stage(self._topology, self.checked_barrier)
        self._reduce = AllReduce(self._topology, self.checked_barrier, self._shared, self._stage)
        self._reduce_here = self._reduce  # for `average_on_machine`
        if self.machines > 1:
            node = self._topology.intra_node
            here = Topology(world=node, intra_node=node, inter_node=node, count=1)
            stage = Stage(here, self.checked_barrier)
            self._reduce_here = AllReduce(here, self.checked_barrier, self._shared, stage)
        self._exchange = Exchange(self._topology, self.checked_barrier, self._stage)
        # Cached, since making the text takes as long as summing a small tensor.
        self._named_reduction = lru_cache(maxsize=1024)(self._make_named_reduction)
        # True if 1/n is exact: AVG has the bits of torch's DDP, which divides before the sum.
        self.divides_first: bool = is_power_of_two(transport.size)
        self._timeout = timeout
        self.calls: int = 0  # so far; numbers them in error messages
        # Returns the gloo group beside this one, whose calls the ranks compare, too.
        self._beside: Callable[[], dist.ProcessGroup | None] = NoneType
        self._worker = Worker(f"{self.backend}-group-{transport.size}")

    @property
    def shares_memory(self) -> bool:
        return bool(self._stage.shares_memory)

    def getBackendName(self) -> str:
        return self.backend

    # torch keeps these names in a group's backends. This group is its own backend.

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    @property
    def group_name(self) -> str:
        return self._name

    def _get_backend(self, device: torch.device) -> SharedMemoryGroup:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    # Splitting: `dist.split_group` ---------------------------------------------------------------

    supports_splitting = True

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> SharedMemoryGroup | None:
        """Makes a group of some of this group's ranks; None on the others, which need not call."""
        if self.rank() not in ranks:
            return None
        part = self._part(ranks, timeout or self._timeout, group_name or "")
        part.setGroupName(group_name or "")
        part.setGroupDesc(group_desc or "")
        return part

    def install_store(self) -> None:
        """Gives torch the group's store if it does not have it yet. Idempotent."""

    # Collectives ---------------------------------------------------------------------------------

    def allreduce(
        self, tensors: Tensors, opts: Any = None, inter_node_dtype: torch.dtype | None = None
    ) -> dist.Work:
        """Reduces over all ranks. Sums cross between machines in `inter_node_dtype`, if given."""
        op, operations = dist.ReduceOp.SUM if opts is None else opts.reduceOp, []
        for tensor in tensors:
            dense = tensor.is_cpu and tensor.layout is torch.strided
            if not dense or tensor.dtype not in REDUCED:
                return self._all_reduce_elsewhere(tensors, opts)
            text, reduction = self._named_reduction(
                tensor.numel(), tensor.dtype, op, caller.op_label
            )
            run = partial(self._reduce, tensor, reduction, inter_node_dtype)
            operations.append(Operation(text, run, partial(self._reduce.prepare, tensor)))
        return self._submit("all_reduce", tensors, opts, operations, written=tensors)

    def _all_reduce_elsewhere(self, tensors: Tensors, opts: Any) -> dist.Work:
        """Reduces sparse tensors and other dtypes, in a backend that can."""
        check_memory(self.backend, "all_reduce", written=tensors)
        dtype = tensors[0].dtype
        raise RuntimeError(f"the {self.backend} backend cannot reduce tensors of {dtype}")

    allreduce_coalesced: ClassVar[Callable[..., dist.Work]] = allreduce

    def average_on_machine(self, tensor: torch.Tensor) -> dist.Work:
        """Averages over the ranks of this machine. Collective over the whole group."""
        operation = Operation(f"average_on_machine of {size_of(tensor)}", lambda: [tensor])
        if (size := self._topology.intra_node.size) > 1:
            reduction = Reduction.of(dist.ReduceOp.AVG, tensor.dtype, size)
            operation.run = partial(self._reduce_here, tensor, reduction)
            operation.prepare = partial(self._reduce_here.prepare, tensor)
        return self._submit("average_on_machine", [tensor], None, [operation], written=[tensor])

    def _make_named_reduction(
        self, numel: int, dtype: torch.dtype, op: ReduceOp, op_label: str
    ) -> tuple[str, Reduction]:
        reduction = Reduction.of(op, dtype, self.size())
        return f"all_reduce({reduction.name}) of {numel} x {dtype}{op_label}", reduction

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._submit("barrier", [], opts, [Operation("barrier", list)])

    # Memory that ranks share ---------------------------------------------------------------------

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        try:
            return self.empty(size, dtype)
        except CommunicationError as error:
            # The group survives a lack of memory: all ranks get this error and can continue.
            if not isinstance(error.__cause__, NoSharedMemory):
                raise
            if self.checked_barrier.rank == 0:
                text = "gradients lie in ordinary memory, which costs two copies"
                warnings.warn(f"{text}: {error.__cause__}", stacklevel=2)
            return torch.empty(size, dtype=dtype, device="cpu")

    def empty(self, numel: int, dtype: torch.dtype, for_all: bool = False) -> torch.Tensor:
        """Makes a flat uninitialised tensor in memory that a machine's ranks share. Collective."""
        kind, make = f"{self.backend}.empty{'_for_all' * for_all}", self._shared.empty
        operation = Operation(f"{kind}({numel}, {dtype})", lambda: [make(numel, dtype, for_all)])
        work = self._submit(kind, [], None, [operation])
        work.wait()
        (tensor,) = work.result()
        return tensor

    def is_shared(self, tensor: torch.Tensor) -> bool:
        return bool(self._shared.place(tensor))

    def free_unused(self) -> None:
        """Frees memory that this rank no longer uses. Also a barrier. Collective."""
        operation = Operation("free_unused", self._shared.free_unused)
        self._submit("free_unused", [], _AT_ONCE, [operation]).wait()

    def reduce_to_owners(
        self, tensor: torch.Tensor, op: ReduceOp, receive: Receive, label: str
    ) -> None:
        """Runs `AllReduce.to_owners`; all ranks raise if their labels differ. Collective."""
        reduction = Reduction.of(op, tensor.dtype, self.size())
        operation = Operation(
            f"reduce_to_owners({reduction.name}) of {size_of(tensor)} {label}",
            partial(self._reduce.to_owners, tensor, reduction, receive),
            partial(self._shared.place, tensor),
        )
        self._submit("reduce_to_owners", [tensor], _AT_ONCE, [operation], [tensor]).wait()

    # Lifetime ------------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def _submit(
        self,
        kind: str,
        tensors: Tensors,
        opts: Any,
        operations: Sequence[Operation],
        read: Iterable[torch.Tensor] = (),
        written: Tensors = (),
    ) -> NodeWork:
        """Submits operations under one work handle; errors and the profiler name `tensors`."""
        read = [*read]
        plain = not torch._C._len_torch_dispatch_stack()
        for tensor in (*read, *written):
            keys = torch._C._dispatch_keys(tensor).raw_repr()
            plain = plain and keys == PLAIN and tensor.is_contiguous()
        if not plain:  # most tensors are, and pass the check
            check_memory(self.backend, kind, *read, written=written)
        self.calls += 1  # after the check: a call with invalid arguments gets no number
        sequence, world = self.calls, self._topology.world
        self.checked_barrier.caller = threading.get_ident()
        # Counted in the caller's thread: the order of both groups' calls is that of the program.
        beside = self._beside()
        others = 0
        if beside is not None:
            others = beside._get_sequence_number_for_group()  # type: ignore[attr-defined]
        seconds = self._timeout.total_seconds()
        run = partial(run_in_turn, operations, self.checked_barrier, seconds, others)
        if torch.is_inference_mode_enabled() or any(map(torch.Tensor.is_inference, tensors)):
            run = torch.inference_mode()(run)  # torch forbids writes to such tensors elsewhere
        # A caller that waits at once (`async_op=False`) may run the operations itself, which saves
        # two thread switches. Not across machines: TCP may wait for a lost machine far beyond the
        # timeout, and only a caller that waits for another thread can stop waiting.
        at_once = self._topology.count == 1 and not getattr(opts, "asyncOp", True)

        def name() -> str:
            size = sum(tensor.nbytes for tensor in tensors)
            rank = world.world_ranks[world.rank]
            return f"{kind} number {sequence} on rank {rank} ({size} bytes)"

        work = NodeWork(name, self._timeout, self.checked_barrier)
        if torch.autograd.profiler._is_profiler_enabled:
            at_once = False  # an asynchronous range must end in another thread
            run = _in_range(f"{self.backend}:{kind}", tensors, run)
        return self._worker.submit(work, run, at_once)

    def _free_memory(self) -> None:
        self._reduce.free()
        self._reduce_here.free()  # idempotent: on one machine both are the same object
        self._shared.free_unused()
        self.checked_barrier.free()


def register_backend(name: str, create: Callable[[Any, Any], Any]) -> None:
    """Registers a backend, which makes its groups with `create`, under torch's name for it."""
    # Otherwise torch attaches a recorder to the group's C++ backends, and such a group has none.
    recording: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recording.add(name)
    dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu"])


def _in_range(name: str, tensors: Tensors, run: Callable[[], Outputs]) -> Callable[[], Outputs]:
    """Opens an asynchronous range of torch.profiler, as torch's own backends do; `run` ends it."""
    # Not the handle's future: its waiters could stop the profiler before the range has ended.
    ended: torch.futures.Future[None] = torch.futures.Future()
    with torch.profiler.record_function(name, str([list(t.shape) for t in tensors])) as of_call:
        of_call._call_end_callbacks_on_future(ended)

    def run_and_end() -> Outputs:
        try:
            return run()
        finally:
            ended.set_result(None)

    return run_and_end
