"""Copies from rank to rank, under all collectives but all-reduce and `reduce`.

In a reduce-scatter, for instance, each rank receives its part from every rank and sums these parts.

Tensors that lie in windows are not copied: a rank reads its part in the windows of the other ranks.
With several machines of equally many ranks, every element then crosses the network once:

    machine 0   | rank 0: sums parts 0 and 2 | rank 1: sums parts 1 and 3 |
    machine 1   | rank 2: sums parts 0 and 2 | rank 3: sums parts 1 and 3 |
                   then ranks 0 and 2 exchange  then ranks 1 and 3 exchange
"""

from collections.abc import Iterable, Sequence
from functools import cached_property

import torch

from ddp_from_scratch.backend.barrier import CheckedBarrier
from ddp_from_scratch.backend.reduction import Reduction
from ddp_from_scratch.backend.shared_memory import Topology
from ddp_from_scratch.backend.stage import Piece, SharedTensors, Stage
from ddp_from_scratch.backend.transport import flat_bytes, write_back

_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class Exchange:
    """Copies tensors from rank to rank: in shared memory on one machine, otherwise by messages.

    `sent` is one tensor for all ranks; or, with `for_each`, one for each; or none. No rank sends
    more than `most` bytes to another. `for_each` and `most` are equal on all ranks.
    """

    def __init__(
        self, topology: Topology, barrier: CheckedBarrier, shared: SharedTensors, stage: Stage
    ) -> None:
        self._topology, self._barrier, self._shared, self._stage = topology, barrier, shared, stage
        self._rank, self._size = topology.world.rank, topology.world.size

    def place(self, tensors: Sequence[torch.Tensor]) -> str:
        """Returns where tensors lie in one window; empty if they do not or machines differ."""
        storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        equal = self._stage.owners * self._topology.count == self._size
        whole = all(tensor.is_contiguous() for tensor in tensors)
        return self._shared.place(tensors[0]) if equal and whole and len(storages) == 1 else ""

    def prepare(
        self, sent: Sequence[torch.Tensor], most: int, for_each: bool = False, place: str = ""
    ) -> str:
        """Copies tensors, or their first piece, to where others read them after the meeting.

        Large ones stay where they are if they lie in a window, at the given place. Returns it.
        """
        lanes = self._size if for_each else 1
        if buffers := self._barrier.eager(torch.Size((lanes, most)), torch.uint8):
            own = buffers[1 - self._barrier.parity][self._rank]
            for lane, tensor in zip(own, sent, strict=False):
                lane[: tensor.nbytes].copy_(flat_bytes(tensor.contiguous()))
        # Opening the stage must wait, since it is collective.
        elif not place and self._stage.memory and self._topology.count == 1:
            self._stage.prepare([flat_bytes(tensor.contiguous()) for tensor in sent], lanes)
        return place

    def __call__(
        self,
        sent: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor | None],
        most: int,
        for_each: bool = False,
        *,
        prepared: bool = True,
    ) -> None:
        """Sends this rank's tensors and receives others' by source, after the ranks have met.

        `received` has None for nothing. `prepared` is False if `prepare` was not called for it.
        """
        wanted = {rank: tensor for rank, tensor in enumerate(received) if tensor is not None}
        dense = {rank: tensor.contiguous() for rank, tensor in wanted.items()}
        into = {rank: flat_bytes(tensor) for rank, tensor in dense.items()}
        flat = [flat_bytes(tensor.contiguous()) for tensor in sent]
        if flat and self._rank in into:  # not through shared memory
            lane = self._rank if for_each else 0
            into.pop(self._rank).copy_(flat[lane])
            if for_each:
                flat[lane] = _NOTHING
        pieces = self._pieces(flat, most, for_each, prepared)
        if pieces is None:
            self._send(flat, into)
        else:
            for place, parts in pieces:
                for rank, tensor in into.items():
                    piece = tensor[place]
                    piece.copy_(parts[rank][: piece.numel()])
        for rank, tensor in wanted.items():
            write_back(dense[rank], tensor)

    def reduce(
        self, sent: Sequence[torch.Tensor], result: torch.Tensor, most: int, reduction: Reduction
    ) -> None:
        """Reduces what every rank sends to this one, one tensor for each, into a flat tensor."""
        if self._barrier.same_place and self.place(sent):
            self._reduce_in_windows(result, sent, reduction)
            return
        flat = [flat_bytes(tensor.contiguous()) for tensor in sent]
        pieces = self._pieces(flat, most, for_each=True, prepared=True)
        if pieces is None:
            everybodys = result.new_empty(self._size, result.numel()).unbind()
            self._send(flat, dict(enumerate(map(flat_bytes, everybodys))))
            reduction.fold_into(result, everybodys)
            return
        for place, parts in pieces:  # needs no memory for all ranks' tensors
            piece = flat_bytes(result)[place]
            terms = [part[: piece.numel()].view(result.dtype) for part in parts]
            reduction.fold_into(piece.view(result.dtype), terms)

    def all_gather(self, tensor: torch.Tensor, output: torch.Tensor) -> None:
        """Gives every rank the tensors of all in one flat tensor, in rank order."""
        parts = output.tensor_split(self._size)
        if self._barrier.same_place and self.place([output]):
            self._gather_in_windows(parts, tensor)
        else:
            self([tensor], parts, tensor.nbytes)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        own = self._rank
        is_small = self._barrier.eager(torch.Size((1, tensor.nbytes)), torch.uint8)
        if self._topology.count == 1 or is_small:
            received = [tensor if rank == root != own else None for rank in range(self._size)]
            self([tensor] if own == root else [], received, tensor.nbytes)
            return
        # The root sends each rank a part, which that rank sends to all. This spreads the load.
        dense = tensor.contiguous()
        parts = flat_bytes(dense).tensor_split(self._size)
        nothing = [_NOTHING] * self._size
        from_root = [parts[own] if rank == root else _NOTHING for rank in range(self._size)]
        self._topology.world.exchange(parts if own == root else nothing, from_root)
        self._topology.world.exchange([parts[own]] * self._size, parts)
        write_back(dense, tensor)

    def _pieces(
        self, sent: Sequence[torch.Tensor], most: int, for_each: bool, prepared: bool
    ) -> Iterable[Piece] | None:
        """Returns all pieces of what ranks send to this one, in bytes; None: by messages."""
        lanes = self._size if for_each else 1
        buffers = self._barrier.eager(torch.Size((lanes, most)), torch.uint8)
        if prepared and buffers:
            lane = self._rank if for_each else 0
            parts = [buffer[lane] for buffer in buffers[self._barrier.parity]]
            return [(slice(0, most), parts)] if most else []  # empty lanes are not aligned
        if self._topology.count > 1 or not self._stage.open():
            return None
        return self._stage.pieces(sent, most, torch.uint8, lanes)

    def _send(self, flat: Sequence[torch.Tensor], into: dict[int, torch.Tensor]) -> None:
        sent = [*flat] * self._size if len(flat) == 1 else flat or [_NOTHING] * self._size
        self._topology.world.exchange(sent, [into.get(r, _NOTHING) for r in range(self._size)])

    def _reduce_in_windows(
        self, output: torch.Tensor, parts: Sequence[torch.Tensor], reduction: Reduction
    ) -> None:
        own = parts[self._rank]
        if self._topology.count == 1:
            reduction.fold_into(output, self._shared.by_rank(own))
        else:
            count, shares_memory = self._topology.count, self._stage.shares_memory
            here, across = reduction.split(own.dtype, count, shares_memory)
            sums = [torch.empty_like(parts[rank]) for rank in self._column]
            for rank, total in zip(self._column, sums, strict=True):
                here.fold_into(total, self._shared.by_rank(parts[rank]))
            received = [torch.empty_like(own) for _ in sums]
            self._topology.inter_node.exchange(sums, received)
            across.fold_into(output, received)
        self._barrier.wait()  # no rank writes to its parts before the others have read them

    def _gather_in_windows(self, parts: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        own = parts[self._rank]
        if own.data_ptr() != tensor.data_ptr():
            own.copy_(tensor.view(-1))
        if self._topology.count > 1:
            received = [parts[rank] for rank in self._column]
            self._topology.inter_node.exchange([own] * len(received), received)
        self._barrier.wait()
        for rank, part in enumerate(parts):
            if rank not in self._column:
                part.copy_(self._shared.by_rank(part)[self._local_ranks[rank]])
        self._barrier.wait()  # no rank changes its part before the others have read it

    @cached_property
    def _local_ranks(self) -> list[int]:
        """Each rank's number among those of its machine. Collective at first."""
        if self._topology.count == 1:
            return list(range(self._size))
        return self._topology.world.allgather(self._topology.intra_node.rank)

    @cached_property
    def _column(self) -> list[int]:
        """The ranks with this rank's number on each machine (`Topology.inter_node`)."""
        number = self._topology.intra_node.rank
        return [rank for rank, other in enumerate(self._local_ranks) if other == number]
