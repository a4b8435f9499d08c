"""all_reduce among ranks that share memory, and across machines in shares.

A machine's ranks need no messages: each sums its share of everybody's elements and writes the sum
back to everybody.

    rank 0's elements   | a0 | b0 |  ->  | a0+a1 | b0+b1 |
    rank 1's elements   | a1 | b1 |  ->  | a0+a1 | b0+b1 |
                          ^    ^ rank 1's share
                          rank 0's share

Several machines: each rank's share, summed on its machine, is all-reduced with the ranks that have
the same share on the other machines. So every element crosses the network once for each machine,
however many ranks it has.

In shared memory the sum is taken in the order of ranks by whoever owns the share, so all ranks have
the same bits.

16-bit floats are summed in float32 and rounded once. Only where a machine's sum goes to other
machines it is rounded before, too, since it crosses in 16 bits.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache

import torch

from ddp_from_scratch.errors import NoSharedMemory
from ddp_from_scratch.mpi.inter_node import Across
from ddp_from_scratch.mpi.runtime import MPI
from ddp_from_scratch.node.barrier import Meeting, Nodes
from ddp_from_scratch.node.reduction import CHUNK, Reduction
from ddp_from_scratch.node.staging import PIECE, PIECE_ACROSS, Stage, share_of
from ddp_from_scratch.node.windows import Windows

# Bytes from which on tensors of several machines are summed by each machine before they cross.
STAGED_FROM = 512 * 1024


class AllReduce:
    """all_reduce over a group.

    Four ways, the same on all ranks:

    - at the meeting: a small tensor is brought along, and each rank sums them all by itself;
    - in place: a larger one in shared memory (`Windows`), at the same place on all ranks;
    - staged: any other goes through shared memory (`Stage`), a piece at a time;
    - by MPI: where no two ranks share memory, and small tensors of several machines.

    Args:
        nodes: the group's ranks by machine.
        meeting: where they meet.
        windows: the tensors in shared memory.
    """

    def __init__(self, nodes: Nodes, meeting: Meeting, windows: Windows) -> None:
        self._nodes, self._meeting, self._windows = nodes, meeting, windows
        self._stage: Stage | None = None
        # Making a view takes as long as summing a small tensor: those last used are kept.
        self._bags = lru_cache(maxsize=256)(self._make_bags)
        self._sums: dict[torch.dtype, torch.Tensor] = {}
        # As many shares as the smallest machine has ranks: each share has an owner everywhere.
        self._owners = nodes.communicator.allreduce(nodes.node.size, MPI.MIN)
        owns = nodes.node.rank < self._owners
        self._across = Across(nodes.communicator.Split(nodes.node.rank if owns else MPI.UNDEFINED))
        self._among_all = Across(nodes.communicator)
        most = nodes.communicator.allreduce(nodes.node.size, MPI.MAX)
        self._shares_memory = most > 1

    def prepare(self, tensor: torch.Tensor) -> str:
        """Before the ranks meet: brings the tensor along; says where one lies that can stay."""
        if bags := self._bags(tensor.shape, tensor.dtype):
            bags[1 - self._meeting.parity][self._meeting.rank].copy_(tensor)
            return ""
        place = self._windows.place(tensor)
        if not place and self._stage is not None and self._goes_by_stage(tensor):
            self._stage.bring(tensor)
        return place

    def __call__(self, tensor: torch.Tensor, reduction: Reduction) -> list[torch.Tensor]:
        """Replaces `tensor` by the reduction of everybody's, when they have met for it."""
        if bags := self._bags(tensor.shape, tensor.dtype):
            brought = bags[self._meeting.parity]
            if tensor.dtype == reduction.dtype:
                reduction.fold(brought, tensor)
            else:
                room = self._sum(reduction)[: tensor.numel()].view(tensor.shape)
                tensor.copy_(reduction.fold(brought, room))
        elif self._meeting.same_place and self._windows.place(tensor):
            self._in_place(tensor, reduction)
        elif self._goes_by_stage(tensor) and (stage := self._get_stage()):
            self._staged(tensor, reduction, stage)
        else:
            dense = tensor.contiguous()
            self._among_all(dense.view(-1), reduction)
            if dense is not tensor:
                tensor.copy_(dense)
        return [tensor]

    def _make_bags(self, shape: torch.Size, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        """Each rank's room for a small tensor, at even and at odd meetings; none for a larger."""
        nbytes = shape.numel() * dtype.itemsize
        if self._nodes.count > 1 or nbytes > self._meeting.luggage_nbytes:
            return []
        return [
            [pair[parity][:nbytes].view(dtype).view(shape) for pair in self._meeting.luggage]
            for parity in range(2)
        ]

    def _sum(self, reduction: Reduction) -> torch.Tensor:
        """Room for a chunk, which stays in the cache from one chunk to the next."""
        if reduction.dtype not in self._sums:
            self._sums[reduction.dtype] = torch.empty(CHUNK, dtype=reduction.dtype)
        return self._sums[reduction.dtype]

    def _goes_by_stage(self, tensor: torch.Tensor) -> bool:
        here = self._nodes.count == 1
        return self._shares_memory and (here or tensor.nbytes >= STAGED_FROM)

    def free(self) -> None:
        """Gives memory and communicators back. Collective."""
        self._bags.cache_clear()
        if self._stage is not None:
            self._stage.free()
        self._across.free()

    def _staged(self, tensor: torch.Tensor, reduction: Reduction, stage: Stage) -> None:
        if not stage.brought or not self._meeting.same_place:
            # What `prepare` could not do, or did on some ranks only.
            stage.bring(tensor)
            self._meeting.barrier()
        for place in stage.places():
            self._reduce(place.shares, reduction, everywhere=False)
        reduced = stage.take()
        if reduced is not tensor:
            tensor.copy_(reduced)

    def _get_stage(self) -> Stage | None:
        """The stage, made when it is needed first; None where a machine has no memory for it."""
        if self._stage is None:
            piece = PIECE if self._nodes.count == 1 else PIECE_ACROSS
            with suppress(NoSharedMemory):
                self._stage = Stage(self._nodes.node, self._meeting, self._owners, piece)
            if not self._nodes.communicator.allreduce(self._stage is not None, MPI.LAND):
                self._stage, self._shares_memory = None, False  # on all machines: by MPI alone
        return self._stage

    def _in_place(self, tensor: torch.Tensor, reduction: Reduction) -> None:
        begin, end = share_of(tensor.numel(), self._meeting.rank, self._owners)
        shares = [part[begin:end] for part in self._windows.everybodys(tensor)]
        self._reduce(shares, reduction, everywhere=True)
        self._meeting.barrier()  # nobody reads before all shares are reduced

    def to_owners(
        self,
        tensor: torch.Tensor,
        reduction: Reduction,
        receive: Callable[[int, torch.Tensor], None],
    ) -> None:
        """Gives each rank of a machine its share of the reduction, and nobody the rest.

        Args:
            tensor: in a window, at the same place on all ranks; stays as it is, and must until
                all ranks have met again.
            reduction: of its dtype.
            receive: called with a chunk of the share, flat, of the reduction's dtype, and the index
                of its first element in `tensor`; the chunk is only lent.

        Raises:
            ValueError: the tensor is not there.
        """
        if not self._meeting.same_place or not self._windows.place(tensor):
            raise ValueError("the tensor must lie in the same part of a window on all ranks")
        begin, end = share_of(tensor.numel(), self._meeting.rank, self._owners)
        shares = [part[begin:end] for part in self._windows.everybodys(tensor)]
        if self._nodes.count == 1:
            room = self._sum(reduction)
            for chunk in zip(*(share.split(CHUNK) for share in shares), strict=True):
                receive(begin, reduction.fold(chunk, room[: chunk[0].numel()]))
                begin += chunk[0].numel()
            return
        total = torch.empty(end - begin, dtype=reduction.dtype)
        here, across = self._divided(reduction, wide=True)
        chunks = zip(*(share.split(CHUNK) for share in shares), strict=True)
        for chunk, part in zip(chunks, total.split(CHUNK), strict=True):
            here.fold(chunk, part)
        if total.numel():
            self._across(total, across)
        for part in total.split(CHUNK):
            receive(begin, part)
            begin += part.numel()

    def _reduce(
        self, shares: list[torch.Tensor], reduction: Reduction, *, everywhere: bool
    ) -> None:
        """Replaces the first rank's share, or everybody's, by the reduction over all machines."""
        wide = shares[0].dtype == reduction.dtype
        one_machine = self._nodes.count == 1
        here, across = self._divided(reduction, wide)
        room = self._sum(reduction)
        for chunk in zip(*(share.split(CHUNK) for share in shares), strict=True):
            total = here.fold(chunk, chunk[0] if wide else room[: chunk[0].numel()])
            for share in chunk if everywhere and one_machine else chunk[:1]:
                if share is not total:
                    share.copy_(total)
        if one_machine:
            return
        if shares[0].numel():
            self._across(shares[0], across)
        for share in shares[1:] if everywhere else ():
            share.copy_(shares[0])

    def _divided(self, reduction: Reduction, wide: bool) -> tuple[Reduction, Reduction]:
        """The reduction on this machine and across machines: one of them divides an average.

        The first, where that is exact, and where a machine's sum is rounded to 16 bits, in which it
        could overflow. Else the second: then a machine of one rank rounds nothing.
        """
        first = reduction.divides_first if wide else self._shares_memory
        if first or self._nodes.count == 1:
            return reduction, reduction.undivided
        return reduction.undivided, reduction
