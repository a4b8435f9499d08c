"""Process group of torch.distributed over an MPI communicator.

Methods carry torch's names and arguments. Each asks `collectives.py` for operations, numbers the
call, and submits it to the group's thread under one handle.
"""

# torch.distributed calls these methods in one form; its C++ class has others besides.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch.errors import CommunicationError, NoSharedMemory
from ddp_from_scratch.mpi import p2p
from ddp_from_scratch.mpi.arguments import check_memory
from ddp_from_scratch.mpi.collectives import Collectives
from ddp_from_scratch.mpi.communicator import MPICommunicator
from ddp_from_scratch.mpi.monitored_barrier import monitored_barrier
from ddp_from_scratch.mpi.operation import Operation, run_in_turn
from ddp_from_scratch.mpi.p2p import P2PWork
from ddp_from_scratch.mpi.runtime import MPI
from ddp_from_scratch.mpi.store import replace_placeholder
from ddp_from_scratch.mpi.work import MPIWork
from ddp_from_scratch.mpi.worker import Worker

Tensors = Sequence[torch.Tensor]
Make = Callable[[int, torch.dtype], torch.Tensor]

# The part of torch's options that says: the caller is going to wait.
_AT_ONCE = SimpleNamespace(asyncOp=False)


class ProcessGroupMPI(dist.ProcessGroup):
    """A group of ranks with a communicator of its own.

    Collectives return at once with a handle; they run in order, on one thread per group. Messages
    (`send`, `recv`) do not queue behind them: two ranks may each post a receive before their send.
    Also a `SharedMemoryGroup`, `DividesFirst` and `InstallsStore` (node/shared_memory_group.py).

    Args:
        communicator: the group's ranks; duplicated.
        timeout: how long a collective or a message may take.
        node: those of the ranks that share memory with this one; None asks MPI.
        store: for groups of other backends to meet through, where torch noted a placeholder.
    """

    def __init__(
        self,
        communicator: MPI.Intracomm,
        timeout: timedelta,
        node: MPI.Intracomm | None = None,
        store: dist.Store | None = None,
    ) -> None:
        super().__init__(communicator.rank, communicator.size)
        # A duplicate, so that no other library's messages can be taken for ours. Messages and
        # collectives share it: they differ in tags, and collectives run one by one.
        self._communicator = communicator.Dup()
        here = None if node is None else MPICommunicator(node.Dup())
        self._collectives = Collectives(MPICommunicator(self._communicator), here)
        self._timeout = timeout
        self._sequence = 0  # of calls, for error messages
        self._worker = Worker(f"mpi-group-{communicator.size}")
        self._store = store  # until it is installed

    @property
    def divides_first(self) -> bool:
        # Only where 1/n is exact; elsewhere AVG divides the sum, which has other bits.
        return self.size() & (self.size() - 1) == 0

    def getBackendName(self) -> str:
        return "mpi"

    # torch keeps these in the backends of a group; this group is its own backend.

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    def _get_backend(self, device: torch.device) -> ProcessGroupMPI:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    @property
    def bound_device_id(self) -> None:
        # torch asks for it before it hands the default store to a new group, and asks for nothing
        # else between noting that store and using it: so the store is installed here, too.
        self.install_store()

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        """Ignored: torch sets the whole's on a part that was split, and it has none either."""

    def install_store(self) -> None:
        if self._store is not None and replace_placeholder(self, self._store):
            self._store = None

    # Splitting: `dist.split_group` ---------------------------------------------------------------

    supports_splitting = True

    @property
    def group_name(self) -> str:
        return self._name

    def get_group_store(self) -> dist.Store | None:
        return self._store

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> ProcessGroupMPI | None:
        """A group of some of this one's ranks; None on the others, which need not call it."""
        if self.rank() not in ranks:
            return None
        # Of this group's communicator: `ranks` are places in it, not ranks of the world.
        part = create_subgroup(self._communicator, ranks, timeout or self._timeout)
        part.setGroupName(group_name or "")
        part.setGroupDesc(group_desc or "")
        return part

    # Collectives ---------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = None) -> MPIWork:
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        operations = [self._collectives.all_reduce(tensor, op) for tensor in tensors]
        return self._submit("all_reduce", tensors, opts, *operations)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> MPIWork:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Tensors, opts: Any) -> MPIWork:
        (tensor,) = tensors
        operation = self._collectives.reduce(tensor, opts.reduceOp, opts.rootRank)
        return self._submit("reduce", tensors, opts, operation)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> MPIWork:
        operations = [
            self._collectives.reduce_scatter(output, parts, opts.reduceOp)
            for output, parts in zip(outputs, inputs, strict=True)
        ]
        return self._submit("reduce_scatter", outputs, opts, *operations)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any
    ) -> MPIWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> MPIWork:
        parts = [input.reshape(-1).tensor_split(self.size()) for input in inputs]
        return self.reduce_scatter(outputs, parts, opts)

    def broadcast(self, tensors: Tensors, opts: Any) -> MPIWork:
        (tensor,) = tensors
        operation = self._collectives.broadcast(tensor, opts.rootRank)
        return self._submit("broadcast", tensors, opts, operation)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> MPIWork:
        operations = [
            self._collectives.all_gather(parts, tensor)
            for parts, tensor in zip(outputs, inputs, strict=True)
        ]
        return self._submit("all_gather", inputs, opts, *operations)

    def allgather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> MPIWork:
        # torch gives a list for each rank here, not one for each tensor.
        return self.allgather(list(zip(*outputs, strict=True)), inputs, opts)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> MPIWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> MPIWork:
        operations = [
            self._collectives.all_gather_single(output, input)
            for output, input in zip(outputs, inputs, strict=True)
        ]
        return self._submit("all_gather_into_tensor", inputs, opts, *operations)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> MPIWork:
        (tensor,) = inputs
        operation = self._collectives.gather(outputs[0] if outputs else [], tensor, opts.rootRank)
        return self._submit("gather", inputs, opts, operation)

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> MPIWork:
        root = opts.rootRank == self.rank()
        return self.gather(
            [output.view(-1).tensor_split(self.size())] if root else [], [input], opts
        )

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> MPIWork:
        (tensor,) = outputs
        operation = self._collectives.scatter(tensor, inputs[0] if inputs else [], opts.rootRank)
        return self._submit("scatter", outputs, opts, operation)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> MPIWork:
        operation = self._collectives.all_to_all(outputs, inputs)
        return self._submit("all_to_all", inputs, opts, operation)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> MPIWork:
        operation = self._collectives.all_to_all_single(output, input, output_splits, input_splits)
        return self._submit("all_to_all_single", [input], opts, operation)

    def barrier(self, opts: Any = None) -> MPIWork:
        return self._submit("barrier", [], opts, self._collectives.barrier())

    # The names of these methods in torch before 2.14.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        limit = timeout if timeout and timeout > timedelta(0) else self._timeout
        monitored_barrier(self, limit, wait_all_ranks)

    # Memory to send from, as backends of torch's own offer it -----------------------------------

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        try:
            return self.empty(size, dtype)
        except CommunicationError as error:
            # Refused memory is no failure of the group: all ranks raise, and can go on.
            if not isinstance(error.__cause__, NoSharedMemory):
                raise
            if self._collectives.checked_barrier.rank == 0:
                warnings.warn(
                    f"gradients lie in ordinary memory, which costs two copies: {error.__cause__}",
                    stacklevel=2,
                )
            return torch.empty(size, dtype=dtype)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Implements `ddp_from_scratch.mpi.empty`."""
        return self._allocate("empty", self._collectives.windows.empty, numel, dtype)

    def _allocate(self, kind: str, make: Make, numel: int, dtype: torch.dtype) -> torch.Tensor:
        check_memory(f"mpi.{kind}")
        operation = Operation(f"mpi.{kind}({numel}, {dtype})", lambda: [make(numel, dtype)])
        work = self._submit(kind, [], None, operation)
        work.wait()
        (tensor,) = work.result()
        return tensor

    # `SharedMemoryGroup`, where these are described ----------------------------------------------

    def is_shared(self, tensor: torch.Tensor) -> bool:
        return bool(self._collectives.windows.place(tensor))

    def free_unused(self) -> None:
        operation = Operation("free_unused", self._collectives.windows.free_unused)
        self._submit("free_unused", [], _AT_ONCE, operation).wait()

    def empty_for_all(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        windows = self._collectives.windows
        return self._allocate("empty_for_all", windows.empty_for_all, numel, dtype)

    def reduce_to_owners(
        self,
        tensor: torch.Tensor,
        op: dist.ReduceOp.RedOpType,
        receive: Callable[[int, torch.Tensor], None],
        label: str,
    ) -> None:
        operation = self._collectives.reduce_to_owners(tensor, op, receive, label)
        self._submit("reduce_to_owners", [tensor], _AT_ONCE, operation).wait()

    # Messages ------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> P2PWork:
        (tensor,) = tensors
        check_memory("send", tensor)
        return p2p.send(self._communicator, tensor, dst, tag, self._timeout)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> P2PWork:
        (tensor,) = tensors
        check_memory("recv", tensor)
        return p2p.receive(self._communicator, tensor, src, tag, self._timeout)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> P2PWork:
        return self.recv(tensors, MPI.ANY_SOURCE, tag)

    # Lifetime ------------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        """Limits operations that begin from now on."""
        self._timeout = timeout

    def shutdown(self) -> None:
        """Ends the worker thread and frees the communicator. Idempotent."""
        if self._communicator == MPI.COMM_NULL:
            return
        # First, so that a second call finds nothing to do, also where this one fails.
        communicator, self._communicator = self._communicator, MPI.COMM_NULL
        seconds = self._timeout.total_seconds()
        if not self._worker.close(seconds):
            return  # it still runs an operation in this memory
        # Freeing is collective: not where a rank has failed, or ends without coming here.
        with suppress(CommunicationError):
            self._collectives.checked_barrier.meet("destroy_process_group", "", seconds)
            self._collectives.free()
            communicator.Free()

    def _submit(self, kind: str, tensors: Tensors, opts: Any, *operations: Operation) -> MPIWork:
        """Gives the operations to the group's thread, under one handle."""
        # Not for a call whose arguments were refused: that raised before.
        self._sequence += 1
        barrier = self._collectives.checked_barrier
        name = partial(_name_call, kind, self._sequence, tensors)
        run = partial(run_in_turn, operations, barrier, self._timeout.total_seconds())
        # A caller that waits at once (`async_op=False`) may run them itself, which saves the way to
        # the thread and back. Not across machines: MPI waits for a machine that is gone as long as
        # TCP does, and only a caller that waits for the thread can leave.
        at_once = self._collectives.one_machine and not getattr(opts, "asyncOp", True)
        return self._worker.submit(MPIWork(name, self._timeout, barrier), run, at_once)


def _name_call(kind: str, sequence: int, tensors: Tensors) -> str:
    size = sum(tensor.nbytes for tensor in tensors)
    return f"{kind} number {sequence} on rank {MPI.COMM_WORLD.rank} ({size} bytes)"


def create_subgroup(
    whole: MPI.Intracomm, ranks: Sequence[int], timeout: timedelta
) -> ProcessGroupMPI:
    """A group of some ranks of `whole`. Only they call it."""
    communicator = whole.Create_group(whole.Get_group().Incl(list(ranks)))
    try:
        return ProcessGroupMPI(communicator, timeout)
    finally:
        communicator.Free()  # the group has a duplicate
