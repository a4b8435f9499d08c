"""torch.distributed's collectives as calls on an MPI communicator.

Each method checks its arguments where the caller can see the error, and returns a closure for the
group's thread, which makes tensors dense, calls MPI, and puts the result where torch wants it. The
tensors live as long as the closure does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from mpi4py import MPI

from .datatypes import WIDENED, operation, raw, values
from .worker import Result

Operation = Callable[[], Result]
ReduceOp: TypeAlias = "dist.ReduceOp | dist.ReduceOp.RedOpType"


@dataclass(frozen=True)
class Reduction:
    """A reduction of torch's on elements of one dtype.

    16-bit floats are reduced in float32 and rounded once; AVG is a sum, divided afterwards.
    """

    dtype: torch.dtype
    op: MPI.Op
    divisor: int

    @staticmethod
    def of(op: ReduceOp, dtype: torch.dtype, size: int) -> "Reduction":
        """The reduction `op` over `size` ranks.

        Raises:
            ValueError: MPI does not have it for this dtype.
        """
        wide = torch.float32 if dtype in WIDENED else dtype
        return Reduction(wide, operation(op, wide), size if op == dist.ReduceOp.AVG else 1)

    def finish(self, reduced: torch.Tensor, tensor: torch.Tensor) -> None:
        """Puts what MPI left in `reduced` into `tensor`, which may be the same."""
        if self.divisor > 1:
            if reduced.is_floating_point() or reduced.is_complex():
                reduced /= self.divisor
            else:
                reduced //= self.divisor
        if reduced is not tensor:
            tensor.copy_(reduced.view(tensor.shape))


class Collectives:
    """The collectives of one communicator."""

    def __init__(self, communicator: MPI.Intracomm) -> None:
        self.communicator = communicator
        self.rank, self.size = communicator.rank, communicator.size

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Operation:
        reduction = Reduction.of(op, tensor.dtype, self.size)

        def run() -> Result:
            dense = tensor.to(reduction.dtype).contiguous()
            self.communicator.Allreduce(MPI.IN_PLACE, values(dense), reduction.op)
            reduction.finish(dense, tensor)
            return [tensor]

        return run

    def reduce(self, tensor: torch.Tensor, op: ReduceOp, root: int) -> Operation:
        reduction = Reduction.of(op, tensor.dtype, self.size)

        def run() -> Result:
            dense = tensor.to(reduction.dtype).contiguous()
            if self.rank == root:
                self.communicator.Reduce(MPI.IN_PLACE, values(dense), reduction.op, root)
                reduction.finish(dense, tensor)
            else:
                self.communicator.Reduce(values(dense), None, reduction.op, root)
            return [tensor]

        return run

    def reduce_scatter(
        self, output: torch.Tensor, parts: Sequence[torch.Tensor], op: ReduceOp
    ) -> Operation:
        """Rank r gets the reduction of everybody's `parts[r]`; parts may differ in size."""
        _check_count("reduce_scatter", "input", parts, self.size)
        if output.numel() != parts[self.rank].numel():
            raise ValueError(
                f"reduce_scatter needs an output of {parts[self.rank].numel()} elements on rank "
                f"{self.rank}, got {output.numel()}"
            )
        reduction = Reduction.of(op, output.dtype, self.size)

        def run() -> Result:
            joined = _join(parts, reduction.dtype)
            own = torch.empty(output.numel(), dtype=reduction.dtype)
            counts = [part.numel() for part in parts]
            self.communicator.Reduce_scatter(values(joined), values(own), counts, reduction.op)
            reduction.finish(own, output)
            return [output]

        return run

    def broadcast(self, tensor: torch.Tensor, root: int) -> Operation:
        def run() -> Result:
            dense = tensor.contiguous()
            self.communicator.Bcast(raw(dense), root)
            if dense is not tensor:
                tensor.copy_(dense)
            return [tensor]

        return run

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Operation:
        """`outputs[r]` becomes rank r's tensor; tensors may differ in size over ranks."""
        _check_count("all_gather", "output", outputs, self.size)
        _check_same("all_gather", tensor, [outputs[self.rank]])

        def run() -> Result:
            gathered = _room_for(outputs)
            counts = [output.nbytes for output in outputs]
            self.communicator.Allgatherv(
                raw(tensor.contiguous()), [raw(gathered)[0], counts, MPI.BYTE]
            )
            _part(gathered, outputs)
            return list(outputs)

        return run

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor) -> Operation:
        _check_share("all_gather_into_tensor", "output", output, tensor, self.size)

        def run() -> Result:
            dense = output.contiguous()
            self.communicator.Allgather(raw(tensor.contiguous()), raw(dense))
            if dense is not output:
                output.copy_(dense)
            return [output]

        return run

    def gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> Operation:
        if self.rank == root:
            _check_count("gather", "output", outputs, self.size)
            _check_same("gather", tensor, outputs)

        def run() -> Result:
            dense = tensor.contiguous()
            if self.rank != root:
                self.communicator.Gather(raw(dense), None, root)
                return []
            gathered = _room_for(outputs)
            self.communicator.Gather(raw(dense), raw(gathered), root)
            _part(gathered, outputs)
            return list(outputs)

        return run

    def scatter(self, tensor: torch.Tensor, parts: Sequence[torch.Tensor], root: int) -> Operation:
        if self.rank == root:
            _check_count("scatter", "input", parts, self.size)
            _check_same("scatter", tensor, parts)

        def run() -> Result:
            dense = tensor.contiguous()
            sent = raw(_join(parts, tensor.dtype)) if self.rank == root else None
            self.communicator.Scatter(sent, raw(dense), root)
            if dense is not tensor:
                tensor.copy_(dense)
            return [tensor]

        return run

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Operation:
        """Rank r's `inputs[s]` becomes rank s's `outputs[r]`; they may differ in size."""
        _check_count("all_to_all", "output", outputs, self.size)
        _check_count("all_to_all", "input", inputs, self.size)

        def run() -> Result:
            sent, received = _join(inputs, inputs[0].dtype), _room_for(outputs)
            self._exchange(received, [o.nbytes for o in outputs], sent, [i.nbytes for i in inputs])
            _part(received, outputs)
            return list(outputs)

        return run

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> Operation:
        """The same with one tensor, split along its first dimension; no splits: evenly."""
        received_counts = _split_bytes("output", output, output_splits, self.size)
        sent_counts = _split_bytes("input", tensor, input_splits, self.size)

        def run() -> Result:
            dense = output.contiguous()
            self._exchange(dense, received_counts, tensor.contiguous(), sent_counts)
            if dense is not output:
                output.copy_(dense)
            return [output]

        return run

    def _exchange(
        self,
        received: torch.Tensor,
        received_counts: list[int],
        sent: torch.Tensor,
        sent_counts: list[int],
    ) -> None:
        self.communicator.Alltoallv(
            [raw(sent)[0], sent_counts, MPI.BYTE], [raw(received)[0], received_counts, MPI.BYTE]
        )

    def barrier(self) -> Operation:
        def run() -> Result:
            self.communicator.Barrier()
            return []

        return run


def _join(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([part.reshape(-1).to(dtype) for part in parts])


def _room_for(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.empty(sum(part.numel() for part in parts), dtype=parts[0].dtype)


def _part(joined: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    sizes = [part.numel() for part in parts]
    for part, values_of_it in zip(parts, joined.split(sizes), strict=True):
        part.copy_(values_of_it.view(part.shape))


def _split_bytes(what: str, tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
    rows = tensor.shape[0] if tensor.dim() else 0
    if not splits:
        if rows % size:
            raise ValueError(
                f"all_to_all_single needs an {what} whose first dimension divides evenly over "
                f"{size} ranks, got {rows}: give split sizes"
            )
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows:
        raise ValueError(
            f"all_to_all_single needs {size} {what} split sizes that add up to {rows}, got "
            f"{list(splits)}"
        )
    row_bytes = tensor.nbytes // rows if rows else 0
    return [count * row_bytes for count in splits]


def _check_count(kind: str, what: str, tensors: Sequence[torch.Tensor], size: int) -> None:
    if len(tensors) != size:
        raise ValueError(f"{kind} needs {size} {what} tensors, one a rank, got {len(tensors)}")
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise ValueError(f"{kind} needs {what} tensors of one dtype")


def _check_same(kind: str, tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> None:
    for other in others:
        if other.numel() != tensor.numel() or other.dtype != tensor.dtype:
            raise ValueError(
                f"{kind} needs tensors of one size and dtype: got {tuple(other.shape)} "
                f"{other.dtype} beside {tuple(tensor.shape)} {tensor.dtype}"
            )


def _check_share(kind: str, what: str, whole: torch.Tensor, share: torch.Tensor, size: int) -> None:
    if whole.numel() != share.numel() * size or whole.dtype != share.dtype:
        raise ValueError(
            f"{kind} needs an {what} of {share.numel() * size} elements of {share.dtype}, got "
            f"{whole.numel()} of {whole.dtype}"
        )
