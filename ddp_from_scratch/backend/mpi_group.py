"""Process group of torch.distributed over an MPI communicator.

Methods carry torch's names and arguments. Each asks `collectives.py` for operations, numbers the
call, and submits it to the group's thread under one handle.
"""

# torch.distributed calls these methods in one form; its C++ class has others besides.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ddp_from_scratch.backend import mpi_messages
from ddp_from_scratch.backend.mpi_collectives import Collectives, check_memory
from ddp_from_scratch.backend.mpi_messages import P2PWork, monitored_barrier
from ddp_from_scratch.backend.mpi_runtime import MPI, replace_placeholder
from ddp_from_scratch.backend.mpi_transport import MPICommunicator, reduction_of
from ddp_from_scratch.backend.process_group import SharedMemoryGroup, Tensors
from ddp_from_scratch.backend.reduction import ReduceOp, Reduction
from ddp_from_scratch.backend.work import NodeWork
from ddp_from_scratch.errors import CommunicationError


class ProcessGroupMPI(SharedMemoryGroup):
    """A group of ranks with a communicator of its own.

    Messages (`send`, `recv`) do not queue behind collectives: two ranks may each post a receive
    before their send.

    Args:
        communicator: the group's ranks; duplicated.
        timeout: how long a collective or a message may take.
        node: those of the ranks that share memory with this one; None asks MPI.
        store: for groups of other backends to meet through, where torch noted a placeholder.
    """

    backend: ClassVar[str] = "mpi"

    def __init__(
        self,
        communicator: MPI.Intracomm,
        timeout: timedelta,
        node: MPI.Intracomm | None = None,
        store: dist.Store | None = None,
    ) -> None:
        # A duplicate, so that no other library's messages can be taken for ours. Messages and
        # collectives share it: they differ in tags, and collectives run one by one.
        self._communicator = communicator.Dup()
        here = None if node is None else MPICommunicator(node.Dup())
        everyone = MPICommunicator(self._communicator)
        super().__init__(everyone, timeout, here, mpi_messages.progress)
        self._collectives = Collectives(everyone, self.checked_barrier)
        self._store = store  # until it is installed

    @property
    def bound_device_id(self) -> None:
        # torch asks for it before it hands the default store to a new group, and asks for nothing
        # else between noting that store and using it: so the store is installed here, too.
        self.install_store()

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        """Ignored: torch sets the whole's on a part that was split, and it has none either."""

    def install_store(self) -> None:
        store = self._store  # read once: the stall watch calls this in a thread of its own
        if store is not None and replace_placeholder(self, store):
            self._store = None

    def get_group_store(self) -> dist.Store | None:
        return self._store

    def _part(self, ranks: Sequence[int], timeout: timedelta, name: str) -> ProcessGroupMPI:
        return create_subgroup(self._communicator, ranks, timeout, type(self))

    # Collectives ---------------------------------------------------------------------------------

    def _reduction(self, op: ReduceOp, dtype: torch.dtype) -> Reduction:
        # Between machines MPI reduces: it must have the operation.
        return reduction_of(op, dtype, self.size())

    def reduce(self, tensors: Tensors, opts: Any) -> NodeWork:
        (tensor,) = tensors
        operation = self._collectives.reduce(tensor, opts.reduceOp, opts.rootRank)
        return self._submit("reduce", tensors, opts, operation)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> NodeWork:
        operations = [
            self._collectives.reduce_scatter(output, parts, opts.reduceOp)
            for output, parts in zip(outputs, inputs, strict=True)
        ]
        return self._submit("reduce_scatter", outputs, opts, *operations)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any
    ) -> NodeWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> NodeWork:
        parts = [input.reshape(-1).tensor_split(self.size()) for input in inputs]
        return self.reduce_scatter(outputs, parts, opts)

    def broadcast(self, tensors: Tensors, opts: Any) -> NodeWork:
        (tensor,) = tensors
        operation = self._collectives.broadcast(tensor, opts.rootRank)
        return self._submit("broadcast", tensors, opts, operation)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> NodeWork:
        operations = [
            self._collectives.all_gather(parts, tensor)
            for parts, tensor in zip(outputs, inputs, strict=True)
        ]
        return self._submit("all_gather", inputs, opts, *operations)

    def allgather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> NodeWork:
        # torch gives a list for each rank here, not one for each tensor.
        return self.allgather(list(zip(*outputs, strict=True)), inputs, opts)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> NodeWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> NodeWork:
        operations = [
            self._collectives.all_gather_single(output, input)
            for output, input in zip(outputs, inputs, strict=True)
        ]
        return self._submit("all_gather_into_tensor", inputs, opts, *operations)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> NodeWork:
        (tensor,) = inputs
        operation = self._collectives.gather(outputs[0] if outputs else [], tensor, opts.rootRank)
        return self._submit("gather", inputs, opts, operation)

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> NodeWork:
        root = opts.rootRank == self.rank()
        return self.gather(
            [output.view(-1).tensor_split(self.size())] if root else [], [input], opts
        )

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> NodeWork:
        (tensor,) = outputs
        operation = self._collectives.scatter(tensor, inputs[0] if inputs else [], opts.rootRank)
        return self._submit("scatter", outputs, opts, operation)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> NodeWork:
        operation = self._collectives.all_to_all(outputs, inputs)
        return self._submit("all_to_all", inputs, opts, operation)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> NodeWork:
        operation = self._collectives.all_to_all_single(output, input, output_splits, input_splits)
        return self._submit("all_to_all_single", [input], opts, operation)

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

    # Messages ------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> P2PWork:
        (tensor,) = tensors
        check_memory("send", tensor)
        return mpi_messages.send(self._communicator, tensor, dst, tag, self._timeout)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> P2PWork:
        (tensor,) = tensors
        check_memory("recv", written=[tensor])
        return mpi_messages.receive(self._communicator, tensor, src, tag, self._timeout)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> P2PWork:
        return self.recv(tensors, MPI.ANY_SOURCE, tag)

    # Lifetime ------------------------------------------------------------------------------------

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
            self.checked_barrier.meet("destroy_process_group", "", seconds)
            self._free_memory()
            self._nodes.free()
            communicator.Free()


def create_subgroup(
    whole: MPI.Intracomm, ranks: Sequence[int], timeout: timedelta, kind: type[ProcessGroupMPI]
) -> ProcessGroupMPI:
    """A group of some ranks of `whole`. Only they call it."""
    communicator = whole.Create_group(whole.Get_group().Incl(list(ranks)))
    try:
        return kind(communicator, timeout)
    finally:
        communicator.Free()  # the group has a duplicate
