"""Collectives of both backends, node and mpi: torch's calls, exact answers."""

import os
import random
import time

import pytest
import torch
import torch.distributed as dist

import ddp_from_scratch as ddp
from ddp_from_scratch.backend import mpi_group
from ddp_from_scratch.backend.barrier import EAGER_NBYTES
from ddp_from_scratch.backend.mpi_group import MPITransport
from ddp_from_scratch.backend.stage import PIECE
from ddp_from_scratch.backend.transport import GlooTransport
from tests.support import soak
from tests.support.on_ranks import on
from tests.support.tiers import slow

# Elements, too many to be brought along to the meeting.
ROW = EAGER_NBYTES


# Node leaves messages between two ranks to gloo, which takes no strided tensors.
BUT_MESSAGES = [kind for kind in soak.KINDS if kind != "ring"]


def random_operations(world, operations, seed):
    return soak.soak(operations, seed, BUT_MESSAGES if world.backend == "node" else [*soak.KINDS])


@pytest.mark.parametrize("crew", ["mpi-2", "node-3", slow("node-4"), slow("mpi-4")], indirect=True)
def test_random_operations_give_what_numpy_gives(crew):
    assert min(crew(random_operations, 300, 10 + crew.world_size)) > 100


@pytest.mark.parametrize("crew", ["mpi-2", "node-3"], indirect=True)
@on("crew")
def test_random_operations_between_machines(world):
    """Each rank stands for a machine, and MPI can count to 1,024 only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mpi_group, "COUNTABLE", 1024)
        patch.setattr(mpi_group, "BLOCK", 256)
        patch.setattr(soak, "GROUPS", 2)
        for kind in (GlooTransport, MPITransport):
            patch.setattr(kind, "split_by_machine", lambda t: t.split(t.rank))
        random_operations(world, 100, 3)


def parts_of_a_window(world):
    n, r = world.world_size, world.rank
    world_group = dist.group.WORLD
    window = world_group.empty(4 * ROW, torch.float32).fill_(-1.0)
    half = window[: 2 * ROW].view(2, ROW).fill_(r + 1)
    assert world_group.is_shared(half)
    assert not world_group.is_shared(torch.empty(10))
    dist.all_reduce(half)
    assert half.eq(n * (n + 1) / 2).all()
    assert window[2 * ROW :].eq(-1.0).all()
    window.fill_(r + 1)
    part = window[2 * ROW * (r % 2) :][: 2 * ROW]
    dist.all_reduce(part)
    assert part.eq(n * (n + 1) / 2).all()
    assert world_group.empty(0, torch.float32).shape == (0,)
    window = world_group.empty(ROW + 1, torch.bool).fill_(True)
    dist.all_reduce(window)
    assert window.all()


def rounded_once(world):
    """1 + 2**-8 is not a bfloat16; summed in float32, 1 + 2**-8 + 2**-8 rounds to 1 + 2**-7."""
    make = dist.group.WORLD.empty
    for tensor in (make(ROW, torch.bfloat16), *(torch.empty(n).bfloat16() for n in (1, ROW))):
        tensor.fill_(1.0 if world.rank == 0 else 2**-8)
        dist.all_reduce(tensor)
        assert tensor.eq(1 + 2**-7).all()


def asynchronous(world):
    # The handle is dropped at once; the tensor must live until the operation has ended.
    dist.all_reduce(torch.ones(100_000), async_op=True)
    # A callback runs on the group's thread, which is the one that the operations wait for.
    first, *others = (torch.ones(3) for _ in range(3))

    def both(future):
        dist.all_reduce(others[0])
        dist.all_reduce(others[1], async_op=True).get_future().wait()
        return future.value()[0] + others[0] + others[1]

    future = dist.all_reduce(first, async_op=True).get_future().then(both)
    assert future.wait().tolist() == [3.0 * world.world_size] * 3


@pytest.mark.parametrize("backend", ["node", slow("mpi")])
@pytest.mark.parametrize("called", [parts_of_a_window, rounded_once, asynchronous])
def test_all_reduce(ranks, called, backend):
    ranks(backend, 3)(called)


@pytest.mark.parametrize("crew", ["node-3", slow("mpi-3")], indirect=True)
@on("crew")
def test_a_fast_rank_overwrites_nothing_that_a_slow_one_still_needs(world):
    group = dist.new_group()
    barrier = group.checked_barrier
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


@on("node-6")  # mpi has the same barrier
def test_nobody_leaves_a_meeting_of_several_rounds_before_all_have_come(world):
    n, r = world.world_size, world.rank
    came = dist.group.WORLD.empty(n, torch.int64, for_all=True)  # the round that each has reached
    came[r] = 0
    dist.barrier()
    for number in range(1, n + 1):
        if number == r + 1:
            while came.eq(number).sum() < n - 1:  # all others are in the barrier, or about to be
                os.sched_yield()
            for _ in range(1000):
                os.sched_yield()
        came[r] = number
        dist.barrier()
        assert came.min() >= number, f"left before rank {number - 1} came"


@on("node-2")
def test_gloo_does_everything_else_for_node(world):
    tensor = torch.tensor([world.rank])
    dist.send(tensor, 1) if world.rank == 0 else dist.recv(tensor, 0)
    assert tensor.item() == 0
    sparse = torch.sparse_coo_tensor([[world.rank]], [1.0], (2,))
    dist.all_reduce(sparse)
    assert sparse.to_dense().tolist() == [1.0, 1.0]


@pytest.mark.skipif(
    torch.__version__ < "2.15", reason="this torch splits groups only where there is a GPU"
)
@pytest.mark.parametrize("crew", ["node-3", "mpi-3", slow("gloo-3")], indirect=True)
@on("crew")
def test_a_group_is_split_as_gloos_is(world):
    n, r = world.world_size, world.rank
    odd = dist.split_group(split_ranks=[list(range(0, n, 2)), list(range(1, n, 2))])
    tensor = torch.tensor([r])
    dist.all_reduce(tensor, group=odd)
    assert tensor.item() == sum(range(r % 2, n, 2))
    turned = dist.split_group(split_ranks=[list(range(n))[::-1]])
    assert dist.get_group_rank(turned, r) == n - 1 - r
    part = dist.split_group(turned, [[0, n - 1], *([i] for i in range(1, n - 1))])
    tensor = torch.tensor([r + 1])
    dist.all_reduce(tensor, group=part)
    assert tensor.item() == (n + 1 if r in (0, n - 1) else r + 1)
    first = torch.tensor([r])
    dist.broadcast(first, group=turned, group_src=0)  # by gloo on node
    assert first.item() == n - 1
    assert "via shared memory" in repr(ddp.Reducer(torch.nn.Linear(2, 2), turned))
    with pytest.raises(TypeError, match="does not support shrinking"):
        dist.shrink_group([0] if r else [1], turned)
