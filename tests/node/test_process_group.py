"""The node backend: shared memory within a machine and gloo for the rest, with no MPI."""

import contextlib
import gc
import mmap
import os
import resource
import signal
import socket
import sys
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol

from ddp_from_scratch import DistributedDataParallel, NodeSharedSGD, Reducer, comm_hooks
from ddp_from_scratch.comm_hooks.power_sgd import PowerSGDState
from ddp_from_scratch.errors import CommunicationError
from ddp_from_scratch.node import ProcessGroupNode, shared_memory, shared_memory_beside
from ddp_from_scratch.node.all_reduce import STAGED_FROM
from ddp_from_scratch.node.staging import PIECE_ACROSS
from ddp_from_scratch.node.store_communicator import StoreCommunicator
from tests.mpi.test_collectives import all_reduce_every_dtype, all_reduce_operations
from tests.mpi.test_groups import a_group_that_is_split
from tests.mpi.test_meeting import fast_and_slow_ranks
from tests.mpi.test_several_machines import REDUCED_SIXTEEN_BITS
from tests.mpi.test_windows import OPERATIONS, SIZES, check_all_reduce
from tests.support.failing_run import Run
from tests.support.machines import Total, group_over, machines
from tests.support.tiers import slow


@pytest.fixture(params=[2, slow(4)])
def crew(ranks, request):
    return ranks("node", request.param)


@pytest.mark.parametrize("called", [all_reduce_every_dtype, all_reduce_operations])
def test_all_reduce(crew, called):
    crew(called)


def in_windows_and_out(world):
    group = dist.group.WORLD
    for make in (torch.empty, lambda numel: group.empty(numel, torch.float32)):
        check_all_reduce(make, None, world.world_size, world.rank)
    assert group.is_shared(group.empty(10, torch.float32)[2:5])
    assert not group.is_shared(torch.empty(10))


def test_all_reduce_in_windows_and_out(crew):
    crew(in_windows_and_out)


def test_a_fast_rank_overwrites_nothing_that_a_slow_one_still_needs(crew):
    crew(fast_and_slow_ranks)


def rows_in_shared_memory(world, sizes):
    group = group_over(world, sizes)
    # On gloo the Reducer has opened one beside.
    group = shared_memory_beside(group)
    assert group.machines == len(sizes)
    counts = range(1, world.world_size + 1)
    places = [[None] * count for count in counts]
    first = sum(counts[: world.rank])
    for dtype in (torch.float32, torch.float16):
        for numel in (0, 1, 1000, PIECE_ACROSS // dtype.itemsize + 7):
            place = torch.arange(numel).remainder(7).to(dtype)
            rows = [place + first + row for row in range(counts[world.rank])]
            others = [row.clone() for row in rows[1:]]
            group.fold_rows(rows, places, Total()).wait()
            everyone = sum(counts)
            total = place.double() * everyone + everyone * (everyone - 1) / 2
            assert rows[0].double().equal(total), (dtype, numel)
            assert all(row.equal(other) for row, other in zip(rows[1:], others, strict=True))
    with pytest.raises(RuntimeError, match=r"fold_rows on the .* backend needs dense tensors"):
        group.fold_rows([torch.ones(3).to_sparse()], places, Total())
    work = group.fold_rows([torch.ones(5 + world.rank)] * counts[world.rank], places, Total())
    with pytest.raises(CommunicationError, match=r"fold_rows of \d+ rows of 5 x torch.float32"):
        work.wait()


@pytest.mark.parametrize(
    ("backend", "sizes"),
    [
        *(("gloo", (3,)), ("mpi", (3,)), ("gloo", (2, 1)), ("mpi", (2, 1)), slow("node", (3,))),
        *(slow("gloo", (2, 2)), slow("mpi", (2, 2)), slow("gloo", (3, 2, 1))),
    ],
)
def test_rows_are_folded_in_shared_memory(ranks, backend, sizes):
    ranks(backend, sum(sizes))(rows_in_shared_memory, sizes)


def one_rank_folds(world):
    rows = [torch.ones(5), torch.ones(5)]
    shared_memory_beside(dist.group.WORLD).fold_rows(rows, [[1, 2]], Total()).wait()
    assert rows[0].eq(2).all()


@pytest.mark.parametrize("backend", ["node", "mpi"])
def test_one_rank_folds_its_own_rows(ranks, backend):
    ranks(backend, 1)(one_rank_folds)


def every_other_collective(world):
    n, r = world.world_size, world.rank
    mine = torch.tensor([r, r])
    ones = [torch.empty_like(mine) for _ in range(n)]
    dist.all_gather(ones, mine)
    assert [one.tolist() for one in ones] == [[i, i] for i in range(n)]
    flat = torch.empty(2 * n, dtype=torch.int64)
    dist.all_gather_into_tensor(flat, mine)
    assert torch.equal(flat, torch.cat(ones))
    objects = [None] * n
    dist.all_gather_object(objects, {"rank": r})
    assert objects == [{"rank": i} for i in range(n)]
    tensor = mine.clone()
    dist.broadcast(tensor, n - 1)
    assert tensor.tolist() == [n - 1] * 2
    dist.reduce(mine.clone(), 0)
    gathered = [torch.empty_like(mine) for _ in range(n)] if r == 0 else None
    dist.gather(mine, gathered)
    dist.scatter(tensor, [torch.tensor([i, -i]) for i in range(n)] if r == 0 else None)
    assert tensor.tolist() == [r, -r]
    exchanged = torch.empty(n, dtype=torch.int64)
    dist.all_to_all_single(exchanged, torch.arange(n) + 10 * r)
    assert exchanged.tolist() == [10 * i + r for i in range(n)]
    part = torch.empty(1)
    dist.reduce_scatter_tensor(part, torch.arange(float(n)))
    assert part.item() == n * r
    if r == 0:
        dist.send(torch.tensor([7]), 1)
    elif r == 1:
        received = torch.tensor([0])
        dist.recv(received, 0)
        assert received.item() == 7
    sparse = torch.sparse_coo_tensor([[r]], [1.0], (n,))
    dist.all_reduce(sparse)
    assert sparse.to_dense().tolist() == [1.0] * n
    dist.barrier()
    dist.group.WORLD.monitored_barrier()


def test_gloo_does_everything_else(crew):
    crew(every_other_collective)


def what_cannot_be_summed(world):
    with pytest.raises(RuntimeError, match=r"torch\.float32 cannot be reduced with BAND"):
        dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND)
    dist.all_reduce(torch.ones(2))  # nobody had met for it: the group goes on


def test_an_operation_without_a_meaning_is_refused(crew):
    crew(what_cannot_be_summed)


def expanded(world):
    for size in (8, 500_000):
        one = torch.ones(1).expand(size)
        for at_once in (True, False):
            with pytest.raises(RuntimeError, match=r"one place in memory .*expand\(\): call c"):
                dist.all_reduce(one, async_op=not at_once)
        tensor = torch.ones(2, size).t()  # not dense, but each element has a place of its own
        dist.all_reduce(tensor)
        assert tensor.eq(world.world_size).all()


def test_an_expanded_tensor_is_refused_and_the_group_goes_on(crew):
    crew(expanded)


def made_in_inference_mode(world):
    for size in (8, 500_000):
        with torch.inference_mode():
            tensor = torch.ones(size)
        for at_once in (True, False):
            work = dist.all_reduce(tensor, async_op=not at_once)
            at_once or work.wait()
        assert tensor.eq(world.world_size**2).all()


@pytest.mark.parametrize("backend", ["gloo", "node", "mpi"])
def test_a_tensor_of_inference_mode_is_reduced_outside(ranks, backend):
    ranks(backend, 2)(made_in_inference_mode)


def in_inference_mode(world):
    for numel in (3, 2**20):
        for dtype in (torch.float32, torch.bfloat16):
            for mode in (True, False, True):
                for at_once in (True, False):
                    with torch.inference_mode(mode):
                        tensor = torch.ones(numel, dtype=dtype)
                        work = dist.all_reduce(tensor, async_op=not at_once)
                        at_once or work.wait()
                        assert tensor.eq(world.world_size).all()


@pytest.mark.parametrize("backend", ["node", "mpi"])
def test_all_reduce_in_inference_mode_and_out(ranks, backend):
    ranks(backend, 2)(in_inference_mode)


# Several machines --------------------------------------------------------------------------------


def over(world, sizes, seconds=20.0):
    """A group whose ranks stand for machines of so many ranks each."""
    over.count = getattr(over, "count", 0) + 1
    store = dist.PrefixStore(f"over {over.count}", dist.distributed_c10d._get_default_store())
    limit = timedelta(seconds=seconds)
    machine = str(machines(sizes, world.rank))
    ranks = list(range(world.world_size))
    communicator = StoreCommunicator(store, world.rank, ranks, limit, machine)
    return ProcessGroupNode(communicator, limit, lambda: dist.group.WORLD)


def all_reduce_in(group, tensor, op=dist.ReduceOp.SUM):
    options = dist.AllreduceOptions()
    options.reduceOp = op
    group.allreduce([tensor], options).wait()
    return tensor


def over_machines(world, sizes):
    n = world.world_size
    group = over(world, sizes)
    for make in (torch.empty, lambda numel: group.empty(numel, torch.float32)):
        for numel in SIZES:
            for op, expected in OPERATIONS.items():
                tensor = all_reduce_in(group, make(numel).fill_(world.rank + 1), op)
                assert tensor.eq(expected(range(1, n + 1))).all(), (numel, op)
    for numel in (0, 1, n + 1, STAGED_FROM // 2, STAGED_FROM // 2 + 9):
        values = torch.arange(n * numel).view(n, numel).remainder(7).sub(3).float()
        for op, reduced in REDUCED_SIXTEEN_BITS.items():
            tensor = all_reduce_in(group, values[world.rank].bfloat16(), op)
            # A machine's sum is rounded, too, before it crosses.
            torch.testing.assert_close(tensor, reduced(values).bfloat16(), rtol=2**-7, atol=0)
    for numel in (9, STAGED_FROM):
        # 257 in bfloat16 is 256: each machine's sum is rounded once, and nothing else.
        tensor = torch.full((numel,), 257.0)
        group.sum_compressed(tensor, torch.bfloat16).wait()
        staged = numel > 9
        sums = [257.0 * size for size in sizes] if staged else [257.0] * n
        assert tensor.eq(torch.tensor(sums).bfloat16().sum().float()).all(), numel
    numel = PIECE_ACROSS  # several pieces
    for outside in range(n):  # one rank has a tensor in no window: all go the same way
        shared = group.empty(numel, torch.float32)
        tensor = torch.empty(numel) if world.rank == outside else shared
        tensor = all_reduce_in(group, tensor.fill_(world.rank + 1))
        assert tensor.eq(n * (n + 1) / 2).all()
    flags = all_reduce_in(group, torch.tensor([world.rank == 0, False]))
    assert flags.tolist() == [True, False]
    group.shutdown()
    group = over(world, sizes, 0.5)
    if world.rank > 0:
        near = machines(sizes, world.rank) == 0
        missing = "rank 0$" if near else "ranks on other machines|another rank has given up"
        with pytest.raises(RuntimeError, match=missing):
            group.barrier().wait()
    dist.barrier()
    group = over(world, sizes)
    tensor = torch.ones(5 if machines(sizes, world.rank) == 0 else 6)
    with pytest.raises(RuntimeError, match=r"different operations: .* another machine's ranks all"):
        group.allreduce([tensor]).wait()


@pytest.mark.parametrize("sizes", [(2, 1), slow((2, 2)), slow((1, 1)), slow((1, 3))])
def test_several_machines(ranks, sizes):
    ranks("gloo", sum(sizes))(over_machines, sizes)


# Parts of a group --------------------------------------------------------------------------------


def a_mesh(world):
    # Here, since it takes a second, which no other test needs.
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (1, world.world_size), mesh_dim_names=("outer", "inner"))
    for name, ranks in (("outer", [world.rank]), ("inner", [*range(world.world_size)])):
        group = mesh.get_group(name)
        assert dist.get_process_group_ranks(group) == ranks
        tensor = funcol.all_reduce(torch.tensor([world.rank]), "sum", mesh[name])
        assert tensor.tolist() == [sum(ranks)]
    whole = distribute_tensor(torch.arange(4.0), mesh["inner"], [Shard(0)])
    assert whole.sum().full_tensor().item() == 6.0
    model = torch.nn.Linear(1, 1, bias=False)
    wrapped = DistributedDataParallel(model, device_mesh=mesh["inner"])
    wrapped(torch.full((1, 1), 2.0 * world.rank)).backward()
    assert model.weight.grad.item() == world.world_size - 1


@pytest.mark.parametrize("backend", ["node", "mpi"])
def test_a_device_mesh(ranks, backend):
    ranks(backend, 2)(a_mesh)


def parts_of_parts(world):
    n, r = world.world_size, world.rank
    turned = dist.split_group(split_ranks=[list(range(n))[::-1]])
    assert dist.get_group_rank(turned, r) == n - 1 - r
    part = dist.split_group(turned, [[0, n - 1], *([i] for i in range(1, n - 1))])
    tensor = torch.tensor([r + 1])
    dist.all_reduce(tensor, group=part)
    assert tensor.item() == (n + 1 if r in (0, n - 1) else r + 1)
    first = torch.tensor([r])
    dist.broadcast(first, group=turned, group_src=0)  # by gloo on node
    assert first.item() == n - 1
    reducer = Reducer(torch.nn.Linear(2, 2), turned)
    assert "by shared memory" in repr(reducer)
    reducer.remove()
    dist.destroy_process_group(part)
    with pytest.raises(TypeError, match="does not support shrinking"):
        dist.shrink_group([0] if r else [1], turned)


@pytest.mark.parametrize("backend", ["node", "mpi", slow("gloo")])
def test_a_group_is_split_as_gloos_is(ranks, backend):
    if torch.__version__ < "2.15":
        pytest.skip("this torch splits groups only where there is a GPU")
    for called in (a_group_that_is_split, parts_of_parts):
        ranks(backend, 3)(called)


# Beside a gloo group -----------------------------------------------------------------------------


def beside(world):
    group = dist.new_group(list(range(world.world_size)))
    ours = shared_memory_beside(group)
    assert shared_memory_beside(group) is ours
    assert shared_memory_beside(ours) is ours
    tensor = torch.tensor([world.rank + 1.0])
    dist.all_reduce(tensor, group=ours)
    assert tensor.item() == sum(range(1, world.world_size + 1))
    parts = [torch.empty(1) for _ in range(world.world_size)]
    dist.all_gather(parts, torch.tensor([float(world.rank)]), group=ours)
    assert torch.cat(parts).tolist() == list(range(world.world_size))
    gone = weakref.ref(ours)
    dist.destroy_process_group(group)
    del group, ours
    gc.collect()
    return gone() is None


def test_a_group_beside_is_opened_once_and_closed_with_its_gloo_group(ranks):
    assert all(ranks("gloo", 3)(beside))


def one_rank_alone(world):
    groups = [dist.new_group([rank]) for rank in range(world.world_size)]
    model = torch.nn.Linear(2, 2)
    reducer = Reducer(model, groups[world.rank])
    optimizer = NodeSharedSGD(model.parameters(), lr=1.0, reducer=reducer)
    before = model.bias.clone()
    optimizer.backward_and_step(model(torch.ones(1, 2)).sum())
    assert torch.equal(model.bias, before - 1)
    assert "by gloo" in repr(reducer)


def test_a_group_of_one_rank_shares_with_nobody_and_steps_alike(ranks):
    ranks("gloo", 2)(one_rank_alone)


def one_rank_to_a_machine(world):
    """The ranks' networks seem to differ, as those of two machines do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "ddp_from_scratch.node.backend.StoreCommunicator",
            lambda *arguments: StoreCommunicator(*arguments, machine=str(world.rank)),
        )
        group = dist.new_group(list(range(world.world_size)))
        assert shared_memory_beside(group) is group


def test_one_rank_to_a_machine_stays_with_gloo(ranks):
    ranks("gloo", 2)(one_rank_to_a_machine)


def limited(call):
    def of_a_page(*arguments):
        if arguments[-1] > mmap.PAGESIZE:
            raise OSError("no room")
        return call(*arguments)

    return of_a_page


def with_little_room(world, where):
    """A page can be shared, and no more: nor the memory of a barrier."""
    told = []
    with pytest.MonkeyPatch.context() as patch:
        if world.rank in where:
            for name in ("_nameless_file", "_map_file"):
                patch.setattr(shared_memory, name, limited(getattr(shared_memory, name)))
        patch.setattr("warnings.warn", lambda text, **_: told.append(text))
        group = dist.new_group()
        model = torch.nn.Linear(3, 3)
        reducer = Reducer(model, group)
    assert [text.endswith("no room") for text in told] == [True] * (world.rank == 0)
    assert f"by {dist.get_backend()})" in repr(reducer)
    model(torch.full((1, 3), world.rank + 1.0)).sum().backward()
    assert model.weight.grad.eq(1.5).all()


@pytest.mark.parametrize("where", [(0,), (1,), slow((0, 1))], ids=str)
@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_without_room_for_a_barrier_all_ranks_send_messages(ranks, backend, where):
    ranks(backend, 2)(with_little_room, where)


def with_small_files_alone(world):
    """Memory of ranks counts as a file."""
    group, limits = dist.new_group(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, limits[1]))
    try:
        with (
            pytest.warns(UserWarning, match="File too large")
            if world.rank == 0
            else contextlib.nullcontext()
        ):
            assert shared_memory_beside(group) is group
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_limit_of_file_sizes_is_named(ranks):
    ranks("gloo", 2)(with_small_files_alone)


def in_part_of_the_ranks(world):
    r = world.rank
    dist.new_group([0])
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    if r < 2:
        tensor = torch.tensor([r + 1.0])
        dist.all_reduce(tensor, group=shared_memory_beside(groups[0]))
        assert tensor.item() == 3.0
    # The names of groups that come later are the same on all ranks.
    for group in (dist.group.WORLD, dist.new_group(), *groups):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=shared_memory_beside(group))
            assert tensor.item() == group.size()


def test_ranks_may_be_in_different_groups(ranks):
    ranks("gloo", 3)(in_part_of_the_ranks)


def transports(world):
    model = torch.nn.Linear(2, 2)
    shown = []
    for options in ({}, {"shared_memory": False}):
        reducer = Reducer(model, **options)
        shown.append(repr(reducer))
        reducer.remove()
    return shown


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_repr_names_the_transport(ranks, backend):
    for first, second in ranks(backend, 2)(transports):
        assert "by shared memory" in first
        assert ("by gloo" if backend == "gloo" else "by shared memory") in second


def by_its_own_group(state, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future()


def transport_of_hooks(world):
    own = dist.new_group()
    reducer, elsewhere = Reducer(torch.nn.Linear(2, 2)), Reducer(torch.nn.Linear(2, 2), own)
    shown = []
    for hook, states in (
        (by_its_own_group, [None]),
        (comm_hooks.bf16_compress_hook, [None, dist.group.WORLD, own]),
        (comm_hooks.power_sgd.power_sgd_hook, map(PowerSGDState, [1, 1], [0, 0], [None, own])),
    ):
        for state in states:
            reducer.register_comm_hook(state, hook)
            shown.append("by shared memory" in repr(reducer))
    elsewhere.register_comm_hook(None, comm_hooks.average)
    return [*shown, "by shared memory" in repr(elsewhere)]


def test_a_hook_that_sends_through_gloo_is_not_shown_as_shared_memory(ranks):
    # Of the user's own; for this Reducer's group, twice, and for another; the same of PowerSGD's.
    shown = [False, True, True, False, True, False, False]
    assert ranks("gloo", 2)(transport_of_hooks) == [shown] * 2
    assert ranks("mpi", 2)(transport_of_hooks) == [[True] * 7] * 2


def groups_of_some(world):
    """torch names the groups that come later by a count that all ranks must agree on."""
    some = dist.new_group([0, 1])
    if world.rank < 2:
        shared_memory_beside(some)
    every = dist.new_group(list(range(world.world_size)))
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=every)
    return tensor.item()


def test_a_group_beside_some_ranks_group_does_not_disturb_later_groups(ranks):
    assert ranks("gloo", 3)(groups_of_some) == [3.0] * 3


ELSEWHERE = """
import ctypes, mmap, sys
import torch
del mmap.MADV_HUGEPAGE
sys.platform, ctypes.CDLL, ctypes.PyDLL = "win32", None, None
from ddp_from_scratch import Reducer
from ddp_from_scratch.node import semaphore
assert not semaphore.AVAILABLE
"""


def test_a_reducer_is_imported_where_there_is_no_shared_memory():
    with Run(sys.executable, "-c", ELSEWHERE) as run:
        assert run.wait() == 0, run.text


# Failures ----------------------------------------------------------------------------------------

KILLED = """
import os, sys, time
import torch, torch.distributed as dist
import ddp_from_scratch.node
dist.init_process_group("node", init_method="file://" + sys.argv[2], rank=int(sys.argv[1]),
                        world_size=2)
tensor = torch.ones(3)
dist.all_reduce(tensor)
print("met", os.getpid(), flush=True)
if sys.argv[1] == "1":
    time.sleep(100)
try:
    dist.all_reduce(tensor)
except RuntimeError as error:
    print(error, flush=True)
    os._exit(3)
"""


def test_a_killed_rank_is_noticed_long_before_the_timeout(tmp_path):
    command = (sys.executable, "-c", KILLED)
    with Run(*command, "0", str(tmp_path / "met")) as zero:
        with Run(*command, "1", str(tmp_path / "met")) as one:
            one.wait_for("met")
            one.signal(signal.SIGKILL)
            one.wait()
        # The group's timeout is half an hour.
        assert zero.wait() == 3, zero.text
        assert "all_reduce number 2 on rank 0" in zero.out
        assert "rank 1 ended without coming to it" in zero.out


KILLED_IN_SETUP = """
import os, signal, sys
from datetime import timedelta
import torch.distributed as dist
from ddp_from_scratch.node.staging import PIECE_ACROSS
from ddp_from_scratch.node.store_communicator import StoreCommunicator
rank, victim = int(sys.argv[1]), int(sys.argv[3])
store = dist.TCPStore("127.0.0.1", int(sys.argv[2]), 3, rank == 0)
together = StoreCommunicator(store, rank, [0, 1, 2], timedelta(minutes=30)).split_by_machine()
store.set(f"knows {rank}", "")
if rank == victim:
    store.wait([f"knows {other}" for other in range(3)])
    os.kill(os.getpid(), signal.SIGKILL)
try:
    together.allgather(None)
except RuntimeError as error:
    print(error, flush=True)
    os._exit(3)
"""


@pytest.mark.parametrize("victim", [0, slow(2)])  # rank 0 keeps the store
def test_a_rank_killed_in_the_setup_is_noticed_long_before_the_timeout(victim):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    with contextlib.ExitStack() as stack:
        command = (sys.executable, "-c", KILLED_IN_SETUP)
        runs = [
            stack.enter_context(Run(*command, str(rank), port, str(victim))) for rank in range(3)
        ]
        for rank, run in enumerate(runs):
            if rank != victim:
                assert run.wait() == 3, run.text
                assert "ended without coming to it" in run.out
        assert any(f"rank {victim} ended without coming to it" in run.out for run in runs)


KILLED_ASLEEP = """
import os, signal, sys
import torch, torch.distributed as dist
import ddp_from_scratch.node
rank = int(sys.argv[1])
dist.init_process_group("node", init_method="file://" + sys.argv[2], rank=rank, world_size=5)
processes = [None] * 5
dist.all_gather_object(processes, os.getpid())
tensor = torch.ones(3)
if rank == 4:
    # Rank 0 comes, sleeps in the first round, and is killed before the second.
    memory = dist.group.WORLD.checked_barrier._memory
    while memory.come[0][0] < 1:
        os.sched_yield()
    os.kill(processes[0], signal.SIGKILL)
try:
    for _ in range(2):
        dist.all_reduce(tensor)
except RuntimeError as error:
    print(error, flush=True)
    os._exit(3)
"""


def test_a_rank_killed_asleep_in_a_barrier_is_noticed_by_all(tmp_path):
    with contextlib.ExitStack() as stack:
        command = (sys.executable, "-c", KILLED_ASLEEP)
        runs = [
            stack.enter_context(Run(*command, str(rank), str(tmp_path / "met")))
            for rank in range(5)
        ]
        for run in runs[1:]:
            # The group's timeout is half an hour.
            assert run.wait() == 3, run.text
            assert "ended without coming to it" in run.out


KILLED_FIRST = """
import os, select, signal, sys
import torch, torch.distributed as dist
import ddp_from_scratch.node
rank = int(sys.argv[1])
dist.init_process_group("node", init_method="file://" + sys.argv[2], rank=rank, world_size=3)
processes = [None] * 3
dist.all_gather_object(processes, os.getpid())
zero = os.pidfd_open(processes[0])
tensor = torch.ones(3)
dist.all_reduce(tensor)
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 1:
    select.select([zero], [], [])  # readable once that has ended
try:
    dist.all_reduce(tensor)
except RuntimeError as error:
    print(error, flush=True)
    os._exit(3)
"""


def test_a_late_rank_names_the_killed_one_and_not_those_that_have_gone_for_it(tmp_path):
    with contextlib.ExitStack() as stack:
        command = (sys.executable, "-c", KILLED_FIRST)
        runs = [
            stack.enter_context(Run(*command, str(rank), str(tmp_path / "met")))
            for rank in range(3)
        ]
        for run in runs[:2]:
            assert run.wait() == 3, run.text
            assert "failed: rank 2 ended without coming to it" in run.out


FAILED = """
import sys, time
import torch, torch.distributed as dist
from ddp_from_scratch.node import shared_memory_beside
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=int(sys.argv[1]),
                        world_size=2)
group = shared_memory_beside(dist.group.WORLD)
print("met", flush=True)
if sys.argv[1] == "0":
    time.sleep(100)
dist.all_reduce(torch.ones(3), group=group, async_op=True)
raise ValueError
"""


def test_a_rank_that_fails_ends_though_another_does_not_come(tmp_path):
    command = (sys.executable, "-c", FAILED)
    zero, one = (Run(*command, rank, str(tmp_path / "met")) for rank in "01")
    with zero, one:
        zero.wait_for("met")
        assert one.wait(30.0) == 1, one.text
        assert "ValueError" in one.err


def a_child_that_ends(world):
    group = dist.new_group([0, 1])
    ours = shared_memory_beside(group)
    if world.rank == 1:
        child = os.fork()
        if child == 0:
            ours.shutdown()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        time.sleep(0.7)  # in which rank 0 looks for ranks that have left
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=ours)
    assert tensor.tolist() == [2.0] * 3
    dist.destroy_process_group(group)


def test_a_forked_child_that_closes_its_groups_is_not_taken_for_the_rank(ranks):
    ranks("gloo", 2)(a_child_that_ends)


def late_for_the_setup(world):
    store = dist.PrefixStore("late", dist.distributed_c10d._get_default_store())
    if world.rank == 0:
        with pytest.raises(CommunicationError, match=r"0\.2 s passed without rank 1$"):
            StoreCommunicator(store, 0, [0, 1], timedelta(seconds=0.2)).allgather(None)
    dist.barrier()


def test_a_rank_that_does_not_come_to_the_setup_is_named(ranks):
    ranks("gloo", 2)(late_for_the_setup)


def memory_of_many_steps(world):
    def mapped():
        return sum("memfd:ddp" in line for line in open(f"/proc/{os.getpid()}/maps"))

    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    model = torch.nn.Linear(300, 300)
    Reducer(model).remove()
    gc.collect()
    before = mapped(), descriptors()
    for _ in range(20):
        reducer = Reducer(model)
        model(torch.ones(1, 300)).sum().backward()
        reducer.remove()
        del reducer
        gc.collect()
    # What the last one had is given back when the next is made.
    Reducer(model).remove()
    gc.collect()
    # Memory of earlier tests may have gone meanwhile.
    assert mapped() <= before[0]
    assert descriptors() <= before[1]


def test_no_memory_or_descriptor_is_left_by_reducers(ranks):
    ranks("gloo", 2)(memory_of_many_steps)


REOPENED = """
import os, sys, time
import torch, torch.distributed as dist
from ddp_from_scratch import Reducer
model = torch.nn.Linear(2, 2)
reducer = None
for number in range(3):
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:" + sys.argv[2], world_size=2,
                            rank=int(sys.argv[1]))
    reducer = reducer or Reducer(model)
    model.zero_grad()
    model(torch.full((1, 2), float(sys.argv[1]))).sum().backward()
    assert model.weight.grad.eq(0.5).all()
    dist.destroy_process_group()
    closed = f"{sys.argv[3]}/{number}"
    if sys.argv[1] == "0":
        open(closed, "w").close()
    while not os.path.exists(closed):  # or rank 1 would find the store that rank 0 closes
        time.sleep(0.01)
print(reducer)
"""


def test_a_reducer_outlives_default_groups_on_one_port(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    zero, one = (Run(sys.executable, "-c", REOPENED, rank, port, str(tmp_path)) for rank in "01")
    with zero, one:
        for run in (zero, one):
            assert run.wait() == 0, run.text
            assert "by shared memory" in run.out
