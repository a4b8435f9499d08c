"""Tensors as MPI sees them: memory, element type, reduction.

MPI's collectives on dense tensors of any size, and the messages that the node backend needs.

Larger tensors than MPI can count go in pieces.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, TypeAlias, cast

import numpy as np
import torch
import torch.distributed as dist

from ddp_from_scratch.backend.mpi_runtime import MPI
from ddp_from_scratch.backend.reduction import WIDENED, ReduceOp, Reduction, share_of

# Without a count: mpi4py then divides the memory by the number of ranks where MPI wants a share.
Buffer: TypeAlias = "tuple[np.ndarray[Any, np.dtype[np.uint8]], MPI.Datatype]"

DATATYPES: dict[torch.dtype, MPI.Datatype] = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.uint8: MPI.UINT8_T,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
    torch.bool: MPI.C_BOOL,
}

# Bytes; most MPIs count in 32 bits.
COUNTABLE = 2**31 - 2**20
BLOCK = 2**30

# torch's reduction, MPI's for numbers, MPI's for booleans. AVG is a sum, which is divided. C's
# bool has logical operations only: a sum of booleans is "any", a product "all", as in torch.
_OPERATIONS = (
    (dist.ReduceOp.SUM, MPI.SUM, MPI.LOR),
    (dist.ReduceOp.AVG, MPI.SUM, MPI.LOR),
    (dist.ReduceOp.PRODUCT, MPI.PROD, MPI.LAND),
    (dist.ReduceOp.MIN, MPI.MIN, MPI.LAND),
    (dist.ReduceOp.MAX, MPI.MAX, MPI.LOR),
    (dist.ReduceOp.BAND, MPI.BAND, MPI.LAND),
    (dist.ReduceOp.BOR, MPI.BOR, MPI.LOR),
    (dist.ReduceOp.BXOR, MPI.BXOR, MPI.LXOR),
)
_BITWISE = (MPI.BAND, MPI.BOR, MPI.BXOR)
_ORDERED = (MPI.MIN, MPI.MAX)


def values(tensor: torch.Tensor) -> Buffer:
    """A dense tensor as MPI's elements, for reductions."""
    return (_memory(tensor), DATATYPES[tensor.dtype])


def pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """A flat tensor in pieces whose bytes MPI can count."""
    if tensor.nbytes <= COUNTABLE:
        return (tensor,)
    return tuple(tensor.split(COUNTABLE // tensor.itemsize))


def message(tensor: torch.Tensor) -> "Buffer | tuple[Any, int, MPI.Datatype]":
    """A dense tensor as bytes, in one message whatever its size."""
    if tensor.nbytes <= COUNTABLE:
        return raw(tensor)
    return (_memory(tensor), 1, _many_bytes(tensor.nbytes))


@cache
def _many_bytes(count: int) -> MPI.Datatype:
    """One element that is `count` bytes: blocks that MPI can count, and the rest."""
    # Cached and never freed: a committed type is a few words of memory, for each large size sent.
    blocks, rest = divmod(count, BLOCK)
    block = MPI.BYTE.Create_contiguous(BLOCK)
    places = [0, blocks * BLOCK]
    return MPI.Datatype.Create_struct([blocks, rest], places, [block, MPI.BYTE]).Commit()


def raw(tensor: torch.Tensor) -> Buffer:
    """A dense tensor as bytes of any dtype, for calls that only move it."""
    return (_memory(tensor), MPI.BYTE)


def _memory(tensor: torch.Tensor) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    # An array and not an address: it keeps a tensor alive that is nobody else's.
    # A single element is dense with any stride, and `view` keeps that stride.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy()


@cache
def reduction_of(op: ReduceOp, dtype: torch.dtype, size: int) -> Reduction:
    """Torch's reduction over `size` ranks; a RuntimeError where MPI does not have it."""
    # Asked of MPI on one machine, too: what a program may call must not depend on its placement.
    operation(op, torch.float32 if dtype in WIDENED else dtype)
    return Reduction.of(op, dtype, size)


@cache
def operation_of(reduction: Reduction) -> MPI.Op:
    """MPI's operation for a reduction, up to the division of an average."""
    return operation(reduction.op, reduction.dtype)


def operation(op: ReduceOp, dtype: torch.dtype) -> MPI.Op:
    """MPI's operation for torch's on elements of `dtype`; a RuntimeError where it has none."""
    if dtype not in DATATYPES:
        raise RuntimeError(f"the mpi backend cannot reduce tensors of {dtype}")
    for ours, numeric, logical in _OPERATIONS:
        if op != ours:
            continue
        fractional = dtype.is_floating_point or dtype.is_complex
        if (numeric in _BITWISE and fractional) or (numeric in _ORDERED and dtype.is_complex):
            raise RuntimeError(f"the mpi backend cannot reduce {dtype} with {ours}")
        return logical if dtype == torch.bool else numeric
    raise RuntimeError(f"the mpi backend has no reduction {op}")


class MPICommunicator:
    """`node.communicator.Communicator` over mpi4py's, the `handle`, which `free` releases."""

    def __init__(self, handle: MPI.Intracomm) -> None:
        self.handle = handle
        self.rank, self.size = handle.rank, handle.size
        self.world_rank = MPI.COMM_WORLD.rank

    def allgather(self, value: Any) -> list[Any]:
        return self.handle.allgather(value)

    def split(self, color: int) -> "MPICommunicator":
        return MPICommunicator(cast(MPI.Intracomm, self.handle.Split(color)))

    def split_by_machine(self) -> "MPICommunicator":
        here = self.handle.Split_type(MPI.COMM_TYPE_SHARED)
        return MPICommunicator(cast(MPI.Intracomm, here))

    def free(self) -> None:
        self.handle.Free()

    def begin_allgather(self, own: memoryview, gathered: memoryview) -> Callable[[], bool]:
        # The bound method keeps the request, and with it both buffers, alive.
        return self.handle.Iallgather(own, gathered).Test

    def exchange(
        self, sent: torch.Tensor, sizes: list[int], received: torch.Tensor, expected: list[int]
    ) -> None:
        exchange(self.handle, sent, sizes, received, expected)

    def all_reduce(self, flat: torch.Tensor, reduction: Reduction) -> None:
        all_reduce(self.handle, flat, reduction)


# Bytes of all ranks' 16-bit floats up to which each rank gets them all and sums them by itself:
# with so few it is the number of messages that takes time.
GATHERED = 64 * 1024


def all_reduce(communicator: MPI.Intracomm, flat: torch.Tensor, reduction: Reduction) -> None:
    """Replaces `flat` by the reduction of everybody's: dense, of the same size on all ranks.

    Averages of fractions are divided first where that is exact. 16-bit floats are rounded once.
    """
    for piece in pieces(flat):
        if piece.dtype == reduction.dtype:
            _by_mpi(communicator, piece, reduction)
        elif piece.nbytes * communicator.size <= GATHERED:
            _gathered(communicator, piece, reduction)
        else:
            _in_parts(communicator, piece, reduction)


def _by_mpi(communicator: MPI.Intracomm, flat: torch.Tensor, reduction: Reduction) -> None:
    # Before the sum, which could overflow; only where the bits are the same.
    if reduction.divides_first:
        flat /= reduction.divisor
    communicator.Allreduce(MPI.IN_PLACE, values(flat), operation_of(reduction))
    if not reduction.divides_first:
        reduction.divide(flat)


def _gathered(communicator: MPI.Intracomm, flat: torch.Tensor, reduction: Reduction) -> None:
    everybodys = flat.new_empty(communicator.size, flat.numel())
    communicator.Allgather(raw(flat), raw(everybodys))
    reduction.fold_into(flat, everybodys.unbind())


def _in_parts(communicator: MPI.Intracomm, flat: torch.Tensor, reduction: Reduction) -> None:
    size = communicator.size
    shares = [share_of(flat.numel(), rank, size) for rank in range(size)]
    sizes = [end - begin for begin, end in shares]
    begin, end = shares[communicator.rank]
    own = flat[begin:end]  # the part that this rank sums for all
    everybodys = own.new_empty(size, own.numel())
    exchange(communicator, flat, sizes, everybodys, [own.numel()] * size)
    reduction.fold_into(own, everybodys.unbind())
    communicator.Allgatherv(MPI.IN_PLACE, _parts(flat, sizes))


def exchange(
    communicator: MPI.Intracomm,
    sent: torch.Tensor,
    sizes: list[int],
    received: torch.Tensor,
    expected: list[int],
) -> None:
    """See `Communicator.exchange`."""
    communicator.Alltoallv(_parts(sent, sizes), _parts(received, expected))


def _parts(tensor: torch.Tensor, sizes: list[int]) -> Any:
    return [raw(tensor)[0], [size * tensor.itemsize for size in sizes], MPI.BYTE]


Message: TypeAlias = tuple[int, torch.Tensor]  # the other rank, and what is sent or received

# Beyond the tags that programs use for messages of their own on the same communicator.
_TAG = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 0) - 1


class Transport:
    """Calls on one communicator. Collective, by all ranks with the same sizes."""

    def __init__(self, communicator: MPI.Intracomm) -> None:
        self._communicator = communicator
        self._rank, self._size = communicator.rank, communicator.size

    def reduce(self, flat: torch.Tensor, reduction: Reduction, root: int) -> None:
        """Leaves the undivided reduction in `flat` on the root, and keeps it on the others."""
        op = operation_of(reduction)
        for piece in pieces(flat):
            # MPI takes the root's own elements from where the result goes.
            if self._rank == root:
                self._communicator.Reduce(MPI.IN_PLACE, values(piece), op, root)
            else:
                self._communicator.Reduce(values(piece), None, op, root)

    def reduce_scatter(
        self, joined: torch.Tensor, counts: Sequence[int], reduction: Reduction
    ) -> torch.Tensor:
        """This rank's part of the undivided reduction of `joined`, which may be overwritten."""
        # Parts differ in size over ranks, so that cutting them needs a call for each rank.
        if joined.nbytes < COUNTABLE:
            own = joined.new_empty(counts[self._rank])
            self._communicator.Reduce_scatter(
                values(joined), values(own), list(counts), operation_of(reduction)
            )
            return own
        parts: Sequence[torch.Tensor] = joined.split(list(counts))
        for root, part in enumerate(parts):
            self.reduce(part, reduction, root)
        return parts[self._rank]

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """Replaces `flat` by the root's."""
        for piece in pieces(flat):
            self._communicator.Bcast(raw(piece), root)

    def all_gather(self, gathered: torch.Tensor, sizes: list[int], flat: torch.Tensor) -> None:
        """Gathers tensors of `sizes` elements into `gathered` on every rank."""
        parts = gathered.split(sizes)
        if gathered.nbytes < COUNTABLE:
            counts = [part.nbytes for part in parts]
            self._communicator.Allgatherv(raw(flat), [raw(gathered)[0], counts, MPI.BYTE])
        else:
            # Each part from its rank: a broadcast goes in pieces that MPI can count.
            parts[self._rank].copy_(flat)
            for root, part in enumerate(parts):
                self.broadcast(part, root)

    def gather(self, gathered: torch.Tensor | None, dense: torch.Tensor, root: int) -> None:
        """Gathers equal tensors into `gathered` on the root; None on the others."""
        if self._size * dense.nbytes < COUNTABLE:
            into = None if gathered is None else raw(gathered)
            self._communicator.Gather(raw(dense), into, root)
        else:
            parts = [] if gathered is None else gathered.chunk(self._size)
            self.exchange([(root, dense)], enumerate(parts))

    def scatter(self, parts: Sequence[torch.Tensor], flat: torch.Tensor, root: int) -> None:
        """Sends the root's parts, one to each rank's `flat`; no parts on the others."""
        if self._size * flat.nbytes < COUNTABLE:
            sent = raw(join(parts, flat.dtype)) if self._rank == root else None
            self._communicator.Scatter(sent, raw(flat), root)
        else:
            sends = parts if self._rank == root else ()
            self.exchange(enumerate(sends), [(root, flat)])

    def exchange(self, sends: Iterable[Message], receives: Iterable[Message]) -> None:
        """Sends to and receives from ranks of the group, at once; also from a rank to itself."""
        # Receives first: a message that finds its receive posted needs no memory in between.
        requests = [
            self._communicator.Irecv(raw(piece), rank, _TAG)
            for rank, tensor in receives
            for piece in pieces(tensor.view(-1))
        ]
        requests += [
            self._communicator.Isend(raw(piece), rank, _TAG)
            for rank, tensor in sends
            for piece in pieces(tensor.contiguous().view(-1))
        ]
        MPI.Request.Waitall(requests)

    def mismatched_pairs(
        self, expected: Sequence[int], sent: Sequence[int]
    ) -> list[tuple[int, int, int, int]]:
        """Pairs of all ranks in which one sends another number of elements than the other expects.

        Args:
            expected: elements that this rank expects, by source.
            sent: elements that it sends, by target.

        Returns:
            Source and target as ranks of the world, elements sent and expected; on all ranks alike.
        """
        # A rank can compare only what comes to it; then all ranks hear of all mismatches, since all
        # must raise.
        coming = torch.empty(self._size, dtype=torch.int64)
        self._communicator.Alltoall(raw(torch.tensor(sent)), raw(coming))
        ours, world = self._communicator.Get_group(), MPI.COMM_WORLD.Get_group()
        names = ours.Translate_ranks(group=world)
        wrong = [
            (names[source], names[self._rank], size, wanted)
            for source, (size, wanted) in enumerate(zip(coming.tolist(), expected, strict=True))
            if size != wanted
        ]
        if not self._communicator.allreduce(len(wrong)):
            return []
        return [pair for pairs in self._communicator.allgather(wrong) for pair in pairs]


def join(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """A flat copy of all parts."""
    return torch.cat([part.reshape(-1).to(dtype) for part in parts])
