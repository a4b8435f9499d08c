"""All-reduces of ranks on several machines, on one that stands for them."""

import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_from_scratch import mpi
from ddp_from_scratch.mpi import datatypes
from ddp_from_scratch.mpi.inter_node import GATHERED
from ddp_from_scratch.mpi.process_group import ProcessGroupMPI
from ddp_from_scratch.node.all_reduce import STAGED_FROM
from ddp_from_scratch.node.reduction import CHUNK
from ddp_from_scratch.node.staging import PIECE_ACROSS
from tests.mpi.test_windows import OPERATIONS, ROW, SIZES
from tests.support.machines import Total, machines


def over_machines(world, sizes):
    """As if the ranks were on several machines: these share memory only within one."""
    communicator = mpi.runtime.MPI.COMM_WORLD
    node = communicator.Split(machines(sizes, world.rank))
    group = ProcessGroupMPI(communicator, timedelta(seconds=20), node)
    for numel in (*SIZES, 3 * PIECE_ACROSS // 4 + 1):
        for make in (torch.empty, lambda n: group.empty(n, torch.float32)):
            tensor = make(numel)
            for op, expected in OPERATIONS.items():
                tensor.fill_(world.rank + 1)
                options = dist.AllreduceOptions()
                options.reduceOp = op
                group.allreduce([tensor], options).wait()
                assert tensor.eq(expected(range(1, world.world_size + 1))).all(), (numel, op)
    options = dist.BroadcastOptions()
    options.rootRank = world.world_size - 1
    tensor = torch.tensor([world.rank])
    group.broadcast([tensor], options).wait()
    assert tensor.item() == world.world_size - 1
    group.shutdown()
    # Who is missing is known on its own machine, elsewhere only that it is on another one.
    group = ProcessGroupMPI(communicator, timedelta(seconds=0.5), node)
    if world.rank > 0:
        near = machines(sizes, world.rank) == 0
        with pytest.raises(
            RuntimeError, match="without rank 0$" if near else "without ranks on other machines$"
        ):
            group.barrier().wait()
    dist.barrier()
    # Different calls are told, wherever they come from.
    group = ProcessGroupMPI(communicator, timedelta(seconds=20), node)
    tensor = torch.ones(5 if machines(sizes, world.rank) == 0 else 6)
    with pytest.raises(RuntimeError, match=r"different operations: .* another machine's ranks all"):
        group.allreduce([tensor]).wait()


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1), (1, 2), (1, 1)])
def test_several_machines(ranks, sizes):
    ranks("mpi", sum(sizes))(over_machines, sizes)


REDUCED_SIXTEEN_BITS = {
    dist.ReduceOp.SUM: lambda values: values.sum(0),
    dist.ReduceOp.AVG: lambda values: values.sum(0) / len(values),
    dist.ReduceOp.PRODUCT: lambda values: values.prod(0),
    dist.ReduceOp.MIN: lambda values: values.amin(0),
    dist.ReduceOp.MAX: lambda values: values.amax(0),
}


# Elements: none, fewer than ranks, on either side of what 2 and 3 ranks gather, of what is left to
# MPI, and more than are summed at a time.
SIXTEEN_BIT_SIZES = (
    *(0, 1, 2, GATHERED // 6, GATHERED // 6 + 1, GATHERED // 4, GATHERED // 4 + 1),
    *(STAGED_FROM // 2 - 1, STAGED_FROM // 2, 5 * CHUNK + 7),
)


def a_machine_that_falls_silent(world, folder):
    """It comes to the meeting, and then its cable is pulled: MPI itself would wait for it."""
    communicator = mpi.runtime.MPI.COMM_WORLD
    group = ProcessGroupMPI(communicator, timedelta(seconds=0.2), mpi.runtime.MPI.COMM_SELF)
    options = dist.AllreduceOptions()
    options.asyncOp = False  # as dist.all_reduce calls it where the caller waits
    back = Path(folder) / "back"
    if world.rank == 0:
        with pytest.raises(RuntimeError, match=r"did not end within 2\.2 s: ranks on other machin"):
            group.allreduce([torch.ones(9)], options).wait()
        back.touch()
    else:
        everyone = group._nodes.everyone
        by_mpi = everyone.all_reduce

        def later(*arguments):
            while not back.exists():
                time.sleep(0.01)
            by_mpi(*arguments)

        everyone.all_reduce = later
        with suppress(RuntimeError):  # nor can it wait longer than that
            group.allreduce([torch.ones(9)], options).wait()
    group._worker.close(10.0)
    dist.barrier()


def test_a_call_that_waits_leaves_mpi_in_time(ranks, tmp_path):
    ranks("mpi", 2)(a_machine_that_falls_silent, tmp_path)


def all_reduce_in(group, tensor, op=dist.ReduceOp.SUM):
    options = dist.AllreduceOptions()
    options.reduceOp = op
    group.allreduce([tensor], options).wait()
    return tensor


def sixteen_bits_over_machines(world, sizes):
    communicator = mpi.runtime.MPI.COMM_WORLD
    machine = machines(sizes, world.rank)
    group = ProcessGroupMPI(communicator, timedelta(seconds=20), communicator.Split(machine))
    n = world.world_size
    kinds = [(torch.bfloat16, torch.empty), (torch.float16, torch.empty)]
    kinds += [(torch.bfloat16, lambda numel, dtype: group.empty(numel, dtype))]
    for dtype, make in kinds:
        for numel in SIXTEEN_BIT_SIZES:
            # Small integers and their thirds: exact, but for averages over 3, rounded at the end.
            values = torch.arange(n * numel).view(n, numel).remainder(7).sub(3).float()
            tensor = make(numel, dtype=dtype)
            for op, reduced in REDUCED_SIXTEEN_BITS.items():
                tensor.copy_(values[world.rank])
                all_reduce_in(group, tensor, op)
                if op == dist.ReduceOp.AVG:
                    torch.testing.assert_close(tensor, reduced(values).to(dtype))
                else:
                    assert tensor.equal(reduced(values).to(dtype)), (numel, op)
    # Whatever the values, the bits are everybody's.
    generator = torch.Generator().manual_seed(world.rank)
    for numel in SIXTEEN_BIT_SIZES:
        for op in REDUCED_SIXTEEN_BITS:
            tensor = torch.randn(numel, generator=generator).bfloat16()
            all_reduce_in(group, tensor, op)
            bits = communicator.allgather(tensor.view(torch.uint8).numpy().tobytes())
            assert len(set(bits)) == 1, (numel, op)
    # An average of large numbers overflows nowhere.
    for numel in (5, GATHERED, ROW):
        tensor = torch.full((numel,), 60000.0, dtype=torch.float16)
        torch.testing.assert_close(
            all_reduce_in(group, tensor.clone(), dist.ReduceOp.AVG), tensor, rtol=1e-3, atol=0.0
        )
    group.shutdown()


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (1, 1, 1), (1, 1)])
def test_sixteen_bit_floats_over_several_machines(ranks, sizes):
    ranks("mpi", sum(sizes))(sixteen_bits_over_machines, sizes)


def roundings(world, sizes):
    """How often 16-bit floats are rounded: 1 + 2**-8 is not a bfloat16, and rounds to 1."""
    communicator = mpi.runtime.MPI.COMM_WORLD
    machine = machines(sizes, world.rank)
    group = ProcessGroupMPI(communicator, timedelta(seconds=20), communicator.Split(machine))
    alone = max(sizes) == 1
    for numel in (1, GATHERED, ROW):
        tensor = torch.full((numel,), 1.0 if world.rank == 0 else 2**-8, dtype=torch.bfloat16)
        once = alone or tensor.nbytes < STAGED_FROM
        # Else 1 + 2**-8 is rounded on the machine of ranks 0 and 1, before rank 2's is added.
        assert all_reduce_in(group, tensor).eq(1 + 2**-7 if once else 1.0).all(), numel
    # An average's third of a machine's sum is rounded: of the smallest float16, to nothing.
    smallest = 2.0**-24
    tensor = torch.full((ROW,), 0.0 if world.rank == 1 else smallest, dtype=torch.float16)
    averaged = all_reduce_in(group, tensor, dist.ReduceOp.AVG)
    assert averaged.eq(smallest if alone else 0.0).all()
    group.shutdown()


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1)])
def test_sixteen_bit_floats_are_rounded_again_only_after_a_machines_sum(ranks, sizes):
    ranks("mpi", 3)(roundings, sizes)


class Recorder:
    """A communicator that counts the bytes which an all-reduce hands to MPI for other ranks."""

    def __init__(self, communicator):
        self._communicator, self.sent, self.calls = communicator, 0, 0

    def __getattr__(self, name):
        return getattr(self._communicator, name)

    def Allreduce(self, send, receive, op):
        # Of MPI's own, what its best algorithms send.
        self._count(2 * receive[0].nbytes * (self.size - 1) // self.size)
        self._communicator.Allreduce(send, receive, op)

    def Allgather(self, send, receive):
        self._count(send[0].nbytes * (self.size - 1))
        self._communicator.Allgather(send, receive)

    def Alltoallv(self, send, receive):
        self._count(sum(send[1]) - send[1][self.rank])
        self._communicator.Alltoallv(send, receive)

    def Allgatherv(self, send, receive):
        self._count(receive[1][self.rank] * (self.size - 1))
        self._communicator.Allgatherv(send, receive)

    def _count(self, nbytes):
        self.sent += nbytes
        self.calls += 1


def bytes_between_machines(world, sizes):
    communicator = mpi.runtime.MPI.COMM_WORLD
    machine = machines(sizes, world.rank)
    group = ProcessGroupMPI(communicator, timedelta(seconds=20), communicator.Split(machine))
    ways = [group._nodes.peers, group._nodes.everyone]
    m = len(sizes)

    def sent(tensor, rows=1):
        """By all ranks together, in an all_reduce, or in the sum of so many rows of each."""
        recorders = []
        for way in ways:
            recorders.append(Recorder(way.handle))
            way.handle = recorders[-1]
        tensor.fill_(1)
        if rows == 1:
            all_reduce_in(group, tensor)
        else:
            each = [tensor, *(torch.zeros_like(tensor) for _ in range(1, rows))]
            group.fold_rows(each, [[None] * rows] * world.world_size, Total()).wait()
        assert tensor.eq(world.world_size).all()
        for way, recorder in zip(ways, recorders, strict=True):
            way.handle = recorder._communicator
        return communicator.allreduce(sum(recorder.sent for recorder in recorders))

    for make in (torch.empty, lambda numel, dtype: group.empty(numel, dtype)):
        full = sent(make(ROW, dtype=torch.float32))
        half = sent(make(ROW, dtype=torch.bfloat16))
        assert full == 2 * (m - 1) * ROW * 4
        assert half == full / 2
    # Rows are folded before they cross.
    assert sent(torch.empty(ROW), rows=3) == full
    # In pieces that MPI can count.
    countable, datatypes.COUNTABLE = datatypes.COUNTABLE, 100_000
    try:
        assert sent(torch.empty(ROW, dtype=torch.bfloat16)) == half
    finally:
        datatypes.COUNTABLE = countable
    group.shutdown()


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1)])
def test_sixteen_bit_floats_cross_in_sixteen_bits(ranks, sizes):
    ranks("mpi", sum(sizes))(bytes_between_machines, sizes)
