import itertools
from importlib import import_module

import pytest
import torch
import torch.distributed as dist

program = import_module("tutorial.10_shared_memory.shared_memory")


@pytest.mark.parametrize(("nproc", "size"), [(2, 10), (3, 10), (4, 3), (5, 23)])
def test_chunk(exercise, nproc, size):
    chunks = [exercise.chunk(rank, nproc, size) for rank in range(nproc)]
    assert chunks[0][0] == 0
    assert chunks[-1][1] == size
    for (_, end), (begin, _) in itertools.pairwise(chunks):
        assert end == begin, "a gap, or numbers that two ranks add up"
    lengths = [end - begin for begin, end in chunks]
    assert max(lengths) - min(lengths) <= 1


def test_a_rank_touches_its_own_chunk_alone(exercise):
    rows = torch.arange(12.0).view(3, 4)
    meetings = []
    exercise.all_reduce_in_place(rows, 2, lambda: meetings.append(rows.clone()))
    begin, end = exercise.chunk(2, 3, 4)
    expected = torch.arange(12.0).view(3, 4)
    expected[:, begin:end] = expected[:, begin:end].sum(0)
    assert rows.equal(expected), "numbers outside the chunk changed, or some inside it did not"
    assert meetings, "nobody has waited for the other ranks"
    assert meetings[0].equal(torch.arange(12.0).view(3, 4)), "changed before all rows are there"
    assert meetings[-1].equal(expected), "returns before all chunks are there"


def in_place(exercise, folder):
    memory = program.SharedMemory(folder, 1001)
    mine = memory.rows[memory.rank]
    for step in range(50):
        mine.fill_(dist.get_rank() + step)
        exercise.all_reduce_in_place(memory.rows, memory.rank, memory.meet)
        if not mine.eq(3 + 3 * step).all():
            return f"step {step}: {mine.unique().tolist()}, and not {3 + 3 * step}"
        memory.meet()  # before any rank fills its row again
    return None


def test_all_reduce_in_place(on_ranks, tmp_path):
    assert on_ranks(3, in_place, str(tmp_path)) == [None] * 3
