"""Calls on the mpi backend that cannot work end on all ranks, with an error that names why."""

import signal
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives as funcol
from torch.fx.experimental.proxy_tensor import make_fx

from ddp_from_scratch import mpi
from ddp_from_scratch.node.barrier_memory import EAGER_NBYTES


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
        reducing._reduce._reduce_staged = late
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


# With an expanded tensor in place of a result.
WRITES = {
    "all_reduce": lambda one, n: dist.all_reduce(one),
    "reduce": lambda one, n: dist.reduce(one, 0),
    "broadcast": lambda one, n: dist.broadcast(one, 0),
    "all_gather": lambda one, n: dist.all_gather([one] * n, one.contiguous()),
    "all_gather_into_tensor": lambda one, n: dist.all_gather_into_tensor(one, one[: len(one) // n]),
    "gather": lambda one, n: dist.gather(one, [one] * n, dist.get_rank()),
    "scatter": lambda one, n: dist.scatter(one, [one] * n, dist.get_rank()),
    "reduce_scatter": lambda one, n: dist.reduce_scatter(one, [one.contiguous()] * n),
    "all_to_all": lambda one, n: dist.all_to_all([one] * n, [one] * n),
    "all_to_all_single": lambda one, n: dist.all_to_all_single(one, one),
    "recv": lambda one, n: dist.recv(one, (dist.get_rank() + 1) % n),
}


def results_without_places(world):
    for size in (4, 500_000):
        one = torch.ones(1).expand(size)
        for name, call in WRITES.items():
            with pytest.raises(RuntimeError, match=rf"{name} .* one place .*expand\(\): call cont"):
                call(one, world.world_size)
        parts = [torch.zeros(size) for _ in range(world.world_size)]
        dist.all_gather(parts, one)  # reads it; the group goes on
        assert all(part.eq(1).all() for part in parts)


def test_a_result_whose_elements_share_a_place_is_refused(ranks):
    ranks("mpi", 2)(results_without_places)


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
