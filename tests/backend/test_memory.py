"""Memory that ranks share: where it lies, how it is given back, and what happens without it."""

import errno
import gc
import os
import warnings
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from ddp_from_scratch import Reducer, mpi
from ddp_from_scratch.backend import shared_memory
from ddp_from_scratch.common.errors import NoSharedMemory
from tests.support.on_ranks import on
from tests.support.tiers import slow


def maps():
    with open("/proc/self/maps") as lines:
        for line in lines:
            address, *_, file = [*line.split(maxsplit=5), ""][:6]
            begin, end = (int(part, 16) for part in address.split("-"))
            yield range(begin, end), file.strip()


def mapped():
    return sum(len(addresses) for addresses, file in maps() if "memfd:ddp" in file) / 2**20


@pytest.mark.parametrize("crew", ["node-2", slow("mpi-2")], indirect=True)
@on("crew")
def test_memory_is_given_back_when_no_rank_uses_it(world):
    group = dist.new_group()
    before = None
    for _ in range(20):
        window = group.empty(2**20, torch.float32).fill_(1.0)  # 4 MiB
        view = window[100:200]
        del window
        view.fill_(2.0)  # a part keeps the memory alive
        before = before or mapped()
        del view
    assert mapped() <= before
    kept = group.empty(1000, torch.float32).fill_(3.0)
    # It has no name and takes no room in /dev/shm, which containers keep at 64 MB.
    files = [file for addresses, file in maps() if kept.data_ptr() in addresses]
    assert files == ["/memfd:ddp (deleted)"]
    dist.destroy_process_group(group)
    assert kept.eq(3.0).all()  # the group is gone, the tensor is the user's


@on("gloo-2")
def test_no_memory_or_descriptor_is_left_by_reducers(world):
    def used():
        gc.collect()
        return mapped(), len(os.listdir("/proc/self/fd"))

    model = torch.nn.Linear(300, 300)
    Reducer(model).remove()
    before = used()
    for _ in range(20):
        reducer = Reducer(model)
        model(torch.ones(1, 300)).sum().backward()
        reducer.remove()
        del reducer
        gc.collect()
    # What the last one had is given back when the next is made.
    Reducer(model).remove()
    # Memory of earlier tests may be freed meanwhile.
    assert all(now <= was for now, was in zip(used(), before, strict=True))


@pytest.mark.parametrize(
    ("crew", "name", "rank"),
    [("mpi-2", "_nameless_file", 0), ("node-2", "_map_file", 1)],
    indirect=["crew"],
)
@on("crew")
def test_all_ranks_do_without_what_one_has_no_room_for(world, name, rank):
    groups = [dist.new_group()]
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == rank:
            no_room = OSError(errno.EMFILE, "Too many open files")
            patch.setattr(shared_memory, name, Mock(side_effect=no_room))
        with pytest.raises(RuntimeError, match=r"2 ranks .* cannot share .*Too many open files"):
            groups[0].empty(1000, torch.float32)
        whole = torch.full((300_000,), world.rank + 1.0)
        dist.all_reduce(whole, group=groups[0])  # nor a stage: messages do it
        assert whole.eq(3.0).all()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            groups.append(dist.new_group())  # nor a place to meet: each rank is its own machine
        of_messages = ["messages take the place of" in str(w.message) for w in told]
        assert of_messages == [True] * (world.rank == 0)
        assert not groups[1].shares_memory
        dist.all_reduce(whole, group=groups[1])
        assert whole.eq(6.0).all()
    window = groups[0].empty(10, torch.float32).fill_(1.0)
    dist.all_reduce(window, group=groups[0])
    assert window.eq(2.0).all()


@on("mpi-2")
def test_more_memory_than_there_is_is_refused(world):
    with pytest.raises(RuntimeError, match=r"cannot share .* bytes: this machine has less memory"):
        dist.group.WORLD.empty(2**45, torch.float32)
    for nbytes in (2**60, 2**64):
        with pytest.raises(NoSharedMemory, match=f"this rank cannot have {nbytes} bytes"):
            shared_memory.SharedMemory(mpi.MPI.COMM_SELF, nbytes)
