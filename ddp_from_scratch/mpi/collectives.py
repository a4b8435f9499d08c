"""torch.distributed's collectives as calls on an MPI communicator.

Each method checks its arguments where the caller can see the error, and returns an operation, to be
run when the other ranks have come: it makes tensors dense, calls MPI, and puts the result where
torch wants it. The tensors live as long as the operation does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from typing import TypeAlias

import torch

from ddp_from_scratch.mpi.arguments import (
    check_count,
    check_dtype,
    check_memory,
    check_same,
    check_share,
    elements,
    size_of,
    sizes_of,
    split_sizes,
)
from ddp_from_scratch.mpi.datatypes import COUNTABLE, pieces, raw, values
from ddp_from_scratch.mpi.runtime import MPI
from ddp_from_scratch.mpi.worker import Result
from ddp_from_scratch.node.all_reduce import AllReduce
from ddp_from_scratch.node.barrier import Meeting, Nodes
from ddp_from_scratch.node.reduction import ReduceOp, Reduction
from ddp_from_scratch.node.windows import Windows

Message: TypeAlias = tuple[int, torch.Tensor]  # a rank of the group, and what goes there or comes

# Beyond the tags that programs use for messages of their own on the same communicator.
_TAG = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 0) - 1

# Pairs of ranks that an error names.
_TOLD = 5


@dataclass(slots=True)
class Operation:
    """This rank's part of a collective.

    Attributes:
        purpose: what the ranks meet for; the same on all of them.
        run: what it does once all have come.
        prepare: what it does before, right when it is its turn; returns a detail of the call in
            which the ranks may differ (`Meeting.same_place` says whether they do).
    """

    purpose: str
    run: Callable[[], Result]
    prepare: Callable[[], str] = str


class Collectives:
    """The collectives of one group.

    Args:
        nodes: the group's ranks by machine.
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes, self.communicator = nodes, nodes.communicator
        self.rank, self.size = self.communicator.rank, self.communicator.size
        self.meeting = Meeting(nodes)
        self.windows = Windows(nodes.node)
        self._all_reduce = AllReduce(nodes, self.meeting, self.windows)
        # Finding both takes as long as summing a small tensor: those last used are kept.
        self._reduction = lru_cache(maxsize=256)(self._make_reduction)

    def free(self) -> None:
        """Gives all memory and communicators back. Collective."""
        self._all_reduce.free()
        self.windows.free_unused()
        self.meeting.free()
        self._nodes.free()

    def empty(self, numel: int, dtype: torch.dtype) -> Operation:
        check_memory("mpi.empty")

        def run() -> Result:
            return [self.windows.empty(numel, dtype)]

        return Operation(f"mpi.empty({numel}, {dtype})", run)

    def empty_for_all(self, numel: int, dtype: torch.dtype) -> Operation:
        check_memory("mpi.empty_for_all")

        def run() -> Result:
            return [self.windows.empty_for_all(numel, dtype)]

        return Operation(f"mpi.empty_for_all({numel}, {dtype})", run)

    def free_unused(self) -> Operation:
        def run() -> Result:
            self.windows.free_unused()
            return []

        return Operation("free_unused", run)

    def reduce_to_owners(
        self,
        tensor: torch.Tensor,
        op: ReduceOp,
        receive: Callable[[int, torch.Tensor], None],
        label: str,
    ) -> Operation:
        check_memory("reduce_to_owners", tensor)
        reduction = Reduction.of(op, tensor.dtype, self.size)

        def run() -> Result:
            self._all_reduce.to_owners(tensor, reduction, receive)
            return []

        return Operation(
            f"reduce_to_owners({reduction.name}) of {size_of(tensor)} {label}",
            run,
            partial(self.windows.place, tensor),
        )

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Operation:
        check_memory("all_reduce", tensor)
        purpose, reduction = self._reduction(tensor.numel(), tensor.dtype, op)
        return Operation(
            purpose,
            partial(self._all_reduce, tensor, reduction),
            partial(self._all_reduce.prepare, tensor),
        )

    def _make_reduction(
        self, numel: int, dtype: torch.dtype, op: ReduceOp
    ) -> tuple[str, Reduction]:
        reduction = Reduction.of(op, dtype, self.size)
        return f"all_reduce({reduction.name}) of {elements(numel, dtype)}", reduction

    def reduce(self, tensor: torch.Tensor, op: ReduceOp, root: int) -> Operation:
        check_memory("reduce", tensor)
        reduction = Reduction.of(op, tensor.dtype, self.size)

        def run() -> Result:
            dense = tensor.to(reduction.dtype).contiguous()
            self._reduce(dense, reduction, root)
            if self.rank == root:
                reduction.divide(dense)
                if dense is not tensor:
                    tensor.copy_(dense)
            return [tensor]

        return Operation(f"reduce({reduction.name}) of {size_of(tensor)} to {root}", run)

    def reduce_scatter(
        self, output: torch.Tensor, parts: Sequence[torch.Tensor], op: ReduceOp
    ) -> Operation:
        """Rank r gets the reduction of everybody's `parts[r]`; parts may differ in size."""
        check_memory("reduce_scatter", output, *parts)
        check_count("reduce_scatter", "input", parts, self.size)
        check_dtype("reduce_scatter", output, parts)
        if output.numel() != parts[self.rank].numel():
            raise ValueError(
                f"reduce_scatter needs an output of {parts[self.rank].numel()} elements on rank "
                f"{self.rank}, got {output.numel()}"
            )
        reduction = Reduction.of(op, output.dtype, self.size)

        def run() -> Result:
            joined = _join(parts, reduction.dtype)
            counts = [part.numel() for part in parts]
            own = torch.empty(output.numel(), dtype=reduction.dtype)
            if joined.nbytes < COUNTABLE:
                self.communicator.Reduce_scatter(values(joined), values(own), counts, reduction.op)
            else:
                for root, part in enumerate(joined.split(counts)):
                    self._reduce(part, reduction, root)
                own = joined.split(counts)[self.rank]
            reduction.divide(own)
            output.copy_(own.view(output.shape))
            return [output]

        return Operation(f"reduce_scatter({reduction.name}) of {sizes_of(parts)}", run)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Operation:
        check_memory("broadcast", tensor)

        def run() -> Result:
            dense = tensor.contiguous()
            self._broadcast(dense, root)
            if dense is not tensor:
                tensor.copy_(dense)
            return [tensor]

        return Operation(f"broadcast of {size_of(tensor)} from {root}", run)

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Operation:
        """`outputs[r]` becomes rank r's tensor; tensors may differ in size over ranks."""
        check_memory("all_gather", tensor, *outputs)
        check_count("all_gather", "output", outputs, self.size)
        check_same("all_gather", tensor, [outputs[self.rank]])

        def run() -> Result:
            gathered = _room_for(outputs)
            self._gather_all(gathered, [output.numel() for output in outputs], tensor)
            _part(gathered, outputs)
            return list(outputs)

        return Operation(f"all_gather of {sizes_of(outputs)}", run)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor) -> Operation:
        check_memory("all_gather_into_tensor", tensor, output)
        check_share("all_gather_into_tensor", "output", output, tensor, self.size)

        def run() -> Result:
            dense = output.contiguous()
            self._gather_all(dense.view(-1), [tensor.numel()] * self.size, tensor)
            if dense is not output:
                output.copy_(dense)
            return [output]

        return Operation(f"all_gather_into_tensor of {size_of(output)}", run)

    def gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> Operation:
        check_memory("gather", tensor, *outputs)
        if self.rank == root:
            check_count("gather", "output", outputs, self.size)
            check_same("gather", tensor, outputs)

        def run() -> Result:
            dense = tensor.contiguous()
            gathered = _room_for(outputs) if self.rank == root else None
            if self.size * dense.nbytes < COUNTABLE:
                room = None if gathered is None else raw(gathered)
                self.communicator.Gather(raw(dense), room, root)
            else:
                parts = [] if gathered is None else gathered.chunk(self.size)
                self._send_and_receive([(root, dense)], list(enumerate(parts)))
            if gathered is not None:
                _part(gathered, outputs)
            return list(outputs)

        return Operation(f"gather of {size_of(tensor)} to {root}", run)

    def scatter(self, tensor: torch.Tensor, parts: Sequence[torch.Tensor], root: int) -> Operation:
        check_memory("scatter", tensor, *parts)
        if self.rank == root:
            check_count("scatter", "input", parts, self.size)
            check_same("scatter", tensor, parts)

        def run() -> Result:
            dense = tensor.contiguous()
            if self.size * dense.nbytes < COUNTABLE:
                sent = raw(_join(parts, tensor.dtype)) if self.rank == root else None
                self.communicator.Scatter(sent, raw(dense), root)
            else:
                sends = list(enumerate(parts)) if self.rank == root else []
                self._send_and_receive(sends, [(root, dense)])
            if dense is not tensor:
                tensor.copy_(dense)
            return [tensor]

        return Operation(f"scatter of {size_of(tensor)} from {root}", run)

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Operation:
        """Rank r's `inputs[s]` becomes rank s's `outputs[r]`; they may differ in size."""
        check_memory("all_to_all", *inputs, *outputs)
        check_count("all_to_all", "output", outputs, self.size)
        check_count("all_to_all", "input", inputs, self.size)

        check_dtype("all_to_all", outputs[0], inputs)
        expected, sizes = [o.numel() for o in outputs], [i.numel() for i in inputs]

        def run() -> Result:
            self._check_pairs("all_to_all", expected, sizes, outputs[0].dtype)
            sent, received = _join(inputs, inputs[0].dtype), _room_for(outputs)
            self._exchange(received, expected, sent, sizes)
            _part(received, outputs)
            return list(outputs)

        return Operation(f"all_to_all of {outputs[0].dtype}", run)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> Operation:
        """The same with one tensor, split along its first dimension; no splits: evenly."""
        check_memory("all_to_all_single", tensor, output)
        check_dtype("all_to_all_single", output, [tensor])
        received = split_sizes("output", output, output_splits, self.size)
        sent = split_sizes("input", tensor, input_splits, self.size)

        def run() -> Result:
            self._check_pairs("all_to_all_single", received, sent, output.dtype)
            dense = output.contiguous()
            self._exchange(dense.view(-1), received, tensor.contiguous().view(-1), sent)
            if dense is not output:
                output.copy_(dense)
            return [output]

        return Operation(f"all_to_all_single of {output.dtype}", run)

    def barrier(self) -> Operation:
        return Operation("barrier", list)  # they have met, which is all

    # What MPI counts in 32 bits, it gets in pieces.

    def _reduce(self, flat: torch.Tensor, reduction: Reduction, root: int) -> None:
        for piece in pieces(flat.view(-1)):
            if self.rank == root:
                self.communicator.Reduce(MPI.IN_PLACE, values(piece), reduction.op, root)
            else:
                self.communicator.Reduce(values(piece), None, reduction.op, root)

    def _broadcast(self, dense: torch.Tensor, root: int) -> None:
        for piece in pieces(dense.view(-1)):
            self.communicator.Bcast(raw(piece), root)

    def _gather_all(self, gathered: torch.Tensor, sizes: list[int], tensor: torch.Tensor) -> None:
        dense, parts = tensor.contiguous().view(-1), gathered.split(sizes)
        if gathered.nbytes < COUNTABLE:
            counts = [part.nbytes for part in parts]
            self.communicator.Allgatherv(raw(dense), [raw(gathered)[0], counts, MPI.BYTE])
        else:
            parts[self.rank].copy_(dense)
            for root, part in enumerate(parts):
                self._broadcast(part, root)

    def _check_pairs(
        self, kind: str, expected: Sequence[int], sent: Sequence[int], dtype: torch.dtype
    ) -> None:
        """Raises on all ranks if one expects another number of elements than is sent to it.

        Only the two of them know their sizes, so that the meeting could not compare them.
        """
        coming = torch.empty(self.size, dtype=torch.int64)
        self.communicator.Alltoall(raw(torch.tensor(sent)), raw(coming))
        wrong = [
            (source, self.rank, size, wanted)
            for source, (size, wanted) in enumerate(zip(coming.tolist(), expected, strict=True))
            if size != wanted
        ]
        if not self.communicator.allreduce(len(wrong)):
            return
        ours, world = self.communicator.Get_group(), MPI.COMM_WORLD.Get_group()
        ranks = ours.Translate_ranks(group=world)
        told = [
            f"rank {ranks[source]} sends {elements(size, dtype)} to rank {ranks[target]}, which "
            f"expects {wanted}"
            for source, target, size, wanted in chain(*self.communicator.allgather(wrong))
        ]
        if len(told) > _TOLD:
            told[_TOLD:] = [f"and {len(told) - _TOLD} more"]
        raise self.meeting.fail(f"{kind} does not fit: {'; '.join(told)}")

    def _exchange(
        self,
        received: torch.Tensor,
        received_sizes: list[int],
        sent: torch.Tensor,
        sent_sizes: list[int],
    ) -> None:
        sends = list(enumerate(sent.split(sent_sizes)))
        receives = list(enumerate(received.split(received_sizes)))
        self._send_and_receive(sends, receives)

    def _send_and_receive(self, sends: list[Message], receives: list[Message]) -> None:
        """Dense tensors to and from ranks of the group, at once; also from a rank to itself."""
        requests = [
            self.communicator.Irecv(raw(piece), rank, _TAG)
            for rank, tensor in receives
            for piece in pieces(tensor.view(-1))
        ]
        requests += [
            self.communicator.Isend(raw(piece), rank, _TAG)
            for rank, tensor in sends
            for piece in pieces(tensor.contiguous().view(-1))
        ]
        MPI.Request.Waitall(requests)


def _join(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([part.reshape(-1).to(dtype) for part in parts])


def _room_for(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.empty(sum(part.numel() for part in parts), dtype=parts[0].dtype)


def _part(joined: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    sizes = [part.numel() for part in parts]
    for part, values_of_it in zip(parts, joined.split(sizes), strict=True):
        part.copy_(values_of_it.view(part.shape))
