"""Process group whose ranks share a machine's memory: the part that every backend has in common.

Collectives return at once with a handle; they run in order, on one thread per group (work.py).
collectives.py has those that are not here, and a backend the messages: a `Transport`.
"""

# torch.distributed calls these methods in one form; its C++ class has others besides.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ddp_from_scratch.backend.all_reduce import AllReduce, Receive
from ddp_from_scratch.backend.barrier import CheckedBarrier, Progress
from ddp_from_scratch.backend.operations import PLAIN, caller, check_memory, elements, size_of
from ddp_from_scratch.backend.reduction import REDUCED, ReduceOp, Reduction
from ddp_from_scratch.backend.shared_memory import Nodes
from ddp_from_scratch.backend.stage import Exchange, Stage, Windows
from ddp_from_scratch.backend.transport import Transport
from ddp_from_scratch.backend.work import NodeWork, Operation, Result, Worker, run_in_turn
from ddp_from_scratch.errors import CommunicationError, NoSharedMemory

Tensors = Sequence[torch.Tensor]
Make = Callable[[int, torch.dtype], torch.Tensor]

# The part of torch's options that says: the caller is going to wait.
_AT_ONCE = SimpleNamespace(asyncOp=False)


class SharedMemoryGroup(dist.ProcessGroup):
    """A process group that reduces in shared memory within a machine.

    Args:
        everyone: the group's ranks.
        timeout: how long a collective may take.
        progress: called by threads that wait; see `CheckedBarrier`.

    Attributes:
        checked_barrier: the ranks meet there before each operation.
        backend: the name of the backend, for error messages.
    """

    backend: ClassVar[str]
    # Each backend's method: makes the group of `ranks`, which are places in this one.
    _part: Callable[[Sequence[int], timedelta, str], SharedMemoryGroup]

    def __init__(
        self,
        everyone: Transport,
        timeout: timedelta,
        progress: Progress = lambda: math.inf,
    ) -> None:
        super().__init__(everyone.rank, everyone.size)  # type: ignore[call-arg, unused-ignore]
        # In this order on all ranks: each of these exchanges messages when it is made.
        self._nodes = Nodes.of(everyone)
        self.checked_barrier = CheckedBarrier(self._nodes, progress)
        self._windows = Windows(self._nodes.node)
        self._stage = Stage(self._nodes, self.checked_barrier)
        self._reduce = AllReduce(self._nodes, self.checked_barrier, self._windows, self._stage)
        # For `average_on_machine`.
        self._reduce_here = self._reduce
        if self.machines > 1:
            here = self._nodes.here
            self._reduce_here = AllReduce(
                here, self.checked_barrier, self._windows, Stage(here, self.checked_barrier)
            )
        self._exchange = Exchange(self._nodes, self.checked_barrier, self._stage)
        # Finding both takes as long as summing a small tensor: those last used are kept.
        self._named_reduction = lru_cache(maxsize=1024)(self._make_named_reduction)
        # True if `ReduceOp.AVG` has the bits of a division before the sum, as torch's DDP: where
        # 1/n is exact. Elsewhere AVG divides the sum, which has other bits.
        self.divides_first = everyone.size.bit_count() == 1
        self._timeout = timeout
        self._sequence = 0  # of calls, for error messages
        self._worker = Worker(f"{self.backend}-group-{everyone.size}")

    @property
    def shares_memory(self) -> bool:
        """True where two ranks of the group share a machine's memory, on whatever machine."""
        return bool(self._stage.shares_memory)

    @property
    def machines(self) -> int:
        """Number of machines; ranks that share no memory count as one each."""
        return self._nodes.count

    def getBackendName(self) -> str:
        return self.backend

    # torch keeps these in the backends of a group; this group is its own backend.

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
        """A group of some of this one's ranks; None on the others, which need not call it."""
        if self.rank() not in ranks:
            return None
        part = self._part(ranks, timeout or self._timeout, group_name or "")
        part.setGroupName(group_name or "")
        part.setGroupDesc(group_desc or "")
        return part

    def install_store(self) -> None:
        """Lets torch know the group's store, where it may not have noted one yet. Idempotent."""

    # Collectives ---------------------------------------------------------------------------------

    def allreduce(
        self, tensors: Tensors, opts: Any = None, crossing: torch.dtype | None = None
    ) -> dist.Work:
        """As torch's; sums go from machine to machine in the dtype `crossing`, if that is given."""
        op, operations = dist.ReduceOp.SUM if opts is None else opts.reduceOp, []
        for tensor in tensors:
            dense = tensor.is_cpu and tensor.layout is torch.strided
            if not dense or tensor.dtype not in REDUCED:
                return self._all_reduce_elsewhere(tensors, opts)
            text, reduction = self._named_reduction(tensor.numel(), tensor.dtype, op, caller.suffix)
            run = partial(self._reduce, tensor, reduction, crossing)
            operations.append(Operation(text, run, partial(self._reduce.prepare, tensor)))
        return self._submit("all_reduce", tensors, opts, operations, written=tensors)

    def _all_reduce_elsewhere(self, tensors: Tensors, opts: Any) -> dist.Work:
        """Tensors that cannot be reduced in shared memory."""
        check_memory(self.backend, "all_reduce", written=tensors)
        raise RuntimeError(
            f"the {self.backend} backend cannot reduce tensors of {tensors[0].dtype}"
        )

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def average_on_machine(self, tensor: torch.Tensor) -> dist.Work:
        """Averages over the ranks of this machine alone. Collective: on all machines."""
        operation = Operation(f"average_on_machine of {size_of(tensor)}", lambda: [tensor])
        if (size := self._nodes.node.size) > 1:
            reduction = Reduction.of(dist.ReduceOp.AVG, tensor.dtype, size)
            operation.run = partial(self._reduce_here, tensor, reduction)
            operation.prepare = partial(self._reduce_here.prepare, tensor)
        return self._submit("average_on_machine", [tensor], None, [operation], written=[tensor])

    def _make_named_reduction(
        self, numel: int, dtype: torch.dtype, op: ReduceOp, suffix: str
    ) -> tuple[str, Reduction]:
        reduction = Reduction.of(op, dtype, self.size())
        return f"all_reduce({reduction.name}) of {elements(numel, dtype)}{suffix}", reduction

    def barrier(self, opts: Any = None) -> dist.Work:
        # To meet is all it does.
        return self._submit("barrier", [], opts, [Operation("barrier", list)])

    # Memory that ranks share ---------------------------------------------------------------------

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Implements the method by which torch's backends offer memory to send from."""
        try:
            return self.empty(size, dtype)
        except CommunicationError as error:
            # Refused memory is no failure of the group: all ranks raise, and can go on.
            if not isinstance(error.__cause__, NoSharedMemory):
                raise
            if self.checked_barrier.rank == 0:
                warnings.warn(
                    f"gradients lie in ordinary memory, which costs two copies: {error.__cause__}",
                    stacklevel=2,
                )
            return torch.empty(size, dtype=dtype)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat uninitialised tensor in shared memory; each rank has its own. Collective."""
        return self._allocate("empty", self._windows.empty, numel, dtype)

    def empty_for_all(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """As `empty`, but the same memory on all ranks of a machine. Collective."""
        return self._allocate("empty_for_all", self._windows.empty_for_all, numel, dtype)

    def _allocate(self, kind: str, make: Make, numel: int, dtype: torch.dtype) -> torch.Tensor:
        kind = f"{self.backend}.{kind}"
        operation = Operation(f"{kind}({numel}, {dtype})", lambda: [make(numel, dtype)])
        work = self._submit(kind, [], None, [operation])
        work.wait()
        (tensor,) = work.result()
        return tensor

    def is_shared(self, tensor: torch.Tensor) -> bool:
        """True for a tensor in memory that the machine's ranks share, each rank's at a place."""
        return bool(self._windows.place(tensor))

    def free_unused(self) -> None:
        """Gives memory back that this rank no longer uses. Also a barrier. Collective."""
        operation = Operation("free_unused", self._windows.free_unused)
        self._submit("free_unused", [], _AT_ONCE, [operation]).wait()

    def reduce_to_owners(
        self,
        tensor: torch.Tensor,
        op: dist.ReduceOp.RedOpType,
        receive: Receive,
        label: str,
    ) -> None:
        """Gives each rank its share of a reduction; see `AllReduce.to_owners`. Collective.

        Returns when this rank has it. Ranks with different labels all raise a CommunicationError.
        """
        reduction = Reduction.of(op, tensor.dtype, self.size())
        operation = Operation(
            f"reduce_to_owners({reduction.name}) of {size_of(tensor)} {label}",
            partial(self._reduce.to_owners, tensor, reduction, receive),
            partial(self._windows.place, tensor),
        )
        self._submit("reduce_to_owners", [tensor], _AT_ONCE, [operation], [tensor]).wait()

    # Lifetime ------------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        """Limits operations that begin from now on."""
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
        """Gives the operations to the group's thread, under one handle.

        `tensors` are those that an error and the profiler tell of.
        """
        read = [*read]
        plain = not torch._C._len_torch_dispatch_stack()
        for tensor in (*read, *written):
            keys = torch._C._dispatch_keys(tensor).raw_repr()
            plain = plain and keys == PLAIN and tensor.is_contiguous()
        if not plain:  # else it is what most tensors are, and the check would find nothing
            check_memory(self.backend, kind, *read, written=written)
        # Not for a call whose arguments were refused: that raised before.
        self._sequence += 1
        name = partial(_name_call, kind, self._sequence, self._nodes.everyone, tensors)
        run = partial(run_in_turn, operations, self.checked_barrier, self._timeout.total_seconds())
        if torch.is_inference_mode_enabled() or any(map(torch.Tensor.is_inference, tensors)):
            run = torch.inference_mode()(run)  # such tensors may be written to there alone
        # A caller that waits at once (`async_op=False`) may run them itself, which saves the way to
        # the thread and back. Not across machines: a machine that is gone may be waited for as long
        # as TCP does, and only a caller that waits for the thread can leave.
        at_once = self._nodes.count == 1 and not getattr(opts, "asyncOp", True)
        work = NodeWork(name, self._timeout, self.checked_barrier)
        if torch.autograd.profiler._is_profiler_enabled:
            at_once = False  # a range is asynchronous if it ends in another thread
            run = _in_range(f"{self.backend}:{kind}", tensors, run)
        return self._worker.submit(work, run, at_once)

    def _free_memory(self) -> None:
        self._reduce.free()
        self._reduce_here.free()  # the same on one machine: freed twice does no harm
        self._windows.free_unused()
        self.checked_barrier.free()


def _in_range(name: str, tensors: Tensors, run: Callable[[], Result]) -> Callable[[], Result]:
    """Opens an asynchronous range of torch.profiler, as torch's own backends do; `run` ends it."""
    # A future of its own: of the handle's, a thread that waits may stop the profiler too early.
    ended: torch.futures.Future[None] = torch.futures.Future()
    with torch.profiler.record_function(name, str([list(t.shape) for t in tensors])) as of_call:
        of_call._call_end_callbacks_on_future(ended)

    def run_and_end() -> Result:
        try:
            return run()
        finally:
            ended.set_result(None)

    return run_and_end


def _name_call(kind: str, sequence: int, everyone: Transport, tensors: Tensors) -> str:
    size = sum(tensor.nbytes for tensor in tensors)
    return f"{kind} number {sequence} on rank {everyone.world_ranks[everyone.rank]} ({size} bytes)"
