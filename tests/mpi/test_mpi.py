"""The "mpi" backend over mpi4py: torch.distributed's calls give torch.distributed's answers."""

import gc
import signal
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives as funcol
from torch.fx.experimental.proxy_tensor import make_fx

from ddp_from_scratch import mpi
from ddp_from_scratch.mpi import datatypes
from ddp_from_scratch.mpi.p2p import P2PWork
from ddp_from_scratch.node.barrier_memory import EAGER_NBYTES
from tests.support.ranks import mpirun

SIZES = (2, 3, 4)
DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8),
    *(torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128),
)


@pytest.fixture(params=SIZES)
def crew(ranks, request):
    return ranks("mpi", request.param)


def all_reduce_every_dtype(world):
    n = world.world_size
    for dtype in DTYPES:
        tensor = torch.full((5,), world.rank + 1, dtype=dtype)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [n * (n + 1) / 2] * 5, dtype


def test_all_reduce_sums_every_dtype(crew):
    crew(all_reduce_every_dtype)


def all_reduce_operations(world):
    n, r = world.world_size, world.rank
    expected = {
        dist.ReduceOp.SUM: n * (n + 1) // 2,
        dist.ReduceOp.PRODUCT: torch.arange(1, n + 1).prod().item(),
        dist.ReduceOp.MIN: 1,
        dist.ReduceOp.MAX: n,
        dist.ReduceOp.BAND: [0, 0, 0][n - 2],
        dist.ReduceOp.BOR: [3, 3, 7][n - 2],
        dist.ReduceOp.BXOR: [3, 0, 4][n - 2],
    }
    for op, value in expected.items():
        tensor = torch.tensor([r + 1])
        dist.all_reduce(tensor, op)
        assert tensor.item() == value, op
    tensor = torch.tensor([r + 1.0])
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    assert tensor.item() == (n + 1) / 2
    for op, value in {dist.ReduceOp.SUM: True, dist.ReduceOp.PRODUCT: False}.items():
        tensor = torch.tensor([r == 0])
        dist.all_reduce(tensor, op)
        assert tensor.item() is value, op


def test_all_reduce_operations(crew):
    crew(all_reduce_operations)


def wrong_operations(world):
    for op, dtype in ((dist.ReduceOp.BAND, torch.float32), (dist.ReduceOp.MAX, torch.complex64)):
        with pytest.raises((ValueError, RuntimeError), match="reduce"):
            dist.all_reduce(torch.ones(2, dtype=dtype), op)
    with pytest.raises(RuntimeError, match=r"cannot reduce tensors of torch\.float8_e4m3fn"):
        dist.all_reduce(torch.ones(8, dtype=torch.float8_e4m3fn))
    dist.barrier()  # and the group still works


def test_an_operation_that_mpi_does_not_have_is_an_error(ranks):
    ranks("mpi", 2)(wrong_operations)


def sixteen_bit_floats_are_summed_in_float32(world):
    # 1 + 2**-8 is not a bfloat16; summed in float32, 1 + 2**-8 + 2**-8 rounds to 1 + 2**-7.
    tensor = torch.tensor([1.0 if world.rank == 0 else 2**-8], dtype=torch.bfloat16)
    dist.all_reduce(tensor)
    assert tensor.item() == 1 + 2**-7


def test_sixteen_bit_floats_are_rounded_once(ranks):
    ranks("mpi", 3)(sixteen_bit_floats_are_summed_in_float32)


def odd_tensors(world):
    n = world.world_size
    transposed = torch.full((3, 4), world.rank + 1.0).t()
    dist.all_reduce(transposed)
    assert transposed.tolist() == [[n * (n + 1) / 2] * 3] * 4
    every_second = torch.full((8,), world.rank + 1.0)
    dist.broadcast(every_second[::2], src=1)
    assert every_second.tolist() == [2.0, world.rank + 1.0] * 4
    gathered = [torch.empty(4, 3) for _ in range(n)]
    dist.all_gather(gathered, torch.arange(12.0).view(3, 4).t() + world.rank)
    assert all(g.equal(torch.arange(12.0).view(3, 4).t() + i) for i, g in enumerate(gathered))
    scalar = torch.tensor(world.rank + 1.0)
    dist.all_reduce(scalar)
    assert scalar.item() == n * (n + 1) / 2
    one_of_many = torch.full((1, 2), world.rank + 1.0)[:, 0]
    assert one_of_many.stride() == (2,)
    dist.all_reduce(one_of_many)
    assert one_of_many.item() == n * (n + 1) / 2
    empty = torch.empty(0, 3)
    dist.all_reduce(empty)
    dist.broadcast(empty, src=0)
    assert empty.shape == (0, 3)


def test_strided_empty_and_zero_dimensional_tensors(crew):
    crew(odd_tensors)


def moving_collectives(world):
    n, r = world.world_size, world.rank
    for dtype in (*DTYPES, torch.bool):
        tensor = torch.full((2, 2), r % 2, dtype=dtype)
        dist.broadcast(tensor, src=1)
        assert tensor.equal(torch.ones(2, 2, dtype=dtype))
    mine = torch.tensor([r, 10 * r])
    everyone = [torch.empty(2, dtype=torch.int64) for _ in range(n)]
    dist.all_gather(everyone, mine)
    assert [t.tolist() for t in everyone] == [[i, 10 * i] for i in range(n)]
    stacked = torch.empty(2 * n, dtype=torch.int64)
    dist.all_gather_into_tensor(stacked, mine)
    assert stacked.tolist() == [v for i in range(n) for v in (i, 10 * i)]
    parts = [torch.empty(2, dtype=torch.int64) for _ in range(n)] if r == 1 else None
    dist.gather(mine, parts, dst=1)
    if parts is not None:
        assert [t.tolist() for t in parts] == [[i, 10 * i] for i in range(n)]
    received = torch.empty(2, dtype=torch.int64)
    dist.scatter(received, [torch.tensor([i, i * i]) for i in range(n)] if r == 0 else None, src=0)
    assert received.tolist() == [r, r * r]


def test_broadcast_gather_and_scatter(crew):
    crew(moving_collectives)


def scattering_collectives(world):
    n, r = world.world_size, world.rank
    tensor = torch.full((3,), r + 1.0)
    dist.reduce(tensor, dst=1)
    assert tensor.tolist() == [n * (n + 1) / 2 if r == 1 else r + 1.0] * 3
    # Rank r gets r + 1 elements: everybody's part r.
    own = torch.empty(r + 1)
    dist.reduce_scatter(own, [torch.full((i + 1,), float(r + i)) for i in range(n)])
    assert own.tolist() == [n * (n - 1) / 2 + n * r] * (r + 1)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        own = torch.empty(2, dtype=dtype)
        dist.reduce_scatter_tensor(own, torch.arange(2 * n).to(dtype))
        assert own.tolist() == [n * 2 * r, n * (2 * r + 1)]
    average = torch.empty(1)
    dist.reduce_scatter_tensor(average, torch.full((n,), r + 1.0), op=dist.ReduceOp.AVG)
    assert average.item() == (n + 1) / 2


def test_reduce_and_reduce_scatter(crew):
    crew(scattering_collectives)


def all_to_all(world):
    n, r = world.world_size, world.rank
    received = [torch.empty(s + 1) for s in range(n)]
    dist.all_to_all(received, [torch.full((r + 1,), 10.0 * r + s) for s in range(n)])
    assert [t.tolist() for t in received] == [[10.0 * s + r] * (s + 1) for s in range(n)]
    rows = torch.empty(n, 2)
    dist.all_to_all_single(rows, torch.full((n, 2), float(r)))
    assert rows.tolist() == [[float(s)] * 2 for s in range(n)]
    # Rank r sends s + 1 rows to rank s.
    received, sent = torch.empty(n * (r + 1), 2), torch.full((n * (n + 1) // 2, 2), float(r))
    dist.all_to_all_single(received, sent, [r + 1] * n, list(range(1, n + 1)))
    assert received[:, 0].tolist() == [float(s) for s in range(n) for _ in range(r + 1)]
    with pytest.raises(ValueError, match=f"split sizes that add up to {n}"):
        dist.all_to_all_single(rows, torch.ones(n, 2), [n + 1] + [0] * (n - 1), [1] * n)


def test_all_to_all(crew):
    crew(all_to_all)


def gathering_of_different_sizes(world):
    n, r = world.world_size, world.rank
    gathered = [torch.empty(s + 1) for s in range(n)]
    dist.all_gather(gathered, torch.full((r + 1,), float(r)))
    assert [t.tolist() for t in gathered] == [[float(s)] * (s + 1) for s in range(n)]


def test_all_gather_of_different_sizes(crew):
    crew(gathering_of_different_sizes)


def coalesced(world):
    n, r = world.world_size, world.rank
    tensors = [torch.full((i + 1,), r + 1.0) for i in range(3)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert all(tensor.eq(n * (n + 1) / 2).all() for tensor in tensors)
    sent, received = torch.tensor([float(r)]), torch.empty(1)
    operations = [
        dist.P2POp(dist.isend, sent, (r + 1) % n),
        dist.P2POp(dist.irecv, received, (r - 1) % n),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert received.item() == (r - 1) % n


def test_coalesced_operations(crew):
    crew(coalesced)


def monitored_barrier(world):
    dist.monitored_barrier()
    group = dist.new_group()
    last = world.world_size - 1
    if world.rank != last:
        with pytest.raises(RuntimeError, match=rf"Rank {last} failed to pass monitoredBarrier"):
            dist.monitored_barrier(group, timeout=timedelta(seconds=0.3), wait_all_ranks=True)
    dist.barrier()


def test_monitored_barrier_names_who_is_missing(crew):
    if mpi.BACKEND != "mpi":
        pytest.skip(f"torch {torch.__version__} has monitored_barrier for gloo alone")
    crew(monitored_barrier)


def subgroups_of_one(world):
    alone, _ = dist.new_subgroups(group_size=1)
    tensor = torch.tensor([world.rank + 1.0])
    dist.all_reduce(tensor, group=alone)
    assert tensor.item() == world.rank + 1


def test_new_subgroups(crew):
    crew(subgroups_of_one)


def a_group_that_is_split(world):
    n, r = world.world_size, world.rank
    odd = dist.split_group(split_ranks=[list(range(0, n, 2)), list(range(1, n, 2))])
    tensor = torch.tensor([r])
    dist.all_reduce(tensor, group=odd)
    assert tensor.item() == sum(range(r % 2, n, 2))
    assert dist.get_process_group_ranks(odd) == list(range(r % 2, n, 2))
    last = dist.split_group(split_ranks=[[n - 1]])
    assert (
        dist.get_world_size(last) == 1 if r == n - 1 else last == dist.GroupMember.NON_GROUP_MEMBER
    )


def test_split_group(crew):
    if mpi.BACKEND != "mpi":
        pytest.skip(f"torch {torch.__version__} splits groups only where there is a GPU")
    crew(a_group_that_is_split)


def object_collectives(world):
    n, r = world.world_size, world.rank
    everyone = [None] * n
    dist.all_gather_object(everyone, {"rank": r, "text": "x" * r})
    assert everyone == [{"rank": i, "text": "x" * i} for i in range(n)]
    one = [("from", r)]
    dist.broadcast_object_list(one, src=n - 1)
    assert one == [("from", n - 1)]
    gathered = [None] * n if r == 0 else None
    dist.gather_object(r, gathered, dst=0)
    assert gathered == (list(range(n)) if r == 0 else None)
    received = [None]
    dist.scatter_object_list(received, [f"for {i}" for i in range(n)], src=0)
    assert received == [f"for {r}"]


def test_object_collectives(crew):
    crew(object_collectives)


def asynchronous(world):
    n, r = world.world_size, world.rank
    tensors = [torch.full((1000,), float(i * (r + 1))) for i in range(20)]
    handles = [dist.all_reduce(t, async_op=True) for t in tensors]
    for handle in reversed(handles):
        assert handle.wait()
    assert all(handle.is_completed() for handle in handles)
    for i, tensor in enumerate(tensors):
        assert tensor.eq(i * n * (n + 1) / 2).all()
    tensor = torch.ones(4)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    assert future.then(lambda f: f.value()[0] / n).wait().tolist() == [1.0] * 4
    # The handle is dropped at once; the tensor must live until the operation has ended.
    dist.all_reduce(torch.ones(100_000), async_op=True)
    dist.barrier()


def test_asynchronous_operations_and_futures(crew):
    crew(asynchronous)


def messages(world):
    n, r = world.world_size, world.rank
    after, before = (r + 1) % n, (r - 1) % n
    received = torch.empty(3)
    # Every rank posts its receive before its send, which must not deadlock.
    receive = dist.irecv(received, src=before)
    send = dist.isend(torch.full((3,), float(r)), dst=after)
    receive.wait(), send.wait()
    assert received.tolist() == [float(before)] * 3
    if r == 0:  # two tags, received in the other order
        dist.isend(torch.tensor([1]), dst=1, tag=1)
        dist.isend(torch.tensor([2]), dst=1, tag=2)
    if r == 1:
        second, first = torch.empty(1, dtype=torch.int64), torch.empty(1, dtype=torch.int64)
        dist.recv(second, src=0, tag=2)
        dist.recv(first, src=0, tag=1)
        assert (first.item(), second.item()) == (1, 2)
    dist.barrier()
    if r == 0:
        senders = set()
        for _ in range(n - 1):
            tensor = torch.empty(4, 2)
            sender = dist.recv(tensor.t())  # from any rank, into a strided tensor
            assert tensor.eq(float(sender)).all()
            senders.add(sender)
        assert senders == set(range(1, n))
    else:
        dist.send(torch.full((2, 4), float(r)), dst=0)


def test_send_and_receive(crew):
    crew(messages)


def messages_before_collectives(world):
    """MPI moves some only while their sender is in MPI, and it sleeps there until all have come."""
    handles = []
    for size in (1000, 3000, 5000, 20_000, 100_000, 1_000_000):
        for count in (1, 20, 200):
            tensor = torch.zeros(size, dtype=torch.uint8)
            if world.rank == 0:
                handles += [dist.isend(tensor, dst=1) for _ in range(count)]
            if world.rank == 1:
                for _ in range(count):
                    dist.recv(tensor, src=0)
            dist.all_reduce(torch.ones(5), async_op=count == 20)
    for handle in handles:
        handle.wait()
    dist.barrier()


def test_messages_go_on_while_their_sender_sleeps(crew):
    crew(messages_before_collectives)


def subgroups(world):
    even = dist.new_group([r for r in range(world.world_size) if r % 2 == 0])
    last = dist.new_group([world.world_size - 1, 0])
    if world.rank % 2 == 0:
        tensor = torch.tensor([world.rank + 1])
        dist.all_reduce(tensor, group=even)
        assert tensor.item() == sum(r + 1 for r in range(world.world_size) if r % 2 == 0)
    if world.rank in (0, world.world_size - 1):
        tensor = torch.tensor([world.rank])
        dist.broadcast(tensor, src=world.world_size - 1, group=last)
        assert tensor.item() == world.world_size - 1
        dist.destroy_process_group(last)
    if world.rank % 2 == 0:
        dist.destroy_process_group(even)


def test_subgroups_where_only_members_call(crew):
    crew(subgroups)


def a_rank_that_does_not_come(world):
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=0.5))
    patient = dist.new_group([0, 1, 2])
    if world.rank != 1:
        named = (
            rf"barrier number 1 on rank {world.rank} .*the timeout of 0\.5 s passed without rank 1$"
        )
        with pytest.raises(RuntimeError, match=named):
            dist.barrier(group=group)
        with pytest.raises(RuntimeError, match=r"number 2 .*the group has failed before: the"):
            dist.all_reduce(torch.ones(1), group=group)
        handle = dist.all_reduce(torch.ones(1), group=patient, async_op=True)
        with pytest.raises(RuntimeError, match=r"number 1 .* within 0\.1 s: rank 1 did not come"):
            handle.wait(timedelta(seconds=0.1))
    if world.rank == 0:
        with pytest.raises(RuntimeError, match=r"recv from rank 1 on rank 0 .*0\.5 s"):
            dist.recv(torch.empty(1), src=1, group=group)
    dist.barrier()
    if world.rank == 1:
        dist.send(torch.empty(1), dst=0, group=group)
        dist.all_reduce(torch.ones(1), group=patient)
        # It comes late, and must not go on as if the others had been with it.
        with pytest.raises(RuntimeError, match=r"number 1 .*another rank has given up on it"):
            dist.barrier(group=group)
    else:
        assert handle.wait()


def test_a_timeout_names_the_operation_and_who_is_missing(ranks):
    ranks("mpi", 3)(a_rank_that_does_not_come)


@contextmanager
def interrupted_by(handler, seconds):
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def a_call_within_a_call(world):
    group = dist.new_group(timeout=timedelta(seconds=2))
    if world.rank == 0:
        told = r"barrier number 2 .* did not end within 4 s"
        with (
            interrupted_by(lambda *_: dist.barrier(group=group), 0.5),
            pytest.raises(RuntimeError, match=told),
        ):
            dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()
    dist.destroy_process_group(group)


def test_a_call_that_waits_for_the_one_that_it_interrupts_gives_up(ranks):
    ranks("mpi", 2)(a_call_within_a_call)


def late(*_):
    raise TimeoutError("the program's own limit")


def a_call_that_an_error_leaves(world):
    """One rank leaves a call while it waits for the others, and another one half way."""
    patience = timedelta(seconds=20)
    waiting, reducing = dist.new_group(timeout=patience), dist.new_group(timeout=patience)
    dist.all_reduce(torch.ones(EAGER_NBYTES), group=reducing)
    if world.rank == 0:
        told = r"number 1 .* failed: the program's own limit"
        with interrupted_by(late, 0.2), pytest.raises(RuntimeError, match=told):
            dist.all_reduce(torch.ones(1), group=waiting)
        reducing._collectives._all_reduce._reduce_staged = late
    dist.barrier()
    told = "number 2 .* the program's own limit" if world.rank == 0 else "given up on it"
    with pytest.raises(RuntimeError, match=told):
        dist.all_reduce(torch.ones(EAGER_NBYTES), group=reducing)
    # Its next call must not be taken for the one that it has left.
    told = r"left with TimeoutError\(" if world.rank == 0 else "given up on it"
    with pytest.raises(RuntimeError, match=told):
        dist.all_reduce(torch.ones(1), group=waiting)


def test_a_call_that_ends_with_an_error_on_one_rank_ends_on_all(ranks):
    ranks("mpi", 2)(a_call_that_an_error_leaves)


class Interrupted:
    """MPI's request, and a signal that comes while somebody looks at it."""

    def Test(self, status):  # mpi4py's name
        signal.raise_signal(signal.SIGALRM)
        return True


def a_handler_that_looks_at_messages(world):
    seen = []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(message.is_completed()))
    try:
        message = P2PWork("recv", timedelta(seconds=5), Interrupted(), torch.empty(1))
        assert message.wait()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert seen == [False]


def test_a_signals_handler_does_not_wait_for_who_it_interrupts(ranks):
    ranks("mpi", 2)(a_handler_that_looks_at_messages)


def different_calls(world):
    r = world.rank
    calls = {
        "sizes": lambda g: dist.all_reduce(torch.ones(10 if r else 5), group=g),
        "dtypes": lambda g: dist.all_reduce(
            torch.ones(4, dtype=torch.float32 if r else torch.int32), group=g
        ),
        "operations": lambda g: dist.all_reduce(
            torch.ones(4), dist.ReduceOp.SUM if r else dist.ReduceOp.MAX, group=g
        ),
        "roots": lambda g: dist.broadcast(torch.ones(4), src=min(r, 1), group=g),
        "kinds": lambda g: dist.broadcast(torch.ones(4), src=0, group=g) if r else dist.barrier(g),
    }
    for name, call in calls.items():
        group = dist.new_group(timeout=timedelta(seconds=20))
        with pytest.raises(
            RuntimeError, match=r"called different operations: rank 0 .*; ranks 1, 2 "
        ):
            call(group)
        print(name)


def test_ranks_that_call_different_operations_are_told(ranks):
    ranks("mpi", 3)(different_calls)


def pairs_that_do_not_fit(world):
    n, r = world.world_size, world.rank
    ones = [torch.ones(2) for _ in range(n)]

    def as_list(group):
        received = [torch.empty(3 if (r, s) == (2, 1) else 2) for s in range(n)]
        dist.all_to_all(received, ones, group=group)

    def as_rows(group):  # each two rows, but rank 2 expects three of rank 1 and one of rank 0
        splits = [1, 3, 2] if r == 2 else [2] * n
        dist.all_to_all_single(torch.empty(6), torch.ones(6), splits, [2] * n, group=group)

    def evenly(group):  # and rank 2 sends more to everybody than they expect
        sent = torch.ones(9 if r == 2 else 6)
        dist.all_to_all_single(torch.empty(6), sent, [2] * n, [len(sent) // n] * n, group=group)

    told = {
        as_list: "all_to_all does not fit: rank 1 sends 2 x torch.float32 to rank 2, which "
        "expects 3",
        as_rows: "all_to_all_single does not fit: rank 0 sends 2 x torch.float32 to rank 2, which "
        "expects 1; rank 1 sends 2 x torch.float32 to rank 2, which expects 3",
        evenly: "all_to_all_single does not fit: "
        + "; ".join(
            f"rank 2 sends 3 x torch.float32 to rank {s}, which expects 2" for s in range(n)
        ),
    }
    for call, text in told.items():
        group = dist.new_group(timeout=timedelta(seconds=20))
        with pytest.raises(RuntimeError, match=f"{text}$"):
            call(group)
        with pytest.raises(RuntimeError, match=f"the group has failed before: {text}$"):
            dist.barrier(group)


def test_sizes_that_only_a_pair_knows_are_compared(ranks):
    ranks("mpi", 3)(pairs_that_do_not_fit)


def pairs_of_a_group(world):
    """They are named as in the world, not by their places in the group."""
    group = dist.new_group([1, 2], timeout=timedelta(seconds=20))
    if world.rank > 0:
        sent = [torch.ones(world.rank) for _ in range(2)]
        with pytest.raises(RuntimeError, match=r"rank 2 sends 2 x torch.float32 to rank 1, which"):
            dist.all_to_all([torch.ones(1), torch.ones(1)], sent, group=group)


def test_pairs_of_a_group_are_named_by_their_ranks_in_the_world(ranks):
    ranks("mpi", 3)(pairs_of_a_group)


COLLECTIVES = {
    "all_reduce": lambda t, n: dist.all_reduce(t),
    "reduce": lambda t, n: dist.reduce(t, 0),
    "broadcast": lambda t, n: dist.broadcast(t, 0),
    "all_gather": lambda t, n: dist.all_gather([torch.empty_like(t) for _ in range(n)], t),
    "all_gather_into_tensor": lambda t, n: dist.all_gather_into_tensor(torch.cat([t] * n), t),
    "gather": lambda t, n: dist.gather(t, [t] * n if dist.get_rank() == 0 else None, 0),
    "scatter": lambda t, n: dist.scatter(t, [t] * n if dist.get_rank() == 0 else None, 0),
    "reduce_scatter": lambda t, n: dist.reduce_scatter(t, [torch.empty_like(t) for _ in range(n)]),
    "all_to_all": lambda t, n: dist.all_to_all([torch.empty_like(t) for _ in range(n)], [t] * n),
    "all_to_all_single": lambda t, n: dist.all_to_all_single(
        torch.cat([t] * n), torch.cat([t] * n)
    ),
    "send": lambda t, n: dist.send(t, (dist.get_rank() + 1) % n),
    "recv": lambda t, n: dist.recv(t, (dist.get_rank() + 1) % n),
}


class Broadcasts(torch.nn.Module):
    def forward(self, x):
        dist.broadcast(x, 0)
        return x + 1


def tensors_without_memory(world):
    n = world.world_size
    for size in (4, 500_000):  # brought to the meeting, and staged
        real = torch.ones(size)
        for name, call in COLLECTIVES.items():
            with FakeTensorMode():
                fake = torch.ones(size)
                with pytest.raises(RuntimeError, match=f"{name} on the mpi backend cannot be"):
                    call(fake, n)
            with pytest.raises(RuntimeError, match=f"{name} .* got a FakeTensor that stands for"):
                call(fake, n)
            with pytest.raises(RuntimeError, match=f"{name} .* got torch.strided on meta"):
                call(torch.ones(size, device="meta"), n)
        with pytest.raises(RuntimeError, match=r"all_reduce .* negated or conjugated"):
            dist.all_reduce(torch.ones(size, dtype=torch.complex64).conj().imag)
        with pytest.raises(RuntimeError, match=r"broadcast .* got torch.sparse_coo on cpu"):
            dist.broadcast(real.to_sparse(), 0)
        with pytest.raises(RuntimeError, match=r"broadcast .* stands for others"):
            torch.func.vmap(lambda x: dist.broadcast(x, 0))(torch.ones(2, size))
        with pytest.raises(RuntimeError, match="all_reduce on the mpi backend cannot be traced"):
            make_fx(lambda x: dist.all_reduce(x), tracing_mode="fake")(real)
        with FakeTensorMode(), pytest.raises(RuntimeError, match=r"mpi.empty .* cannot be traced"):
            mpi.empty(size)
        with FakeTensorMode(), pytest.raises(RuntimeError, match=r"broadcast .* cannot be traced"):
            dist.broadcast(real, 0)
    with pytest.raises(RuntimeError, match="broadcast on the mpi backend cannot be traced"):
        torch.export.export(Broadcasts(), (torch.ones(4),), strict=False)
    with FakeTensorMode():  # what the errors advise
        assert funcol.all_reduce(torch.ones(4), "sum", dist.group.WORLD).shape == (4,)
    dist.all_reduce(real)
    assert real.eq(n).all()


def test_what_has_no_memory_is_refused_before_anything_is_sent(ranks):
    ranks("mpi", 2)(tensors_without_memory)


def an_error_reaches_the_future(world):
    group = dist.new_group(timeout=timedelta(seconds=20))
    tensor = torch.ones(10 if world.rank == 0 else 5)
    handle = dist.broadcast(tensor, src=0, group=group, async_op=True)
    with pytest.raises(RuntimeError, match=r"broadcast number 1 on rank . .* failed: the ranks"):
        handle.wait()
    assert not handle.is_success()
    with pytest.raises(RuntimeError, match="called different operations"):
        handle.get_future().wait()


def test_an_error_reaches_wait_and_the_future(ranks):
    ranks("mpi", 2)(an_error_reaches_the_future)


def a_message_that_does_not_fit(world):
    """MPI reports it where the larger message arrives."""
    if world.rank == 0:
        dist.send(torch.ones(10), dst=1)
    else:
        with pytest.raises(
            RuntimeError, match=r"recv from rank 0 on rank 1 .* failed.*(?i:truncated)"
        ):
            dist.recv(torch.ones(5), src=0)


def test_an_error_of_mpi_reaches_wait(ranks):
    ranks("mpi", 2)(a_message_that_does_not_fit)


def a_message_that_leaves_a_rest(world):
    """MPI takes it: the rest would stay as it was."""
    if world.rank == 0:
        dist.send(torch.ones(5), dst=1)
        dist.send(torch.ones(10), dst=1)
    else:
        received = torch.zeros(10)
        with pytest.raises(RuntimeError, match=r"recv from rank 0 .*: 20 bytes came, expected 40$"):
            dist.recv(received, src=0)
        dist.recv(received, src=0)
        assert received.eq(1).all()


def test_a_message_that_leaves_a_rest_is_an_error(ranks):
    ranks("mpi", 2)(a_message_that_leaves_a_rest)


def test_bitwise_reductions_are_for_integers():
    with pytest.raises(RuntimeError, match="float32"):
        datatypes.operation(dist.ReduceOp.BXOR, torch.float32)


def test_a_program_of_the_users_own_needs_one_import():
    """Where torch lets a backend take the name; see mpi/__init__.py. Ranks come from MPI alone."""
    if mpi.BACKEND != "mpi":
        pytest.skip(f"torch {torch.__version__} keeps the name mpi for itself")
    result = mpirun(
        2,
        """
        import torch, torch.distributed as dist, ddp_from_scratch.mpi
        for _ in range(2):  # a second time after the first was destroyed
            dist.init_process_group("mpi")
            tensor = torch.tensor([dist.get_rank() + 1])
            dist.all_reduce(tensor)
            assert (dist.get_backend(), dist.get_world_size(), tensor.item()) == ("mpi", 2, 3)
            dist.destroy_process_group()
        """,
        RANK="7",
        WORLD_SIZE="9",
        TORCH_DISTRIBUTED_DEBUG="DETAIL",
    )
    assert result.returncode == 0, result.stderr


def test_torch_says_that_the_backend_is_there():
    """Under the name by which `init_process_group` finds it. Once imported, never undone."""
    assert dist.is_backend_available(mpi.BACKEND)
    assert dist.is_backend_available(f"cpu:{mpi.BACKEND}")
    assert dist.is_mpi_available() == (mpi.BACKEND == "mpi")


@pytest.mark.parametrize("backend", ["mpi", None])
def test_accelerate_takes_it_under_mpirun(backend):
    pytest.importorskip("accelerate")
    if mpi.BACKEND != "mpi":
        pytest.skip(f"torch {torch.__version__} keeps the name mpi for itself")
    result = mpirun(
        2,
        f"""
        import torch, torch.distributed as dist, ddp_from_scratch.mpi
        from accelerate import Accelerator, InitProcessGroupKwargs
        accelerator = Accelerator(
            cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend={backend!r})]
        )
        gathered = accelerator.gather(torch.tensor([accelerator.process_index]))
        assert (dist.get_backend(), gathered.tolist()) == ("mpi", [0, 1])
        dist.destroy_process_group()
        """,
        OMP_NUM_THREADS="1",
    )
    assert result.returncode == 0, result.stderr


def test_ranks_and_a_store_come_from_mpi_by_any_name():
    result = mpirun(
        2,
        """
        import torch, torch.distributed as dist, ddp_from_scratch.mpi
        for backend in ("gloo", ddp_from_scratch.mpi.BACKEND):
            dist.init_process_group(backend, init_method="mpi://")
            tensor = torch.tensor([dist.get_rank() + 1])
            dist.all_reduce(tensor, group=dist.new_group(backend="gloo"))
            assert (dist.get_backend(), dist.get_world_size(), tensor.item()) == (backend, 2, 3)
            dist.destroy_process_group()
        """,
    )
    assert result.returncode == 0, result.stderr


def a_store_that_nobody_uses(world):
    store = mpi.store(mpi.placement(), timedelta(seconds=20))
    store.set(f"rank {world.rank}", "there")
    store.wait([f"rank {rank}" for rank in range(world.world_size)])
    file = Path(store.path)
    dist.barrier()
    before = file.read_bytes()
    dist.barrier()
    del store
    gc.collect()
    dist.barrier()
    assert file.read_bytes() == before


def test_a_store_leaves_its_file_alone_at_the_end(ranks):
    """Rank 0 removes it, and one that wrote to it then left the next rank reading nonsense."""
    ranks("mpi", 2)(a_store_that_nobody_uses)


def in_pieces(world):
    """Everything again, as if MPI could count to 64 only."""
    limits = [(datatypes, "COUNTABLE"), (datatypes, "BLOCK")]
    kept = [getattr(module, name) for module, name in limits]
    for module, name in limits:
        setattr(module, name, 16 if name == "BLOCK" else 64)
    try:
        for check in (gathering_of_different_sizes, all_to_all, messages):
            check(world)
        n, r = world.world_size, world.rank
        tensor = torch.full((1000,), r + 1.0)
        dist.reduce(tensor, dst=1)
        assert r != 1 or tensor.eq(n * (n + 1) / 2).all()
        tensor.copy_(torch.arange(1000) + r)
        dist.broadcast(tensor, src=1)
        assert tensor.tolist() == list(range(1, 1001))
        if r == 0:
            dist.send(tensor, dst=1)
        if r == 1:
            received = torch.empty(1000)
            assert dist.recv(received) == 0
            assert received.equal(tensor)
        parts = [torch.empty(100) for _ in range(n)] if r == 0 else None
        dist.gather(torch.full((100,), float(r)), parts, dst=0)
        assert r != 0 or all(part.eq(i).all() for i, part in enumerate(parts))
        dist.scatter(tensor[:100], parts, src=0)
        assert tensor[:100].eq(r).all()
        shares = torch.arange(n * 100.0)
        dist.reduce_scatter_tensor(tensor[:100], shares)
        assert tensor[:100].equal(n * torch.arange(r * 100.0, (r + 1) * 100))
    finally:
        for (module, name), value in zip(limits, kept, strict=True):
            setattr(module, name, value)


def test_what_mpi_cannot_count_goes_in_pieces(ranks):
    ranks("mpi", 3)(in_pieces)


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ("thread_level = 'serialized'", "needs MPI_THREAD_MULTIPLE; this MPI gave level"),
        ("initialize = False", "mpi4py.rc.initialize is off and MPI has not been started: call"),
    ],
)
def test_mpi_that_was_not_started_with_threads_is_one_line(setting, error):
    result = mpirun(
        1,
        f"import mpi4py; mpi4py.rc.{setting}; from mpi4py import MPI; import ddp_from_scratch.mpi",
    )
    assert result.returncode == 1, result.stderr
    assert error in result.stderr
