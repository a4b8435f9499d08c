"""Calls that cannot work end on all ranks, with an error that names why."""

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
from ddp_from_scratch.backend.barrier import EAGER_NBYTES
from tests.support.tiers import slow


@contextmanager
def a_group(ranks=None, seconds=20.0):
    group = dist.new_group(ranks, timeout=timedelta(seconds=20))
    if group is not dist.GroupMember.NON_GROUP_MEMBER:
        group.set_timeout(timedelta(seconds=seconds))
    try:
        yield group
        dist.barrier()  # a rank that left at once would be missed by the others
    finally:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def raises(text):
    return pytest.raises(RuntimeError, match=text)


def meet(other):
    """Returns when this rank and the other are here."""
    sent = dist.isend(torch.ones(1), other)
    dist.recv(torch.ones(1), other)
    sent.wait()


def a_rank_that_does_not_come(world):
    r = world.rank
    with a_group([0, 1, 2], 0.5) as group, a_group([0, 1, 2]) as patient:
        if r != 1:
            meet(2 - r)  # else a busy machine would make one of these late, too
            with raises(rf"number 1 on rank {r} .* timeout of 0\.5 s passed without rank 1$"):
                dist.barrier(group=group)
            with raises(r"number 2 .*the group has failed before: the"):
                dist.all_reduce(torch.ones(1), group=group)
            handle = dist.all_reduce(torch.ones(1), group=patient, async_op=True)
            meet(2 - r)
            with raises(r"number 1 .* within 0\.3 s: rank 1 did not arrive"):
                handle.wait(timedelta(seconds=0.3))
        dist.barrier()
        if r == 1:
            dist.all_reduce(torch.ones(1), group=patient)
            # It comes late, and must not continue as if the others had been with it.
            with raises(r"number 1 .*another rank has given up on it"):
                dist.barrier(group=group)
        else:
            assert handle.wait()


@contextmanager
def interrupted_by(handler, seconds):
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def late(*_):
    raise TimeoutError("the program's own limit")


def a_call_that_an_error_leaves(world):
    """One rank leaves a call while it waits for the others, and another one half way."""
    with a_group() as waiting, a_group() as reducing:
        dist.all_reduce(torch.ones(EAGER_NBYTES), group=reducing)
        if world.rank == 0:
            told = raises(r"number 1 .* failed: the program's own limit")
            with interrupted_by(late, 0.2), told:
                dist.all_reduce(torch.ones(1), group=waiting)
            reducing._reduce._reduce_staged = late
        dist.barrier()
        with raises("number 2 .* the program's own limit" if world.rank == 0 else "given up on it"):
            dist.all_reduce(torch.ones(EAGER_NBYTES), group=reducing)
        # Its next call must not be taken for the one that it has left.
        with raises(r"interrupted by TimeoutError\(" if world.rank == 0 else "given up on it"):
            dist.all_reduce(torch.ones(1), group=waiting)


def different_calls(world):
    r = world.rank
    op = dist.ReduceOp.MAX if r else dist.ReduceOp.SUM
    dtype = torch.float32 if r else torch.int32
    calls = [
        lambda g: dist.all_reduce(torch.ones(10 if r else 5), group=g),
        lambda g: dist.all_reduce(torch.ones(4, dtype=dtype), group=g),
        lambda g: dist.all_reduce(torch.ones(4), op, group=g),
        lambda g: dist.all_reduce(torch.ones(4), group=g) if r else dist.barrier(g),
        lambda g: dist.broadcast(torch.ones(4), src=min(r, 1), group=g),
    ]
    for call in calls:
        with a_group() as group, raises("called different operations: rank 0 .*; ranks 1, 2 "):
            call(group)
    with a_group() as group:
        tensor = torch.ones(10 if r == 0 else 5)
        handle = dist.all_reduce(tensor, group=group, async_op=True)
        with raises(r"all_reduce number 1 on rank . .* failed: the ranks"):
            handle.wait()
        assert not handle.is_success()
        with raises("called different operations"):
            handle.get_future().wait()


def no_such_sum(world):
    with raises(r"torch\.float32 .*BAND"):
        dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND)
    if world.backend == "mpi":
        with pytest.raises((ValueError, RuntimeError), match="reduce"):
            dist.all_reduce(torch.ones(2, dtype=torch.complex64), dist.ReduceOp.MAX)
        with raises(r"cannot reduce tensors of torch\.float8_e4m3fn"):
            dist.all_reduce(torch.ones(8, dtype=torch.float8_e4m3fn))
    dist.all_reduce(torch.ones(2))  # nobody had met for it: the group still works


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


def calls_of(world):
    """Node leaves messages between two ranks to gloo."""
    return {name: WRITES[name] for name in WRITES if (world.backend, name) != ("node", "recv")}


def results_without_places(world):
    n = world.world_size
    for size in (4, 500_000):  # brought to the meeting, and staged
        one = torch.ones(1).expand(size)
        for name, call in calls_of(world).items():
            with raises(rf"{name} .* one place .*expand\(\): call cont"):
                call(one, n)
        tensor = torch.ones(2, size).t()  # not dense, but each element has a place of its own
        dist.all_reduce(tensor)
        assert tensor.eq(n).all()


def tensors_without_memory(world):
    n, backend = world.world_size, world.backend
    for size in (4, 500_000):
        real = torch.ones(size)
        for name, call in calls_of(world).items():
            with FakeTensorMode():
                fake = torch.ones(size)
                with raises(f"{name} on the {backend} backend cannot be"):
                    call(fake, n)
            with raises(f"{name} .* got a FakeTensor that stands for"):
                call(fake, n)
        with raises(r"all_reduce .* negated or conjugated"):
            dist.all_reduce(torch.ones(size, dtype=torch.complex64).conj().imag)
        with raises(f"all_reduce on the {backend} backend cannot be traced"):
            make_fx(lambda x: dist.all_reduce(x), tracing_mode="fake")(real)
    if backend == "mpi":
        with raises(r"all_reduce .* got torch.strided on meta"):
            dist.all_reduce(torch.ones(size, device="meta"))
    with FakeTensorMode():  # what the errors advise
        assert funcol.all_reduce(torch.ones(4), "sum", dist.group.WORLD).shape == (4,)
    dist.all_reduce(real)
    assert real.eq(n).all()


def pairs_that_do_not_fit(world):
    n, r = world.world_size, world.rank

    text = "{} does not fit: rank 1 sends 2 x torch.float32 to rank 2, which expects 3$".format
    with a_group() as group:
        received = [torch.empty(3 if (r, s) == (2, 1) else 2) for s in range(n)]
        with raises(text("all_to_all")):
            dist.all_to_all(received, [torch.ones(2) for _ in range(n)], group=group)
        with raises(f"the group has failed before: {text('all_to_all')}"):
            dist.barrier(group)
    with a_group() as group:
        splits = [2, 3, 2] if r == 2 else [2] * n
        with raises(text("all_to_all_single")):
            dist.all_to_all_single(
                torch.empty(sum(splits)), torch.ones(6), splits, [2] * n, group=group
            )


# Counts and sizes that one rank can see by itself.
WRONG = {
    "all_gather": lambda g, t, n: dist.all_gather([torch.empty(3)] * n, t),
    "gather": lambda g, t, n: dist.gather(t, [torch.empty(3)] * n, dist.get_rank()),
    "scatter": lambda g, t, n: dist.scatter(t, [torch.empty(3)] * n, dist.get_rank()),
    "reduce_scatter": lambda g, t, n: dist.reduce_scatter(t, [torch.empty(3)] * n),
    "all_to_all": lambda g, t, n: g.alltoall([t] * n, [t.int()] * n),
    "all_gather needs 2 output": lambda g, t, n: g.allgather([[t] * 3], [t]),
    "all_to_all needs 2 output": lambda g, t, n: g.alltoall([t] * 3, [t] * n),
}


def wrong_arguments(world):
    n, tensor = world.world_size, torch.ones(2)
    for told, call in WRONG.items():
        with pytest.raises((ValueError, RuntimeError), match=told):
            call(dist.group.WORLD, tensor, n)
    dist.all_reduce(tensor)  # nobody had met for it


def wrong_windows(world):
    with pytest.raises(ValueError, match="numel must be 0 or more, got -1"):
        mpi.empty(-1)
    with a_group() as group, raises(r"called different operations: rank 0 mpi\.empty\(1"):
        mpi.empty(1 + world.rank, process_group=group)


@pytest.mark.parametrize(
    ("called", "size", "backend"),
    [
        *((a_rank_that_does_not_come, 3, backend) for backend in ("node", "mpi")),
        *((different_calls, 3, backend) for backend in ("node", "mpi")),
        *((no_such_sum, 2, backend) for backend in ("node", "mpi")),
        *((results_without_places, 2, backend) for backend in ("node", "mpi")),
        *((tensors_without_memory, 2, "node"), slow(tensors_without_memory, 2, "mpi")),
        *((a_call_that_an_error_leaves, 2, "node"), slow(a_call_that_an_error_leaves, 2, "mpi")),
        *((pairs_that_do_not_fit, 3, "node"), slow(pairs_that_do_not_fit, 3, "mpi")),
        *((wrong_arguments, 2, "node"), slow(wrong_arguments, 2, "mpi")),
        (wrong_windows, 2, "mpi"),
    ],
)
def test_every_rank_gets_an_error_that_names_why(ranks, called, size, backend):
    ranks(backend, size, fresh=called is tensors_without_memory)(called)
