"""All of torch's collectives but all-reduce, for every backend whose ranks share memory.

All but `reduce` copy from rank to rank (`Exchange`). In a reduce-scatter, for instance, each rank
receives its part from every rank and sums these parts.

Tensors that lie in windows are not copied: a rank reads its part in the windows of the other ranks.
With several machines of equally many ranks, every element then crosses the network once:

    machine 0   | rank 0: sums parts 0 and 2 | rank 1: sums parts 1 and 3 |
    machine 1   | rank 2: sums parts 0 and 2 | rank 3: sums parts 1 and 3 |
                   then ranks 0 and 2 exchange  then ranks 1 and 3 exchange
"""

# torch.distributed calls only one overload of each C++ method.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch.backend.operations import (
    caller,
    check_count,
    check_dtype,
    check_same,
    size_of,
    split_rows,
)
from ddp_from_scratch.backend.process_group import SharedMemoryGroup, Tensors
from ddp_from_scratch.backend.reduction import ReduceOp, Reduction
from ddp_from_scratch.backend.transport import write_back
from ddp_from_scratch.backend.work import Operation, Outputs


class CollectivesGroup(SharedMemoryGroup):
    """A process group with all of torch's collectives."""

    # Reductions ----------------------------------------------------------------------------------

    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        (tensor,), root = tensors, opts.rootRank
        reduction = Reduction.of(opts.reduceOp, tensor.dtype, self.size())
        # Every rank reduces a share. Only the root's tensor may change, so the others use a copy.
        total = tensor if self.rank() == root else torch.empty_like(tensor)

        def prepare() -> str:
            if total is not tensor:
                total.copy_(tensor)
            return self._reduce.prepare(total)

        text = f"reduce({reduction.name}) of {size_of(tensor)} to {root}"
        operation = Operation(text, partial(self._reduce, total, reduction), prepare)
        return self._submit("reduce", tensors, opts, [operation], written=tensors)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> dist.Work:
        operations = [
            self._reduce_scatter(output, parts, opts.reduceOp)
            for output, parts in zip(outputs, inputs, strict=True)
        ]
        read = chain(*inputs)
        return self._submit("reduce_scatter", outputs, opts, operations, read, written=outputs)

    def _reduce_scatter(self, output: torch.Tensor, parts: Tensors, op: ReduceOp) -> Operation:
        rank, size = self.rank(), self.size()
        check_count("reduce_scatter", "input", parts, size)
        check_dtype("reduce_scatter", output, parts)
        if output.numel() != parts[rank].numel():
            raise ValueError(
                f"reduce_scatter needs an output of {parts[rank].numel()} elements on rank "
                f"{rank}, got {output.numel()}"
            )
        reduction = Reduction.of(op, output.dtype, size)
        most = max(part.nbytes for part in parts)

        def prepare() -> str:
            self._exchange.prepare(parts, most, for_each=True)
            return self._place(parts)

        def run() -> Outputs:
            dense = output.contiguous()
            if self.checked_barrier.same_place and self._place(parts):
                self._reduce_in_windows(dense.view(-1), parts, reduction)
            else:
                self._exchange.reduce(parts, dense.view(-1), most, reduction)
            return [write_back(dense, output)]

        return Operation(f"reduce_scatter({reduction.name}) of {size_of(*parts)}", run, prepare)

    def _reduce_in_windows(
        self, output: torch.Tensor, parts: Tensors, reduction: Reduction
    ) -> None:
        own = parts[self.rank()]
        if self._topology.count == 1:
            reduction.fold_into(output, self._shared.by_rank(own))
        else:
            here, across = self._reduce.split(reduction, own.dtype)
            sums = [torch.empty_like(parts[rank]) for rank in self._column]
            for rank, total in zip(self._column, sums, strict=True):
                here.fold_into(total, self._shared.by_rank(parts[rank]))
            received = [torch.empty_like(own) for _ in sums]
            self._topology.inter_node.exchange(sums, received)
            across.fold_into(output, received)
        self.checked_barrier.wait()  # no rank writes to its parts before the others have read them

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any
    ) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> dist.Work:
        parts = [input.reshape(-1).tensor_split(self.size()) for input in inputs]
        return self.reduce_scatter(outputs, parts, opts)

    # Copies --------------------------------------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        (tensor,), root = tensors, opts.rootRank
        sent = [tensor] if self.rank() == root else []

        def run() -> Outputs:
            self._exchange.broadcast(tensor, root)
            return [tensor]

        prepare = partial(self._exchange.prepare, sent, tensor.nbytes)
        operation = Operation(f"broadcast of {size_of(tensor)} from {root}", run, prepare)
        return self._submit("broadcast", tensors, opts, [operation], written=tensors)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        operations = []
        for parts, tensor in zip(outputs, inputs, strict=True):
            check_count("all_gather", "output", parts, self.size())
            check_same("all_gather", tensor, [parts[self.rank()]])
            most = max(part.nbytes for part in parts)
            text = f"all_gather of {size_of(*parts)}"
            operations.append(self._copy(text, [tensor], parts, most, parts))
        written = list(chain(*outputs))
        return self._submit("all_gather", inputs, opts, operations, inputs, written=written)

    def allgather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        # torch passes one list per rank here, not one per tensor.
        return self.allgather(list(zip(*outputs, strict=True)), inputs, opts)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        operations = [
            self._all_gather_single(output, tensor)
            for output, tensor in zip(outputs, inputs, strict=True)
        ]
        kind = "all_gather_into_tensor"
        return self._submit(kind, inputs, opts, operations, inputs, written=outputs)

    def _all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor) -> Operation:
        numel = tensor.numel() * self.size()
        if output.numel() != numel or output.dtype != tensor.dtype:
            raise ValueError(
                f"all_gather_into_tensor needs an output of {numel} elements of {tensor.dtype}, "
                f"got {output.numel()} of {output.dtype}"
            )

        def prepare() -> str:
            self._exchange.prepare([tensor], tensor.nbytes)
            return self._place([output])

        def run() -> Outputs:
            dense = output.contiguous()
            parts = dense.view(-1).tensor_split(self.size())
            if self.checked_barrier.same_place and self._place([output]):
                self._gather_in_windows(parts, tensor)
            else:
                self._exchange([tensor], parts, tensor.nbytes)
            return [write_back(dense, output)]

        text = f"all_gather_into_tensor of {size_of(output)}{caller.op_label}"
        return Operation(text, run, prepare)

    def _gather_in_windows(self, parts: Tensors, tensor: torch.Tensor) -> None:
        own = parts[self.rank()]
        if own.data_ptr() != tensor.data_ptr():
            own.copy_(tensor.view(-1))
        if self._topology.count > 1:
            received = [parts[rank] for rank in self._column]
            self._topology.inter_node.exchange([own] * len(received), received)
        self.checked_barrier.wait()
        for rank, part in enumerate(parts):
            if rank not in self._column:
                part.copy_(self._shared.by_rank(part)[self._local_ranks[rank]])
        self.checked_barrier.wait()  # no rank changes its part before the others have read it

    @cached_property
    def _local_ranks(self) -> list[int]:
        """Each rank's number among those of its machine. Collective at first."""
        if self._topology.count == 1:
            return list(range(self.size()))
        return self._topology.world.allgather(self._topology.intra_node.rank)

    @cached_property
    def _column(self) -> list[int]:
        """The ranks with this rank's number on each machine (`Topology.inter_node`)."""
        number = self._topology.intra_node.rank
        return [rank for rank, other in enumerate(self._local_ranks) if other == number]

    def _place(self, tensors: Tensors) -> str:
        """Returns where tensors lie in one window; empty if they do not or machines differ."""
        storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        equal = self._stage.owners * self._topology.count == self.size()
        whole = all(tensor.is_contiguous() for tensor in tensors)
        return self._shared.place(tensors[0]) if equal and whole and len(storages) == 1 else ""

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        (tensor,), root = inputs, opts.rootRank
        parts = outputs[0] if outputs else []
        received: Sequence[torch.Tensor | None] = [None] * self.size()
        if self.rank() == root:
            check_count("gather", "output", parts, self.size())
            check_same("gather", tensor, parts)
            received = parts
        sent = [tensor if rank == root else tensor.new_empty(0) for rank in range(self.size())]
        text = f"gather of {size_of(tensor)} to {root}"
        operation = self._copy(text, sent, received, tensor.nbytes, parts, for_each=True)
        return self._submit("gather", inputs, opts, [operation], inputs, written=parts)

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> dist.Work:
        is_root = opts.rootRank == self.rank()
        parts = [output.view(-1).tensor_split(self.size())] if is_root else []
        return self.gather(parts, [input], opts)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> dist.Work:
        (tensor,), root, size = outputs, opts.rootRank, self.size()
        parts = inputs[0] if inputs else []
        if self.rank() == root:
            check_count("scatter", "input", parts, size)
            check_same("scatter", tensor, parts)
        operation = self._copy(
            f"scatter of {size_of(tensor)} from {root}",
            parts if self.rank() == root else [],
            [tensor if rank == root else None for rank in range(size)],
            tensor.nbytes,
            outputs,
            for_each=True,
        )
        return self._submit("scatter", outputs, opts, [operation], parts, written=outputs)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        check_count("all_to_all", "output", outputs, self.size())
        check_count("all_to_all", "input", inputs, self.size())
        operation = self._all_to_all("all_to_all", outputs, inputs, outputs)
        return self._submit("all_to_all", inputs, opts, [operation], inputs, written=outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        kind = "all_to_all_single"
        received = split_rows("output", output, output_splits, self.size())
        sent = split_rows("input", input, input_splits, self.size())
        operation = self._all_to_all(kind, received, sent, [output])
        return self._submit(kind, [input], opts, [operation], [input], written=[output])

    # The names of these methods in torch before 2.14.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _copy(
        self,
        text: str,
        sent: Tensors,
        received: Sequence[torch.Tensor | None],
        most: int,
        result: Tensors,
        for_each: bool = False,
    ) -> Operation:
        def run() -> Outputs:
            self._exchange(sent, received, most, for_each)
            return list(result)

        return Operation(text, run, partial(self._exchange.prepare, sent, most, for_each))

    def _all_to_all(
        self, kind: str, received: Tensors, sent: Tensors, result: Tensors
    ) -> Operation:
        """Copies rank r's `sent[s]` to rank s's `received[r]`. Sizes may differ between pairs."""
        check_dtype(kind, received[0], sent)
        size = self.size()
        # Each pair of ranks has its own size, which a fingerprint equal on all ranks cannot hold.
        own = torch.tensor(
            [[part.numel() for part in parts] for parts in (sent, received)], device="cpu"
        )

        def run() -> Outputs:
            sizes = own.new_empty(size, 2, size)
            self._exchange([own], sizes.unbind(), own.nbytes)
            by_source, by_target = sizes.unbind(1)
            self._check_pairs(kind, by_source.T, by_target, received[0].dtype)
            most = int(by_source.max()) * received[0].itemsize
            self._exchange(sent, received, most, for_each=True, prepared=False)
            return list(result)

        prepare = partial(self._exchange.prepare, [own], own.nbytes)
        return Operation(f"{kind} of {received[0].dtype}", run, prepare)

    def _check_pairs(
        self, kind: str, sent: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype
    ) -> None:
        """Raises on all ranks where numbers, indexed by target and then by source, differ."""
        names = self._topology.world.world_ranks
        wrong = [
            f"rank {names[source]} sends {sent[target, source]} x {dtype} to rank "
            f"{names[target]}, which expects {expected[target, source]}"
            for target, source in (sent != expected).nonzero().tolist()
        ]
        if wrong:
            raise self.checked_barrier.fail(f"{kind} does not fit: {'; '.join(wrong)}")
