"""All-reduce among ranks that share memory, and across machines in shares.

A machine's ranks need no messages: each sums its share of everybody's elements and writes the sum
back to everybody.

    rank 0's elements   | a0 | b0 |  ->  | a0+a1 | b0+b1 |
    rank 1's elements   | a1 | b1 |  ->  | a0+a1 | b0+b1 |
                          ^    ^ rank 1's share
                          rank 0's share

Several machines: each rank's share, summed on its machine, is all-reduced with the ranks that have
the same share on the other machines. So every element crosses the network once for each machine,
however many ranks it has.

A share's owner takes the sum in the order of ranks, and across machines in that of machines, so all
ranks have the same bits. 16-bit floats are summed in float32 and rounded once. Only where a
machine's sum goes to other machines it is rounded before, too, since it crosses in 16 bits.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import torch

from ddp_from_scratch.backend.barrier import CheckedBarrier
from ddp_from_scratch.backend.reduction import CHUNK, Reduction, share_of
from ddp_from_scratch.backend.shared_memory import LASTING, Nodes
from ddp_from_scratch.backend.stage import Stage, Windows
from ddp_from_scratch.backend.transport import Transport

# Bytes from which on tensors of several machines are summed by each machine before they cross.
STAGED_FROM = 512 * 1024

# Bytes of all ranks up to which each rank gets all messages and sums them by itself: with so few it
# is the number of messages that takes time.
GATHERED = 64 * 1024

Receive = Callable[[int, torch.Tensor], None]


class AllReduce:
    """all_reduce over a group: `prepare`, then a meeting at the barrier, then the call itself.

    Four ways, the same on all ranks:

    - eager: a small tensor is copied to the barrier's eager buffer, and each rank sums them all;
    - in place: a larger one in shared memory (`Windows`), at the same place on all ranks;
    - staged: any other goes through shared memory (`Stage`), a piece at a time;
    - by messages: where no two ranks share memory, and small tensors of several machines.
    """

    def __init__(
        self, nodes: Nodes, barrier: CheckedBarrier, windows: Windows, stage: Stage
    ) -> None:
        self._nodes, self._barrier, self._windows, self._stage = nodes, barrier, windows, stage
        # Making a view takes as long as summing a small tensor: those last used are kept.
        self._eager = lru_cache(maxsize=256)(self._make_eager)
        # One for each dtype is enough: operations of a group run one after another.
        self._scratches: dict[torch.dtype, torch.Tensor] = {}

    def prepare(self, tensor: torch.Tensor) -> str:
        """Copies the tensor where others will read it, before they meet; or returns its place."""
        if buffers := self._eager(tensor.shape, tensor.dtype):
            # The coming meeting's parity, not the last one's: a slow rank may still read those.
            buffers[1 - self._barrier.parity][self._barrier.rank].copy_(tensor)
            return ""
        place = self._windows.place(tensor)
        # Early, so that the first piece needs no barrier of its own. A stage that does not exist
        # yet cannot be made here: making it is collective, and the ranks have not met.
        if not place and self._stage.is_open and self._is_staged(tensor):
            self._stage.fill(tensor)
        return place

    def __call__(
        self, tensor: torch.Tensor, reduction: Reduction, crossing: torch.dtype | None = None
    ) -> list[torch.Tensor]:
        """Replaces `tensor` by the reduction of everybody's, after they have met for it.

        Args:
            tensor: dense, on a CPU.
            reduction: of its dtype.
            crossing: the dtype in which a sum goes from machine to machine; None means its own.
        """
        if buffers := self._eager(tensor.shape, tensor.dtype):
            self._reduce_eager(tensor, reduction, buffers[self._barrier.parity])
        # All ranks of a machine take the same branch: `same_place` is the same on all of them.
        elif self._barrier.same_place and self._windows.place(tensor):
            for chunk, total in self._reduce(self._own_shares(tensor), reduction, crossing):
                for part in chunk:
                    if part is not total:
                        part.copy_(total)
            self._barrier.wait()  # no rank reads before all shares are reduced
        elif self._is_staged(tensor) and self._stage.open():
            self._reduce_staged(tensor, reduction, crossing)
        else:
            dense = tensor.contiguous()
            _by_messages(self._nodes.everyone, dense.view(-1), reduction, crossing)
            if dense is not tensor:
                tensor.copy_(dense)
        return [tensor]

    def to_owners(self, tensor: torch.Tensor, reduction: Reduction, receive: Receive) -> None:
        """Gives each rank of a machine its share of the reduction, and none the rest.

        Args:
            tensor: in a window, at the same place on all ranks, or a ValueError is raised; stays as
                it is, and must until all ranks have met again.
            reduction: of its dtype, which is no 16-bit float.
            receive: called with the index in `tensor` of a chunk's first element, and the chunk:
                flat, overwritten after the call.
        """
        if not self._barrier.same_place or not self._windows.place(tensor):
            raise ValueError("the tensor must lie in the same part of a window on all ranks")
        shares = self._own_shares(tensor)
        begin, _ = share_of(tensor.numel(), self._barrier.rank, self._stage.owners)
        for _, total in self._reduce(shares, reduction, keep=True):
            receive(begin, total)
            begin += total.numel()

    def free(self) -> None:
        self._eager.cache_clear()
        self._stage.free()

    # Choosing the way ----------------------------------------------------------------------------

    @LASTING
    def _make_eager(self, shape: torch.Size, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        """By parity, each rank's buffer for a small tensor; none for a larger one."""
        nbytes = shape.numel() * dtype.itemsize
        # Eager buffers reach no other machine.
        if self._nodes.count > 1 or nbytes > self._barrier.eager_nbytes:
            return []
        return [
            [pair[parity][:nbytes].view(dtype).view(shape) for pair in self._barrier.eager]
            for parity in range(2)
        ]

    def _is_staged(self, tensor: torch.Tensor) -> bool:
        here = self._nodes.count == 1
        return self._stage.shares_memory and (here or tensor.nbytes >= STAGED_FROM)

    # The ways ------------------------------------------------------------------------------------

    def _reduce_eager(
        self, tensor: torch.Tensor, reduction: Reduction, buffers: list[torch.Tensor]
    ) -> None:
        if tensor.dtype == reduction.dtype:
            reduction.fold(buffers, tensor)
        else:
            scratch = self._scratch(reduction)[: tensor.numel()].view(tensor.shape)
            tensor.copy_(reduction.fold(buffers, scratch))

    def _reduce_staged(
        self, tensor: torch.Tensor, reduction: Reduction, crossing: torch.dtype | None
    ) -> None:
        # Not by `prepare` where the stage is new, or where tensors lay in windows on some ranks.
        if not self._stage.is_filled or not self._barrier.same_place:
            self._stage.fill(tensor)
            self._barrier.wait()
        for shares in self._stage.shares():
            for chunk, total in self._reduce(shares, reduction, crossing):
                if chunk[0] is not total:
                    chunk[0].copy_(total)
        reduced = self._stage.take()
        if reduced is not tensor:
            tensor.copy_(reduced)

    def _own_shares(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        begin, end = share_of(tensor.numel(), self._barrier.rank, self._stage.owners)
        return [part[begin:end] for part in self._windows.by_rank(tensor)]

    def _reduce(
        self,
        shares: list[torch.Tensor],
        reduction: Reduction,
        crossing: torch.dtype | None = None,
        keep: bool = False,
    ) -> Iterator[tuple[Sequence[torch.Tensor], torch.Tensor]]:
        """Yields chunks of the shares, and of each the reduction over all machines.

        `keep` leaves the shares as they are; else a reduction may lie in the first share's chunk.
        """
        wide = shares[0].dtype == reduction.dtype
        here, across = self._divided(reduction, wide)
        in_place, scratch = wide and not keep, self._scratch(reduction)
        whole = shares[0] if self._nodes.count == 1 or not keep else torch.empty_like(shares[0])
        chunks = list(zip(*(part.split(CHUNK) for part in (whole, *shares)), strict=True))
        for part, *chunk in chunks:
            # In place: a fold reads its first tensor before it writes there.
            total = here.fold(chunk, chunk[0] if in_place else scratch[: part.numel()])
            if self._nodes.count == 1:
                yield chunk, total
            elif not in_place:
                part.copy_(total)
        if self._nodes.count > 1:
            # A rank past the owners has empty shares, and peers that do not call this either.
            if whole.numel():
                _by_messages(self._nodes.peers, whole, across, crossing)
            for part, _, *others in chunks:
                yield [part, *others], part

    def _divided(self, reduction: Reduction, wide: bool) -> tuple[Reduction, Reduction]:
        """The reductions on this machine and across machines: one of them divides an average.

        The first, where that is exact, and where a machine's sum is rounded to 16 bits, in which it
        could overflow. Else the second: then a machine of one rank rounds nothing.
        """
        first = reduction.divides_first if wide else self._stage.shares_memory
        if first or self._nodes.count == 1:
            return reduction, reduction.undivided
        return reduction.undivided, reduction

    def _scratch(self, reduction: Reduction) -> torch.Tensor:
        # One for all chunks: it stays in the cache from one to the next.
        if reduction.dtype not in self._scratches:
            with torch.inference_mode(False):
                self._scratches[reduction.dtype] = torch.empty(CHUNK, dtype=reduction.dtype)
        return self._scratches[reduction.dtype]


def _by_messages(
    transport: Transport,
    flat: torch.Tensor,
    reduction: Reduction,
    crossing: torch.dtype | None,
) -> None:
    """Replaces `flat` by the reduction of all ranks', with the same bits on all of them."""
    if crossing is not None and crossing.itemsize < flat.itemsize:  # of sums alone
        compressed = flat.to(crossing)
        _by_messages(transport, compressed, Reduction.of(reduction.op, crossing, 1), None)
        flat.copy_(compressed)
    elif transport.size == 1:
        reduction.fold([flat], flat)
    elif flat.nbytes * transport.size <= GATHERED:
        everybodys = flat.new_empty(transport.size, flat.numel()).unbind()
        transport.exchange([flat] * transport.size, everybodys)
        reduction.fold_into(flat, everybodys)
    else:
        begins = [share_of(flat.numel(), rank, transport.size) for rank in range(transport.size)]
        shares = [flat[begin:end] for begin, end in begins]
        own = shares[transport.rank]
        everybodys = own.new_empty(transport.size, own.numel()).unbind()
        transport.exchange(shares, everybodys)
        reduction.fold_into(own, everybodys)
        transport.exchange([own] * transport.size, shares)
