"""The same bits on any number of ranks."""

import io
import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_from_scratch as ddp
from ddp_from_scratch.elasticity.closing import close_default_group
from tests.shards.programs import PROGRAMS, SHARDS, STEPS, Program, Training, by_definition, cnn
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
    ["gloo-1", "gloo-2", "gloo-3", "mpi-2", "mpi-3", "node-3"]
    + ["gloo-3-messages", "gloo-4-messages", "gloo-3-2 machines", "mpi-3-2 machines"]
    + [slow(name) for name in ("mpi-1", "gloo-4", "gloo-6", "gloo-8", "mpi-4", "mpi-8")]
    + [slow(name) for name in ("gloo-6-messages", "gloo-8-messages", "mpi-4-2 machines")]
    + [slow(name) for name in ("gloo-4-ranks in turn", "mpi-4-ranks in turn")],
)
def test_bits_are_those_of_one_process(ranks, crew):
    backend, world_size, *way = crew.split("-")
    for name, program in PROGRAMS.items():
        found = ranks(backend, int(world_size))(trained, name, STEPS, *way)
        assert set(found) == {by_definition(program)}, name


# Together every number of ranks and every way; all programs go all ways above, for few steps.
MANY_STEPS = {
    "cnn": [("gloo", 2, "shared memory"), ("gloo", 4, "messages"), ("gloo", 8, "shared memory")],
    "transformer": [
        *(("gloo", 1, "shared memory"), ("mpi", 3, "shared memory"), ("mpi", 4, "shared memory")),
        *(("gloo", 6, "shared memory"), ("gloo", 8, "messages")),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY_STEPS)
def test_bits_after_many_steps(ranks, name):
    expected = by_definition(PROGRAMS[name], 200)
    for backend, world_size, way in MANY_STEPS[name]:
        found = ranks(backend, world_size)(trained, name, 200, way)
        assert set(found) == {expected}, (backend, world_size, way)


# Steps that fail ----------------------------------------------------------------------------------


def resumed(world, first, states):
    """Some steps; from `states` on, if they are those of another number of ranks."""
    training = Training(PROGRAMS["cnn"])
    if states is not None:
        of_model, of_optimizer = torch.load(io.BytesIO(states))
        training.model.load_state_dict(of_model)
        training.optimizer.load_state_dict(of_optimizer)
        training.reducer.seek(first)
    for step in range(first, first + 2):
        training.step(step)
    states = training.model.state_dict(), training.optimizer.state_dict()
    # As bytes: tensors would be shared between the processes.
    file = io.BytesIO()
    torch.save(states, file)
    return training.bits(), file.getvalue()


def test_a_run_goes_on_with_another_number_of_ranks(ranks):
    (_, states), *_ = ranks("gloo", 3)(resumed, 0, None)
    found = [bits for bits, _ in ranks("gloo", 2)(resumed, 2, states)]
    assert set(found) == {by_definition(PROGRAMS["cnn"], 4)}


class Stop(Exception):
    """Ends a shard."""


def run_until(training, failing):
    for shard in training.reducer.shard_range:
        with training.reducer.shard(shard):
            if shard == failing:
                training.model(torch.randn(3, 1, 6, 6).to(training.program.dtype))
                raise Stop
            training.program.backward(training.model, 1, shard, 0)


def repeated(world, name):
    training = Training(PROGRAMS[name])
    reducer = training.reducer
    training.step(0)
    for failing in list(
        reducer.shard_range
    ):  # in the forward pass of one shard after the other, on all ranks
        with pytest.raises(Stop):
            run_until(training, failing)
    training.average(1)
    reducer.drop_step()  # after the average
    reducer.drop_step()
    for step in range(1, STEPS):
        training.step(step)
    return training.bits()


@pytest.mark.parametrize("name", ["cnn", "cnn, a flat optimizer", "branches, in views"])
def test_a_step_that_failed_is_repeated(crew, name):
    # All ranks have as many shards.
    if SHARDS % crew.world_size == 0:
        assert set(crew(repeated, name)) == {by_definition(PROGRAMS[name])}


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
    for world_size in (1, 4):
        found = ranks("gloo", world_size)(broken_off)
        assert set(found) == {by_definition(PROGRAMS["cnn"])}


def die_in_the_last_shard(training):
    """Ends this process when the first buckets are under way."""

    def die(gradient):
        if training.reducer.sync:
            os.kill(os.getpid(), signal.SIGKILL)

    next(training.model.parameters()).register_hook(die)


def killed(world, name, rendezvous):
    training = Training(PROGRAMS[name])
    training.step(0)
    if world.rank == 1:
        die_in_the_last_shard(training)
    with pytest.raises(RuntimeError):
        training.step(1)
    close_default_group()  # torch's own waits for what gloo never ends (`waiting.py`)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(rendezvous, 2),
        rank=world.rank // 2,
        world_size=2,
        timeout=timedelta(seconds=20),
    )
    assert len(training.reducer.shard_range) == SHARDS // 2
    for step in range(1, STEPS):
        training.step(step)
    return training.bits()


@pytest.mark.parametrize(
    "name", ["cnn", "cnn, watched", slow("cnn, a flat optimizer"), slow("branches, in views")]
)
def test_a_rank_is_killed_and_the_others_repeat_the_step(tmp_path, name):
    crew = Crew("gloo", 3)
    try:
        found = crew(killed, name, str(tmp_path / "rendezvous"), dies=1)
    finally:
        crew.end()
    assert found[1] is None
    assert {found[0], found[2]} == {by_definition(PROGRAMS[name])}


# What is refused ----------------------------------------------------------------------------------


def message(error, call):
    with pytest.raises(error) as found:
        call()
    return str(found.value)


def joined(reducer):
    with ddp.join(reducer):
        reducer.module(X)


def refused(world):
    def make(model=None, **options):
        return ddp.Reducer(model or nn.Linear(2, 2), **{"shards": 4} | options)

    sparse = nn.Embedding(3, 2, sparse=True)
    with_shards, without = make(), ddp.Reducer(nn.Linear(2, 2))
    hook = ddp.comm_hooks.bf16_compress_hook
    shared = ddp.NodeSharedSGD
    return [
        message(ValueError, lambda: make(shards=3)),
        message(ValueError, lambda: make(shards=0)),
        message(ValueError, lambda: make(shards=1)),
        message(ValueError, lambda: make(sparse)),
        message(ValueError, lambda: make(bucket_cap_mb="auto")),
        message(
            RuntimeError, lambda: shared(with_shards.module.parameters(), 1, reducer=with_shards)
        ),
        message(RuntimeError, lambda: with_shards.weight(1)),
        message(RuntimeError, lambda: joined(with_shards)),
        message(RuntimeError, lambda: with_shards.register_comm_hook(None, hook)),
        message(RuntimeError, lambda: without.shard(0)),
    ]


X = torch.ones(1, 2)
REFUSALS = [
    "shards must be a power of two, got 3",
    "shards must be a power of two, got 0",
    "2 ranks need at least as many shards, got 1",
    "sparse gradients cannot be summed over shards",
    'bucket_cap_mb="auto" cannot be used with shards=V',
    "shards=V has a sum of its own and cannot be used with NodeSharedSGD",
    "cannot be used with weight() or join()",
    "cannot be used with weight() or join()",
    "cannot be used with a comm hook",
    "this Reducer has no shards: make it with shards=V",
]


def test_refusals(ranks):
    for found in ranks("gloo", 2)(refused):
        for text, expected in zip(found, REFUSALS, strict=True):
            assert expected in text


def wrong_orders():
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
        assert text in message(error, call)
        reducer.drop_step()
        run(3, 2, 1, 0)
        assert model.bias.grad.tolist() == [1, 1]
        optimizer.step()


def test_each_mistake_has_its_error_and_the_next_step_is_right(alone):
    wrong_orders()


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


def test_complex_gradients_of_shards(ranks):
    assert set(ranks("gloo", 3)(complex_sum)) == {(1 + 2j) * sum(range(8)) / 8}


def complex_sum(world):
    model = nn.ParameterList([nn.Parameter(torch.zeros(5, dtype=torch.complex64))])
    reducer = ddp.Reducer(model, shards=8)
    for shard in reducer.shard_range:
        with reducer.shard(shard):
            (model[0] * (1 - 2j) * shard).sum().real.backward()
    return model[0].grad.conj().conj()[4].item()


def empty_and_single(world):
    """Buckets of 0, 1 and 2 elements, on 3 ranks."""
    model = nn.ParameterList([nn.Parameter(torch.ones(size)) for size in (0, 1, 2)])
    reducer = ddp.Reducer(model, shards=8, bucket_cap_mb=0)
    for shard in reducer.shard_range:
        with reducer.shard(shard):
            sum((parameter * shard).sum() for parameter in model).backward()
    return [parameter.grad.tolist() for parameter in model]


def test_buckets_smaller_than_the_number_of_ranks(trio):
    assert trio(empty_and_single) == [[[], [3.5], [3.5, 3.5]]] * 3


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


def test_cnn_has_buffers():
    assert list(Program(cnn).model().buffers())
