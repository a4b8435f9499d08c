"""The same bits on any number of ranks."""

import os
import re
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_from_scratch as ddp
from ddp_from_scratch.elasticity.closing import close_default_group
from tests.shards.programs import PROGRAMS, SHARDS, STEPS, Training, by_definition
from tests.support.machines import group_over
from tests.support.ranks import Crew
from tests.support.tiers import slow


def trained(world, name, steps=STEPS, way="shared memory"):
    group = None
    if way == "2 machines":
        group = group_over(world, [world.world_size - 1, 1])
    elif way == "ranks in turn":  # as mpirun --map-by node places them
        group = group_over(world, lambda rank: rank % 2)
    training = Training(PROGRAMS[name], group, shared_memory=way != "messages")
    for step in range(steps):
        training.step(step)
    ddp.check_sync(training.model)
    shared = training.reducer.stats().transport == "shared memory"
    assert shared == (way != "messages" and world.world_size > 1)
    return training.bits()


@pytest.mark.parametrize(
    "crew",
    ["gloo-1", "gloo-3", "gloo-3-messages", "gloo-3-2 machines"]
    + [slow(name) for name in ("gloo-2", "node-3", "gloo-4-messages", "mpi-3-2 machines")]
    + [slow(name) for name in ("gloo-4", "gloo-6", "gloo-8", "mpi-2", "mpi-3", "mpi-8")]
    + [slow(name) for name in ("gloo-6-messages", "gloo-8-messages", "gloo-4-ranks in turn")],
)
def test_bits_are_those_of_one_process(ranks, crew):
    backend, world_size, *way = crew.split("-")
    for name in PROGRAMS:
        found = ranks(backend, int(world_size))(trained, name, STEPS, *way)
        assert set(found) == {by_definition(name)}, name


@pytest.mark.slow
@pytest.mark.parametrize("crew", ["gloo-2", "gloo-4-messages", "mpi-3", "gloo-8"])
def test_bits_after_many_steps(ranks, crew):
    backend, world_size, *way = crew.split("-")
    for name in ("cnn", "transformer"):
        found = ranks(backend, int(world_size))(trained, name, 200, *way)
        assert set(found) == {by_definition(name, 200)}


# Steps that fail ----------------------------------------------------------------------------------


class Stop(Exception):
    """Ends a shard."""


def repeated(world, name):
    training = Training(PROGRAMS[name])
    reducer = training.reducer
    training.step(0)

    def run_until(failing):
        for shard in reducer.shard_range:
            with reducer.shard(shard):
                if shard == failing:
                    training.model(torch.randn(3, 1, 6, 6))
                    raise Stop
                training.program.backward(training.model, 1, shard, 0)

    for failing in [*reducer.shard_range]:  # in the forward pass, on all ranks
        with pytest.raises(Stop):
            run_until(failing)
    training.average(1)
    reducer.drop_step()  # after the average
    reducer.drop_step()
    for step in range(1, STEPS):
        training.step(step)
    return training.bits()


@pytest.mark.parametrize("crew", ["gloo-2", slow("mpi-2")])  # all ranks have as many shards
@pytest.mark.parametrize("name", ["cnn", "cnn, a flat optimizer", "branches, in views"])
def test_a_step_that_failed_is_repeated(ranks, crew, name):
    found = ranks(crew[:-2], 2)(repeated, name)
    assert set(found) == {by_definition(name)}


class BreaksOff(torch.autograd.Function):
    """Raises in backward, when some gradients are on their way."""

    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        raise Stop


def broken_off(world):
    training = Training(PROGRAMS["cnn"])
    training.step(0)
    first = training.model[0]
    hook = first.register_forward_hook(lambda *args: BreaksOff.apply(args[-1]))
    shard = training.reducer.shard_range[0]
    with pytest.raises(Stop), training.reducer.shard(shard):
        training.program.backward(training.model, 1, shard, 0)
    hook.remove()
    for step in range(1, STEPS):
        training.step(step)
    return training.bits()


def test_a_backward_pass_that_breaks_off(ranks):
    for world_size in (1, 2):
        found = ranks("gloo", world_size)(broken_off)
        assert set(found) == {by_definition("cnn")}


def killed(world, name, rendezvous):
    training = Training(PROGRAMS[name])
    training.step(0)

    def die(gradient):
        """Ends this process in its last shard, when the first buckets are under way."""
        if training.reducer.sync:
            os.kill(os.getpid(), signal.SIGKILL)

    if world.rank == 1:
        next(training.model.parameters()).register_hook(die)
    with pytest.raises(RuntimeError):
        training.step(1)
    close_default_group()  # torch's own waits for what gloo never ends (`waiting.py`)
    store, limit = dist.FileStore(rendezvous, 2), timedelta(seconds=20)
    ways = {"rank": world.rank // 2, "world_size": 2}
    dist.init_process_group("gloo", store=store, timeout=limit, **ways)
    assert len(training.reducer.shard_range) == SHARDS // 2
    for step in range(1, STEPS):
        training.step(step)
    return training.bits()


@pytest.mark.parametrize(
    "name", ["cnn", *map(slow, ("cnn, watched", "cnn, a flat optimizer", "branches, in views"))]
)
def test_a_rank_is_killed_and_the_others_repeat_the_step(tmp_path, name):
    crew = Crew("gloo", 3, fresh=True)
    try:
        found = crew(killed, name, str(tmp_path / "rendezvous"), dies=1)
    finally:
        crew.end()
    assert found[1] is None
    assert {found[0], found[2]} == {by_definition(name)}


# What is refused ----------------------------------------------------------------------------------


X = torch.ones(1, 2)


def refused(world):
    def make(model=None, **options):
        return ddp.Reducer(model or nn.Linear(2, 2), **{"shards": 4} | options)

    def joined():
        with ddp.join(reducer):
            reducer.module(X)

    reducer, without = make(), ddp.Reducer(nn.Linear(2, 2))
    parameters, hook = reducer.module.parameters(), ddp.comm_hooks.bf16_compress_hook
    weight = "cannot be used with weight() or join()"
    for error, call, text in (
        (ValueError, lambda: make(shards=3), "shards must be a power of two, got 3"),
        (ValueError, lambda: make(shards=0), "shards must be a power of two, got 0"),
        (ValueError, lambda: make(shards=1), "2 ranks need at least as many shards, got 1"),
        (ValueError, lambda: make(nn.Embedding(3, 2, sparse=True)), "sparse gradients cannot be"),
        (ValueError, lambda: make(bucket_cap_mb="auto"), 'bucket_cap_mb="auto" cannot be used'),
        (
            *(RuntimeError, lambda: ddp.NodeSharedSGD(parameters, 1, reducer=reducer)),
            "shards=V has a sum of its own and cannot be used with NodeSharedSGD",
        ),
        (RuntimeError, lambda: reducer.weight(1), weight),
        (RuntimeError, joined, weight),
        (
            RuntimeError,
            lambda: reducer.register_comm_hook(None, hook),
            "cannot be used with a comm",
        ),
        (RuntimeError, lambda: without.shard(0), "this Reducer has no shards: make it with shards"),
    ):
        with pytest.raises(error, match=re.escape(text)):
            call()


def test_refusals(ranks):
    ranks("gloo", 2)(refused)


def test_each_mistake_has_its_error_and_the_next_step_is_right(alone):
    """Each begins with a new step of 4 shards, which come as 3, 2, 1, 0 on one rank."""
    model = nn.Linear(2, 2)
    reducer = ddp.Reducer(model, shards=4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def run(*shards):
        for shard in shards:
            with reducer.shard(shard):
                model(X).sum().backward()

    def nested():
        with reducer.shard(3), reducer.shard(2):
            pass

    def all_inside():
        with reducer.shard(3):
            reducer.run_shards(print)

    def dropped():
        with reducer.shard(3):
            reducer.drop_step()

    def missing():
        run(3, 2)
        optimizer.step()

    def local():
        run(3, 2, 1)
        with reducer.shard(0), reducer.no_sync():
            model(X).sum().backward()

    def unused():
        run(3, 2, 1)
        with reducer.shard(0):
            model.bias.sum().backward()

    def outside():
        model(X).sum().backward()

    calls = [
        (RuntimeError, lambda: run(2), "shard 2 comes out of order: the next one is 3"),
        (RuntimeError, lambda: run(3, 3), "shard 3 comes again: the next one is 2"),
        (ValueError, lambda: run(4), "shard 4 is not one of this rank's, which are [3, 2, 1, 0]"),
        (RuntimeError, nested, "shard 2 begins inside shard 3"),
        (RuntimeError, all_inside, "run_shards was called inside shard 3"),
        (RuntimeError, dropped, "the step was dropped inside shard 3"),
        (RuntimeError, missing, "the optimizer steps before shards [1, 0] of this rank have run"),
        (RuntimeError, local, "shard 0 ended without gradients of weight, bias: one backward pass"),
        (RuntimeError, unused, "shard 0 ended without gradients of weight: one backward pass"),
        (RuntimeError, outside, "every backward pass goes into `with reducer.shard(i)`"),
    ]
    for error, call, text in calls:
        with pytest.raises(error, match=re.escape(text)):
            call()
        reducer.drop_step()
        run(3, 2, 1, 0)
        assert model.bias.grad.tolist() == [1, 1]
        optimizer.step()


# Memory, and what else a program may do -----------------------------------------------------------


def test_a_rank_with_every_shard_keeps_few_partial_sums(alone):
    model = nn.Linear(2, 2)
    reducer = ddp.Reducer(model, shards=16)
    held = []
    for shard in reducer.shard_range:
        with reducer.shard(shard):
            model(X).sum().backward()
        held.append(len(list(reducer._shards.reduction._sums)))
    assert max(held) == 4
    assert held[-1] == 0


def complex_empty_and_single(world):
    """Buckets of 0, 1, 2 and 5 elements, on 3 ranks."""
    sizes = {0: torch.float32, 1: torch.float32, 2: torch.float32, 5: torch.complex64}
    parameters = [torch.zeros(size, dtype=dtype) for size, dtype in sizes.items()]
    model = nn.ParameterList(map(nn.Parameter, parameters))
    reducer = ddp.Reducer(model, shards=8, bucket_cap_mb=0)
    for shard in reducer.shard_range:
        with reducer.shard(shard):
            sum((parameter * (1 - 2j) * shard).sum().real for parameter in model).backward()
    found = [parameter.grad.tolist() for parameter in model]
    assert found == [[], [3.5], [3.5, 3.5], [3.5 + 7j] * 5]


def test_buckets_smaller_than_the_number_of_ranks_and_complex_ones(ranks):
    ranks("gloo", 3)(complex_empty_and_single)


def test_what_a_program_draws_between_shards_is_its_own(alone):
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    reducer = ddp.Reducer(model, shards=2)
    torch.manual_seed(1)
    expected = torch.rand(3).tolist()
    torch.manual_seed(1)
    found = [torch.rand(()).item()]
    for shard in reducer.shard_range:
        with reducer.shard(shard):
            model(X).sum().backward()
        found.append(torch.rand(()).item())
    assert found == expected
