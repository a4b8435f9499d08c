"""torch.distributed's calls as calls on an MPI communicator.

Each collective is one closure, run by the group's worker thread: it makes the tensors dense,
calls MPI, and puts the result where torch wants it. The tensors live as long as the closure does.
"""

# torch.distributed calls these methods in one form; its C++ class has others besides.
# mypy: disable-error-code="override"

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from .datatypes import WIDENED, operation, raw, values
from .worker import Pending, PendingMessage, Result, Worker, describe

_NO_TIMEOUT = timedelta(milliseconds=-1)


class ProcessGroupMPI(dist.ProcessGroup):
    """A group of ranks with a communicator of its own.

    Collectives return at once with a handle; they run in order, on one thread per group.
    Messages (`send`, `recv`) do not queue behind them, so that two ranks may each post their
    receive before their send.

    Args:
        communicator: the group's ranks; duplicated, so that no other library's messages can be
            taken for ours.
        timeout: how long a `wait()` lasts at most.

    Supported: all_reduce, broadcast, all_gather, all_gather_into_tensor, gather, scatter,
    barrier, send, recv (also from any source) and the object collectives built on them. Any
    other call raises torch's own error that the backend does not have it.
    """

    def __init__(self, communicator: MPI.Intracomm, timeout: timedelta) -> None:
        super().__init__(communicator.rank, communicator.size)
        self._communicator = communicator.Dup()
        self._timeout = timeout
        self._sequence = 0
        self._worker = Worker(f"mpi-group-{communicator.size}")
        self._messages: list[PendingMessage] = []

    def getBackendName(self) -> str:
        return "mpi"

    # torch keeps these two in the backends of a group; this group is its own backend.

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    # Collectives --------------------------------------------------------------------------------

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Pending:
        (tensor,) = tensors
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        wide = torch.float32 if tensor.dtype in WIDENED else tensor.dtype
        mpi_op = operation(op, wide)  # here, so that a wrong one is raised where it was asked for

        def run() -> Result:
            dense = tensor.to(wide).contiguous()
            self._communicator.Allreduce(MPI.IN_PLACE, values(dense), mpi_op)
            if op == dist.ReduceOp.AVG:
                dense = dense / self.size() if dense.is_floating_point() else dense // self.size()
            if dense is not tensor:
                tensor.copy_(dense)
            return [tensor]

        return self._submit("all_reduce", [tensor], run)

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any) -> Pending:
        (tensor,) = tensors

        def run() -> Result:
            dense = tensor.contiguous()
            self._communicator.Bcast(raw(dense), opts.rootRank)
            if dense is not tensor:
                tensor.copy_(dense)
            return [tensor]

        return self._submit("broadcast", [tensor], run)

    def allgather(
        self,
        outputs: Sequence[Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        opts: Any = None,
    ) -> Pending:
        (parts,), (tensor,) = outputs, inputs
        _check_equal_sizes("all_gather", tensor, parts)

        def run() -> Result:
            gathered = torch.empty((self.size(), tensor.numel()), dtype=tensor.dtype)
            self._communicator.Allgather(raw(tensor.contiguous()), raw(gathered))
            for part, row in zip(parts, gathered, strict=True):
                part.copy_(row.view(part.shape))
            return list(parts)

        return self._submit("all_gather", [tensor], run)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> Pending:
        if output.numel() != input.numel() * self.size():
            raise ValueError(
                f"all_gather_into_tensor needs an output of {input.numel() * self.size()} "
                f"elements, got {output.numel()}"
            )

        def run() -> Result:
            dense = output.contiguous()
            self._communicator.Allgather(raw(input.contiguous()), raw(dense))
            if dense is not output:
                output.copy_(dense)
            return [output]

        return self._submit("all_gather_into_tensor", [input], run)

    _allgather_base = all_gather_single  # its name before torch 2.14

    def gather(
        self,
        outputs: Sequence[Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        opts: Any,
    ) -> Pending:
        (tensor,) = inputs
        parts = list(outputs[0]) if outputs else []
        _check_equal_sizes("gather", tensor, parts)

        def run() -> Result:
            dense = tensor.contiguous()
            if opts.rootRank != self.rank():
                self._communicator.Gather(raw(dense), None, opts.rootRank)
                return []
            gathered = torch.empty((self.size(), tensor.numel()), dtype=tensor.dtype)
            self._communicator.Gather(raw(dense), raw(gathered), opts.rootRank)
            for part, row in zip(parts, gathered, strict=True):
                part.copy_(row.view(part.shape))
            return parts

        return self._submit("gather", [tensor], run)

    def scatter(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[Sequence[torch.Tensor]],
        opts: Any,
    ) -> Pending:
        (tensor,) = outputs
        parts = list(inputs[0]) if inputs else []
        _check_equal_sizes("scatter", tensor, parts)

        def run() -> Result:
            dense = tensor.contiguous()
            if opts.rootRank == self.rank():
                stacked = torch.stack([part.reshape(-1) for part in parts])
                self._communicator.Scatter(raw(stacked), raw(dense), opts.rootRank)
            else:
                self._communicator.Scatter(None, raw(dense), opts.rootRank)
            if dense is not tensor:
                tensor.copy_(dense)
            return [tensor]

        return self._submit("scatter", [tensor], run)

    def barrier(self, opts: Any = None) -> Pending:
        def run() -> Result:
            self._communicator.Barrier()
            return []

        return self._submit("barrier", [], run)

    # Messages -----------------------------------------------------------------------------------

    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int = 0) -> PendingMessage:
        (tensor,) = tensors
        dense = tensor.contiguous()
        name = f"send to rank {dst} from rank {self.rank()} ({tensor.nbytes} bytes)"
        request = self._communicator.Isend(raw(dense), dst, tag)
        return self._post(PendingMessage(name, self._timeout, request, dense))

    def recv(self, tensors: Sequence[torch.Tensor], src: int, tag: int = 0) -> PendingMessage:
        (tensor,) = tensors
        dense = tensor.contiguous()
        source = "any rank" if src == MPI.ANY_SOURCE else f"rank {src}"
        name = f"recv from {source} on rank {self.rank()} ({tensor.nbytes} bytes)"

        def finish() -> None:
            if dense is not tensor:
                tensor.copy_(dense)

        request = self._communicator.Irecv(raw(dense), src, tag)
        return self._post(PendingMessage(name, self._timeout, request, dense, finish))

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> PendingMessage:
        return self.recv(tensors, MPI.ANY_SOURCE, tag)

    # Lifetime -----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Ends the worker thread and frees the communicator. Idempotent."""
        if self._communicator == MPI.COMM_NULL:
            return
        # Freeing is collective: not while an operation is stuck on a rank that will not come.
        if self._worker.close(self._timeout.total_seconds()):
            self._communicator.Free()

    def _submit(
        self, kind: str, tensors: Sequence[torch.Tensor], run: Callable[[], Result]
    ) -> Pending:
        self._sequence += 1
        name = describe(kind, self.rank(), self._sequence, tensors)
        return self._worker.submit(Pending(name, self._timeout), run)

    def _post(self, message: PendingMessage) -> PendingMessage:
        # MPI still uses the memory of a message whose handle the caller dropped.
        self._messages = [m for m in self._messages if not m.is_completed()] + [message]
        return message


def create(backend_options: Any, options: object) -> ProcessGroupMPI:
    """torch.distributed's factory: the default group, or one of `new_group`'s (members only)."""
    timeout = backend_options.timeout
    ranks = list(backend_options.global_ranks_in_group)
    if not ranks:
        return ProcessGroupMPI(MPI.COMM_WORLD, timeout)
    members = MPI.COMM_WORLD.Get_group().Incl(ranks)
    communicator = MPI.COMM_WORLD.Create_group(members)
    try:
        return ProcessGroupMPI(communicator, timeout)
    finally:
        communicator.Free()


def _check_equal_sizes(kind: str, tensor: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    for part in parts:
        if part.numel() != tensor.numel() or part.dtype != tensor.dtype:
            raise ValueError(
                f"{kind} needs tensors of one size and dtype: got {tuple(part.shape)} "
                f"{part.dtype} beside {tuple(tensor.shape)} {tensor.dtype}"
            )
