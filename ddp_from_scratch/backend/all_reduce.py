"""All-reduce over ranks that share memory, and across machines.

The ranks of one machine need no messages. Each rank owns a share of the elements, sums that share
over all ranks and writes the sum back to all of them.

    rank 0's elements   | a0 | b0 |  ->  | a0+a1 | b0+b1 |
    rank 1's elements   | a1 | b1 |  ->  | a0+a1 | b0+b1 |
                          ^    ^ rank 1's share
                          rank 0's share

With several machines, each rank then all-reduces its share with the owners of the same share on the
other machines. Every element crosses the network once per machine, however many ranks it has.

Sums are taken in rank order, and across machines in machine order, so all ranks get the same bits.
16-bit floats are summed in float32 and rounded once, and once more before they cross the network.
A `Crossing` replaces the second all-reduce, to compress what crosses.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from ddp_from_scratch.backend.barrier import CheckedBarrier, EagerBuffers
from ddp_from_scratch.backend.reduction import CHUNK, Reduction, share_of
from ddp_from_scratch.backend.shared_memory import Topology
from ddp_from_scratch.backend.stage import SharedTensors, Stage
from ddp_from_scratch.backend.transport import Transport, write_back

# With several machines, tensors of at least this many bytes are summed on each machine first.
STAGED_FROM = 512 * 1024

# Up to so many bytes over all ranks, each receives and sums all: the number of messages counts.
GATHERED = 64 * 1024

Receive = Callable[[int, torch.Tensor], None]

# Replaces a flat part of a tensor by its sum over the ranks of a transport, with the same bits on
# each. The number is that of the part's first element. The part lies in memory that may be changed.
Crossing = Callable[[Transport, torch.Tensor, int], None]


def crossing_in(dtype: torch.dtype) -> Crossing:
    """Returns a crossing that sends elements of a smaller dtype, and rounds their sums to it."""

    def cross(transport: Transport, part: torch.Tensor, _begin: int) -> None:
        compressed = part.to(dtype)
        _by_messages(transport, compressed, Reduction.of(dist.ReduceOp.SUM, dtype, 1))
        part.copy_(compressed)

    return cross


class AllReduce:
    """Runs all_reduce over a group: `prepare`, a meeting at the barrier, then the call itself.

    There are four algorithms; all ranks use the same one:

    - eager: each rank copies a small tensor to the barrier's eager buffer and sums all buffers.
      Across machines a tensor of some hundred bytes travels with the barrier's own message;
    - in place: a larger tensor lies in shared memory (`SharedTensors`), at the same place on all
      ranks;
    - staged: any other tensor goes through shared memory (`Stage`), a piece at a time;
    - messages: for small tensors across machines, and where no two ranks share memory.
    """

    def __init__(
        self, topology: Topology, barrier: CheckedBarrier, shared: SharedTensors, stage: Stage
    ) -> None:
        self._topology, self._barrier, self._shared, self._stage = topology, barrier, shared, stage
        # One per dtype is enough, since the operations of a group run one after another.
        self._scratches: dict[torch.dtype, torch.Tensor] = {}

    def prepare(self, tensor: torch.Tensor, crossing: Crossing | None = None) -> str:
        """Copies the tensor to where others read it after the meeting, or returns its place."""
        if buffers := self._eager(tensor, crossing):
            # The buffer of the next meeting: a slow rank may still read that of the last one.
            buffers[1 - self._barrier.parity][self._topology.world.rank].copy_(tensor)
            return ""
        place = self._shared.place(tensor)
        # Opening the stage must wait, since it is collective.
        if not place and self._stage.memory and self._is_staged(tensor):
            self._stage.prepare([tensor.contiguous().view(-1)])
        return place

    def __call__(
        self,
        tensor: torch.Tensor,
        reduction: Reduction,
        crossing: Crossing | None = None,
    ) -> list[torch.Tensor]:
        """Replaces the tensor by its reduction over all ranks, after they have met.

        A `crossing` is for sums.
        """
        if buffers := self._eager(tensor, crossing):
            total = tensor
            if tensor.dtype != reduction.dtype:
                total = self._scratch(reduction)[: tensor.numel()].view(tensor.shape)
            write_back(reduction.fold(buffers[self._barrier.parity], total), tensor)
        # `same_place` is equal on all ranks, so all of a machine take the same branch.
        elif self._barrier.same_place and self._shared.place(tensor):
            begin, shares = self._own_shares(self._shared.by_rank(tensor))
            for chunk, total in self._reduce(shares, reduction, crossing, begin):
                for part in chunk:
                    if part is not total:
                        part.copy_(total)
            self._barrier.wait()  # no rank reads before all shares are reduced
        elif self._is_staged(tensor) and self._stage.open():
            self._reduce_staged(tensor, reduction, crossing)
        else:
            dense = tensor.contiguous()
            _cross(self._topology.world, dense.view(-1), reduction, crossing, 0)
            write_back(dense, tensor)
        return [tensor]

    def to_owners(self, tensor: torch.Tensor, reduction: Reduction, receive: Receive) -> None:
        """Gives each rank of a machine its own share of the reduction only, a chunk at a time.

        The tensor lies in a window, is no 16-bit float, and may change only after the next meeting.
        `receive` gets the index of the first element and the chunk, which is then overwritten.
        """
        if not self._barrier.same_place or not self._shared.place(tensor):
            raise ValueError("the tensor must lie in the same part of a window on all ranks")
        begin, shares = self._own_shares(self._shared.by_rank(tensor))
        for _, total in self._reduce(shares, reduction, keep=True):
            receive(begin, total)
            begin += total.numel()

    def free(self) -> None:
        self._stage.free()

    def _eager(self, tensor: torch.Tensor, crossing: Crossing | None) -> EagerBuffers:
        here = self._topology.count == 1
        # One machine's ranks alone cannot use buffers with what the ranks of all machines bring.
        of_all = self._topology.count == self._barrier.machines
        usable = of_all and (here or crossing is None)
        return self._barrier.eager(tensor.shape, tensor.dtype) if usable else []

    def _is_staged(self, tensor: torch.Tensor) -> bool:
        here = self._topology.count == 1
        return self._stage.shares_memory and (here or tensor.nbytes >= STAGED_FROM)

    def _reduce_staged(
        self, tensor: torch.Tensor, reduction: Reduction, crossing: Crossing | None
    ) -> None:
        dense = tensor.contiguous()
        flat = dense.view(-1)
        last = result = flat[:0]  # of the last piece
        for place, parts in self._stage.pieces([flat], flat.numel(), flat.dtype):
            # After a barrier: all owners have written to the first rank's part.
            last.copy_(result)
            begin, shares = self._own_shares(parts)
            for chunk, total in self._reduce(shares, reduction, crossing, place.start + begin):
                if chunk[0] is not total:
                    chunk[0].copy_(total)
            last, result = flat[place], parts[0]
        self._barrier.wait()
        last.copy_(result)
        write_back(dense, tensor)

    def _own_shares(self, parts: Sequence[torch.Tensor]) -> tuple[int, list[torch.Tensor]]:
        """Returns where this rank's share begins, and all ranks' elements of it."""
        begin, end = share_of(parts[0].numel(), self._barrier.rank, self._stage.owners)
        return begin, [part[begin:end] for part in parts]

    def _reduce(
        self,
        shares: list[torch.Tensor],
        reduction: Reduction,
        crossing: Crossing | None = None,
        begin: int = 0,
        keep: bool = False,
    ) -> Iterator[tuple[Sequence[torch.Tensor], torch.Tensor]]:
        """Yields chunks of the shares with their reductions, in the first chunk unless `keep`."""
        wide = shares[0].dtype == reduction.dtype
        here, across = reduction.split(
            shares[0].dtype, self._topology.count, self._stage.shares_memory
        )
        in_place, scratch = wide and not keep, self._scratch(reduction)
        whole = shares[0] if self._topology.count == 1 or not keep else torch.empty_like(shares[0])
        chunks = list(zip(*(part.split(CHUNK) for part in (whole, *shares)), strict=True))
        for part, *chunk in chunks:
            # A fold can write to its first tensor, since it reads that one before it writes.
            total = here.fold(chunk, chunk[0] if in_place else scratch[: part.numel()])
            if self._topology.count == 1:
                yield chunk, total
            elif not in_place:
                part.copy_(total)
        if self._topology.count > 1:
            if whole.numel():  # a rank past the owners has an empty share, and so have its peers
                _cross(self._topology.inter_node, whole, across, crossing, begin)
            for part, _, *others in chunks:
                yield [part, *others], part

    def _scratch(self, reduction: Reduction) -> torch.Tensor:
        # All chunks share one scratch tensor, which stays in the processor's cache.
        if reduction.dtype not in self._scratches:
            with torch.inference_mode(False):
                self._scratches[reduction.dtype] = torch.empty(
                    CHUNK, dtype=reduction.dtype, device="cpu"
                )
        return self._scratches[reduction.dtype]


def _cross(
    transport: Transport,
    flat: torch.Tensor,
    reduction: Reduction,
    crossing: Crossing | None,
    begin: int,
) -> None:
    if crossing is None:
        _by_messages(transport, flat, reduction)
    else:
        crossing(transport, flat, begin)


def _by_messages(transport: Transport, flat: torch.Tensor, reduction: Reduction) -> None:
    """Replaces `flat` by its reduction over all ranks, with the same bits on each."""
    if transport.size == 1:
        reduction.fold([flat], flat)
    else:
        is_small = flat.nbytes * transport.size <= GATHERED
        begins = [share_of(flat.numel(), rank, transport.size) for rank in range(transport.size)]
        shares = [flat if is_small else flat[begin:end] for begin, end in begins]
        own = shares[transport.rank]
        everybodys = own.new_empty(transport.size, own.numel()).unbind()
        transport.exchange(shares, everybodys)
        reduction.fold_into(own, everybodys)
        if not is_small:
            transport.exchange([own] * transport.size, shares)
