"""Shared memory on the mpi backend: tensors in windows, staged tensors, too little memory."""

import errno
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ddp_from_scratch import mpi
from ddp_from_scratch.errors import NoSharedMemory
from ddp_from_scratch.node import shared_memory
from ddp_from_scratch.node.all_reduce import STAGED_FROM
from ddp_from_scratch.node.barrier_memory import EAGER_NBYTES
from ddp_from_scratch.node.reduction import CHUNK
from ddp_from_scratch.node.staging import PIECE

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
    way = group._reduce
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
