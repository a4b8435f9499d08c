"""Shared memory on the mpi backend: tensors in windows, meetings, several machines."""

import errno
import random
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_from_scratch import mpi
from ddp_from_scratch.errors import NoSharedMemory
from ddp_from_scratch.mpi import datatypes
from ddp_from_scratch.mpi.inter_node import GATHERED
from ddp_from_scratch.mpi.process_group import ProcessGroupMPI
from ddp_from_scratch.node import shared_memory
from ddp_from_scratch.node.all_reduce import STAGED_FROM
from ddp_from_scratch.node.barrier_memory import EAGER_NBYTES
from ddp_from_scratch.node.reduction import CHUNK
from ddp_from_scratch.node.staging import PIECE, PIECE_ACROSS

# Elements: on either side of what 2 and 4 ranks bring along, of what several machines leave to MPI,
# and of what is staged in one piece, in two and in more than there are slots.
SIZES = (
    *(1, EAGER_NBYTES // 16, EAGER_NBYTES // 16 + 1, EAGER_NBYTES // 8, EAGER_NBYTES // 8 + 1),
    *(STAGED_FROM // 4 - 1, STAGED_FROM // 4, 3 * CHUNK + 5, PIECE // 4 + 1, 5 * PIECE // 4 + 7),
)

# Elements, too many to be brought along.
ROW = EAGER_NBYTES


OPERATIONS = {
    dist.ReduceOp.SUM: sum,
    dist.ReduceOp.AVG: lambda values: sum(values) / len(values),
    dist.ReduceOp.MAX: max,
    dist.ReduceOp.MIN: min,
    dist.ReduceOp.PRODUCT: lambda values: torch.tensor(values).prod().item(),
}


def check_all_reduce(make, group, size, rank):
    """Every operation and size; rank r contributes r + 1, the last element r + 2."""
    for numel in SIZES:
        tensor = make(numel)
        for op, expected in OPERATIONS.items():
            tensor.fill_(rank + 1)
            tensor[-1] = rank + 2
            dist.all_reduce(tensor, op, group=group)
            if numel > 1:
                assert tensor[0] == expected(range(1, size + 1)), (numel, op)
                assert tensor[:-1].eq(tensor[0]).all(), (numel, op)
            assert tensor[-1] == expected(range(2, size + 2)), (numel, op)


def in_windows_and_out(world):
    for dtype in (torch.float32, torch.float64):
        check_all_reduce(lambda n, d=dtype: mpi.empty(n, d), None, world.world_size, world.rank)
        check_all_reduce(
            lambda n, d=dtype: torch.empty(n, dtype=d), None, world.world_size, world.rank
        )
        check_all_reduce(  # strided
            lambda n, d=dtype: torch.empty(n, 2, dtype=d)[:, 0], None, world.world_size, world.rank
        )


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_reduce_in_a_window_and_out_of_it(ranks, size):
    ranks("mpi", size)(in_windows_and_out)


def parts_of_a_window(world):
    n, r = world.world_size, world.rank
    window = mpi.empty(4 * ROW)
    window.fill_(-1.0)
    half = window[: 2 * ROW].view(2, ROW)
    half.fill_(r + 1)
    dist.all_reduce(half)
    assert window[: 2 * ROW].eq(n * (n + 1) / 2).all()
    assert window[2 * ROW :].eq(-1.0).all()
    # Where one rank's tensor lies elsewhere, the others' go the ordinary way with it.
    window.fill_(r + 1)
    tensor = torch.full((2 * ROW,), r + 1.0) if r == 0 else window[: 2 * ROW]
    dist.all_reduce(tensor)
    assert tensor.eq(n * (n + 1) / 2).all()
    # The same size at different places of the window.
    window.fill_(r + 1)
    begin = 2 * ROW * (r % 2)
    dist.all_reduce(window[begin : begin + 2 * ROW])
    assert window[begin : begin + 2 * ROW].eq(n * (n + 1) / 2).all()
    assert mpi.empty(0).shape == (0,)
    for dtype in (torch.bfloat16, torch.bool, torch.complex64):
        window = mpi.empty(ROW + 1, dtype)
        window.fill_(1)
        dist.all_reduce(window)
        assert window.dtype == dtype
        assert window.eq(True if dtype == torch.bool else n).all()


def test_parts_of_a_window(ranks):
    ranks("mpi", 3)(parts_of_a_window)


def the_way_of_each(world):
    group = dist.new_group()
    way = group._collectives._all_reduce
    dist.all_reduce(mpi.empty(STAGED_FROM, process_group=group).zero_(), group=group)
    assert way._stage is None, "a tensor in a window was copied through the stage"
    dist.all_reduce(torch.zeros(STAGED_FROM), group=group)
    assert way._stage is not None
    dist.destroy_process_group(group)


def test_a_window_is_reduced_in_place_and_other_tensors_are_staged(ranks):
    ranks("mpi", 2)(the_way_of_each)


def one_rank(world):
    alone = dist.new_group([0])
    if world.rank == 0:
        for dtype in (torch.bfloat16, torch.float32):
            for numel in (1, CHUNK + 1, 2 * CHUNK):
                tensor = torch.ones(numel, dtype=dtype)
                dist.all_reduce(tensor, group=alone)
                assert tensor.eq(1).all()
        dist.destroy_process_group(alone)


def test_a_group_of_one_rank(ranks):
    ranks("mpi", 2)(one_rank)


def fast_and_slow_ranks(world):
    group = dist.new_group()
    barrier = group._collectives.checked_barrier
    together, naps = barrier.wait, random.Random(world.rank)

    def wait():
        together()
        time.sleep(naps.choice([0.0, 0.003]))

    barrier.wait = wait
    n = world.world_size
    for number in range(4):
        tensor = torch.arange(7 * PIECE // 8 * 2, dtype=torch.float32) + world.rank + number
        expected = n * (tensor - world.rank) + n * (n - 1) / 2
        dist.all_reduce(tensor, group=group)
        assert tensor.equal(expected)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("size", [3, 6])
def test_a_fast_rank_overwrites_nothing_that_a_slow_one_still_needs(ranks, size):
    ranks("mpi", size)(fast_and_slow_ranks)


def one_is_late(world):
    for late in range(world.world_size):
        if world.rank == late:
            time.sleep(0.05)
        came = time.monotonic()
        dist.barrier()
        left = time.monotonic()
        times: list[float] = [0.0] * world.world_size
        dist.all_gather_object(times, came)
        assert left >= max(times), f"left before rank {late} came"


def test_nobody_leaves_a_meeting_of_several_rounds_before_all_have_come(ranks):
    ranks("mpi", 6)(one_is_late)


def sixteen_bits_in_a_window(world):
    # 1 + 2**-8 is not a bfloat16; summed in float32, 1 + 2**-8 + 2**-8 rounds to 1 + 2**-7.
    for tensor in (mpi.empty(ROW, torch.bfloat16), torch.empty(ROW, dtype=torch.bfloat16)):
        tensor.fill_(1.0 if world.rank == 0 else 2**-8)
        dist.all_reduce(tensor)
        assert tensor.eq(1 + 2**-7).all()


def test_sixteen_bit_floats_are_rounded_once_in_shared_memory(ranks):
    ranks("mpi", 3)(sixteen_bits_in_a_window)


def shared_memory_mapped():
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Pss_Shmem"))


def windows_come_and_go(world):
    group = dist.new_group()
    before = None
    for _ in range(20):
        window = mpi.empty(2**20, process_group=group)  # 4 MiB
        window.fill_(1.0)
        view = window[100:200]
        del window
        view.fill_(2.0)  # a part keeps the memory alive
        del view
        before = before or shared_memory_mapped()
    assert shared_memory_mapped() < before + 3 * 4096  # kB; 20 windows would be 80 MiB
    kept = mpi.empty(1000, process_group=group)
    kept.fill_(3.0)
    dist.destroy_process_group(group)
    assert kept.eq(3.0).all()  # the group is gone, the tensor is the user's


def test_memory_is_given_back_when_no_rank_uses_it(ranks):
    ranks("mpi", 2)(windows_come_and_go)


def no_room(*_):
    raise OSError(errno.EMFILE, "Too many open files")


def one_rank_without_room(world, name, rank):
    group = dist.new_group(timeout=timedelta(seconds=20))
    original = getattr(shared_memory, name)
    if world.rank == rank:
        setattr(shared_memory, name, no_room)
    try:
        with pytest.raises(RuntimeError, match=r"2 ranks .* cannot share .*Too many open files"):
            mpi.empty(1000, process_group=group)
        whole = torch.full((300_000,), world.rank + 1.0)
        dist.all_reduce(whole, group=group)  # nor a stage: MPI does it
        assert whole.eq(3.0).all()
        alone = dist.new_group()  # nor a place to meet: each rank is a machine of its own
        dist.all_reduce(whole, group=alone)
        assert whole.eq(6.0).all()
    finally:
        setattr(shared_memory, name, original)
    window = mpi.empty(10, process_group=group).fill_(1.0)
    dist.all_reduce(window, group=group)
    assert window.eq(2.0).all()


@pytest.mark.parametrize(("name", "rank"), [("_nameless_file", 0), ("_map_file", 1)])
def test_one_rank_without_room_is_heard_by_all_at_once(ranks, name, rank):
    """Whoever makes the memory, or one that wants to use it: all do without, and go on."""
    ranks("mpi", 2)(one_rank_without_room, name, rank)


def more_than_there_is(world):
    with pytest.raises(RuntimeError, match=r"cannot share .* bytes: this machine has less memory"):
        mpi.empty(2**45)


def test_more_memory_than_the_machine_has_is_refused(ranks):
    ranks("mpi", 2)(more_than_there_is)


def more_than_a_rank_alone_can_have(world):
    from ddp_from_scratch.mpi.runtime import MPI

    for nbytes in (2**60, 2**64):
        with pytest.raises(NoSharedMemory, match=f"this rank cannot have {nbytes} bytes"):
            shared_memory.SharedMemory(MPI.COMM_SELF, nbytes)


def test_more_memory_than_a_rank_alone_can_have_is_refused(ranks):
    ranks("mpi", 2)(more_than_a_rank_alone_can_have)


def file_behind(tensor):
    with open("/proc/self/maps") as lines:
        for line in lines:
            begin, end = (int(address, 16) for address in line.split()[0].split("-"))
            if begin <= tensor.data_ptr() < end:
                return line.split(maxsplit=5)[5].strip()
    raise AssertionError("it is mapped nowhere")


def where_a_window_lies(world):
    return file_behind(mpi.empty(1000))


def test_windows_have_no_name_and_take_no_room_in_dev_shm(ranks):
    """Which containers keep at 64 MB; and a killed rank leaves nothing behind."""
    assert ranks("mpi", 2)(where_a_window_lies) == ["/memfd:ddp (deleted)"] * 2


def wrong_windows(world):
    with pytest.raises(ValueError, match="numel must be 0 or more, got -1"):
        mpi.empty(-1)
    group = dist.new_group(timeout=timedelta(seconds=20))
    with pytest.raises(RuntimeError, match=r"called different operations: rank 0 mpi\.empty\(1"):
        mpi.empty(1 + world.rank, process_group=group)


def test_a_window_is_made_alike_by_all_ranks(ranks):
    ranks("mpi", 2)(wrong_windows)


def machines(sizes, rank):
    """The number of the machine that `rank` is on."""
    return next(i for i in range(len(sizes)) if rank < sum(sizes[: i + 1]))


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
        everyone = group._collectives._nodes.everyone
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
    ways = [group._collectives._nodes.peers, group._collectives._nodes.everyone]
    m = len(sizes)

    def sent(tensor):
        """By all ranks together."""
        recorders = []
        for way in ways:
            recorders.append(Recorder(way.handle))
            way.handle = recorders[-1]
        all_reduce_in(group, tensor.fill_(1))
        assert tensor.eq(world.world_size).all()
        for way, recorder in zip(ways, recorders, strict=True):
            way.handle = recorder._communicator
        return communicator.allreduce(sum(recorder.sent for recorder in recorders))

    for make in (torch.empty, lambda numel, dtype: group.empty(numel, dtype)):
        full = sent(make(ROW, dtype=torch.float32))
        half = sent(make(ROW, dtype=torch.bfloat16))
        assert full == 2 * (m - 1) * ROW * 4
        assert half == full / 2
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
