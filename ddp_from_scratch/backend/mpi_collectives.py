"""Collectives of torch.distributed as operations of one group.

Each method checks its arguments where the caller can see the error, and returns an `Operation`,
which makes tensors dense, calls MPI or the shared-memory engine, and puts the result in its place.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from ddp_from_scratch.backend import operations
from ddp_from_scratch.backend.barrier import CheckedBarrier
from ddp_from_scratch.backend.mpi_transport import MPICommunicator, Transport, join, reduction_of
from ddp_from_scratch.backend.operations import elements, size_of
from ddp_from_scratch.backend.reduction import ReduceOp
from ddp_from_scratch.backend.work import Operation, Result

check_memory = partial(operations.check_memory, "mpi")


def sizes_of(tensors: Sequence[torch.Tensor]) -> str:
    """`10, 20 x torch.float32`."""
    return f"{', '.join(str(tensor.numel()) for tensor in tensors)} x {tensors[0].dtype}"


def split_sizes(what: str, tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Elements for each of `size` ranks, of a tensor split along its first dimension."""
    # Rows, as torch counts splits; MPI counts elements.
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
    row_size = tensor.numel() // rows if rows else 0
    return [count * row_size for count in splits]


def check_count(kind: str, what: str, tensors: Sequence[torch.Tensor], size: int) -> None:
    """Raises unless there is one tensor for each rank, all of one dtype."""
    if len(tensors) != size:
        raise ValueError(f"{kind} needs {size} {what} tensors, one a rank, got {len(tensors)}")
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise ValueError(f"{kind} needs {what} tensors of one dtype")


def check_dtype(kind: str, output: torch.Tensor, inputs: Sequence[torch.Tensor]) -> None:
    """Raises unless the inputs, of one dtype, are of the output's."""
    if inputs[0].dtype != output.dtype:
        raise ValueError(
            f"{kind} needs inputs and outputs of one dtype, got {inputs[0].dtype} and "
            f"{output.dtype}"
        )


def check_same(kind: str, tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> None:
    """Raises unless all have the size and the dtype of `tensor`."""
    for other in others:
        if other.numel() != tensor.numel() or other.dtype != tensor.dtype:
            raise ValueError(
                f"{kind} needs tensors of one size and dtype: got {tuple(other.shape)} "
                f"{other.dtype} beside {tuple(tensor.shape)} {tensor.dtype}"
            )


def check_share(kind: str, what: str, whole: torch.Tensor, share: torch.Tensor, size: int) -> None:
    """Raises unless `whole` is as much as `size` shares."""
    if whole.numel() != share.numel() * size or whole.dtype != share.dtype:
        raise ValueError(
            f"{kind} needs an {what} of {share.numel() * size} elements of {share.dtype}, got "
            f"{whole.numel()} of {whole.dtype}"
        )


# Pairs of ranks that an error names.
_NAMED_PAIRS = 5


class Collectives:
    """The collectives of one group, but for those of `SharedMemoryGroup`.

    Args:
        everyone: the group's ranks.
        checked_barrier: the ranks meet there before each operation.
    """

    def __init__(self, everyone: MPICommunicator, checked_barrier: CheckedBarrier) -> None:
        self._rank, self._size = everyone.rank, everyone.size
        self._mpi = Transport(everyone.handle)
        self._checked_barrier = checked_barrier

    # Reductions ----------------------------------------------------------------------------------

    def reduce(self, tensor: torch.Tensor, op: ReduceOp, root: int) -> Operation:
        check_memory("reduce", written=[tensor])
        reduction = reduction_of(op, tensor.dtype, self._size)

        def run() -> Result:
            dense = tensor.to(reduction.dtype).contiguous()
            self._mpi.reduce(dense.view(-1), reduction, root)
            if self._rank == root:
                reduction.divide(dense)
                if dense is not tensor:
                    tensor.copy_(dense)
            return [tensor]

        return Operation(f"reduce({reduction.name}) of {size_of(tensor)} to {root}", run)

    def reduce_scatter(
        self, output: torch.Tensor, parts: Sequence[torch.Tensor], op: ReduceOp
    ) -> Operation:
        check_memory("reduce_scatter", *parts, written=[output])
        check_count("reduce_scatter", "input", parts, self._size)
        check_dtype("reduce_scatter", output, parts)
        if output.numel() != parts[self._rank].numel():
            raise ValueError(
                f"reduce_scatter needs an output of {parts[self._rank].numel()} elements on rank "
                f"{self._rank}, got {output.numel()}"
            )
        reduction = reduction_of(op, output.dtype, self._size)

        def run() -> Result:
            counts = [part.numel() for part in parts]
            own = self._mpi.reduce_scatter(join(parts, reduction.dtype), counts, reduction)
            reduction.divide(own)
            output.copy_(own.view(output.shape))
            return [output]

        return Operation(f"reduce_scatter({reduction.name}) of {sizes_of(parts)}", run)

    # Copies --------------------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, root: int) -> Operation:
        check_memory("broadcast", written=[tensor])
        run = partial(_fill, tensor, partial(self._mpi.broadcast, root=root))
        return Operation(f"broadcast of {size_of(tensor)} from {root}", run)

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Operation:
        """`outputs[r]` becomes rank r's tensor; tensors may differ in size over ranks."""
        check_memory("all_gather", tensor, written=outputs)
        check_count("all_gather", "output", outputs, self._size)
        check_same("all_gather", tensor, [outputs[self._rank]])

        def run() -> Result:
            gathered = _scratch_for(outputs)
            sizes = [output.numel() for output in outputs]
            self._mpi.all_gather(gathered, sizes, tensor.contiguous().view(-1))
            return _distribute(gathered, outputs)

        return Operation(f"all_gather of {sizes_of(outputs)}", run)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor) -> Operation:
        check_memory("all_gather_into_tensor", tensor, written=[output])
        check_share("all_gather_into_tensor", "output", output, tensor, self._size)

        def gather(into: torch.Tensor) -> None:
            sizes = [tensor.numel()] * self._size
            self._mpi.all_gather(into, sizes, tensor.contiguous().view(-1))

        run = partial(_fill, output, gather)
        return Operation(f"all_gather_into_tensor of {size_of(output)}", run)

    def gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> Operation:
        check_memory("gather", tensor, written=outputs)
        if self._rank == root:
            check_count("gather", "output", outputs, self._size)
            check_same("gather", tensor, outputs)

        def run() -> Result:
            gathered = _scratch_for(outputs) if self._rank == root else None
            self._mpi.gather(gathered, tensor.contiguous(), root)
            return list(outputs) if gathered is None else _distribute(gathered, outputs)

        return Operation(f"gather of {size_of(tensor)} to {root}", run)

    def scatter(self, tensor: torch.Tensor, parts: Sequence[torch.Tensor], root: int) -> Operation:
        check_memory("scatter", *parts, written=[tensor])
        if self._rank == root:
            check_count("scatter", "input", parts, self._size)
            check_same("scatter", tensor, parts)

        run = partial(_fill, tensor, partial(self._mpi.scatter, parts, root=root))
        return Operation(f"scatter of {size_of(tensor)} from {root}", run)

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Operation:
        """Rank r's `inputs[s]` becomes rank s's `outputs[r]`; they may differ in size."""
        check_memory("all_to_all", *inputs, written=outputs)
        check_count("all_to_all", "output", outputs, self._size)
        check_count("all_to_all", "input", inputs, self._size)
        check_dtype("all_to_all", outputs[0], inputs)
        expected, sizes = [o.numel() for o in outputs], [i.numel() for i in inputs]

        def run() -> Result:
            # Before anything is sent: MPI would wait for ever for elements that do not come.
            self._check_pairs("all_to_all", expected, sizes, outputs[0].dtype)
            received = _scratch_for(outputs)
            self._mpi.exchange(enumerate(inputs), enumerate(received.split(expected)))
            return _distribute(received, outputs)

        return Operation(f"all_to_all of {outputs[0].dtype}", run)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> Operation:
        """The same with one tensor, split along its first dimension; no splits: evenly."""
        check_memory("all_to_all_single", tensor, written=[output])
        check_dtype("all_to_all_single", output, [tensor])
        received = split_sizes("output", output, output_splits, self._size)
        sent = split_sizes("input", tensor, input_splits, self._size)

        def exchange(into: torch.Tensor) -> None:
            self._check_pairs("all_to_all_single", received, sent, output.dtype)
            sends = enumerate(tensor.contiguous().view(-1).split(sent))
            self._mpi.exchange(sends, enumerate(into.split(received)))

        return Operation(f"all_to_all_single of {output.dtype}", partial(_fill, output, exchange))

    def _check_pairs(
        self, kind: str, expected: Sequence[int], sent: Sequence[int], dtype: torch.dtype
    ) -> None:
        """Raises on all ranks if one expects another number of elements than is sent to it."""
        # Only the two of them know their sizes, which fingerprints therefore cannot hold.
        wrong = self._mpi.mismatched_pairs(expected, sent)
        if not wrong:
            return
        named = [
            f"rank {source} sends {elements(size, dtype)} to rank {target}, which expects {wanted}"
            for source, target, size, wanted in wrong
        ]
        if len(named) > _NAMED_PAIRS:
            named[_NAMED_PAIRS:] = [f"and {len(named) - _NAMED_PAIRS} more"]
        raise self._checked_barrier.fail(f"{kind} does not fit: {'; '.join(named)}")


def _fill(tensor: torch.Tensor, fill: Callable[[torch.Tensor], None]) -> Result:
    """Has `fill` write to the tensor, dense and flat; a copy of it where it is not dense."""
    dense = tensor.contiguous()
    fill(dense.view(-1))
    if dense is not tensor:
        tensor.copy_(dense)
    return [tensor]


def _scratch_for(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.empty(sum(part.numel() for part in parts), dtype=parts[0].dtype)


def _distribute(joined: torch.Tensor, parts: Sequence[torch.Tensor]) -> Result:
    sizes = [part.numel() for part in parts]
    for part, elements_of_it in zip(parts, joined.split(sizes), strict=True):
        part.copy_(elements_of_it.view(part.shape))
    return list(parts)
