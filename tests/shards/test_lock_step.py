"""Shards of a rank in lock step, for synchronised batch norm."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_from_scratch as ddp
from ddp_from_scratch.shards.lock_step import Turn
from tests.shards.programs import IN_LOCK_STEP, PROGRAMS, STEPS, Training, by_definition
from tests.shards.test_shards import message
from tests.support.machines import group_over
from tests.support.tiers import slow


def trained(world, name, steps=STEPS, way="shared memory"):
    group = group_over(world, [world.world_size - 1, 1]) if way == "2 machines" else None
    training = Training(IN_LOCK_STEP[name], group, True, shared_memory=way != "messages")
    for step in range(steps):
        training.step(step)
    ddp.check_sync(training.model)
    return training.bits()


@pytest.mark.parametrize("name", IN_LOCK_STEP)
def test_bits_of_any_number_of_ranks(ranks, name):
    crews = [("gloo", 1), ("gloo", 2), ("gloo", 3), ("mpi", 2)]
    found = [ranks(*crew)(trained, name) for crew in crews]
    assert len({bits for crew in found for bits in crew}) == 1


@pytest.mark.parametrize(
    "crew",
    ["gloo-3-messages", "gloo-3-2 machines", "mpi-3-2 machines", "node-3"]
    + [slow(name) for name in ("gloo-4", "gloo-6", "gloo-8", "mpi-8", "mpi-4-2 machines")],
)
def test_bits_on_each_way(ranks, crew):
    backend, world_size, *way = crew.split("-")
    (expected,) = ranks("gloo", 1)(trained, "cnn")
    found = ranks(backend, int(world_size))(trained, "cnn", STEPS, *way)
    assert set(found) == {expected}


@pytest.mark.slow
def test_bits_after_many_steps(ranks):
    crews = [("gloo", 1), ("gloo", 2), ("mpi", 3), ("mpi", 4), ("gloo", 6), ("gloo", 8)]
    found = [ranks(*crew)(trained, "cnn", 200) for crew in crews]
    assert len({bits for crew in found for bits in crew}) == 1


def network():
    torch.manual_seed(3)
    return nn.Sequential(
        *(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5), nn.BatchNorm1d(5)),
        nn.Linear(5, 1),
    ).double()


def batch(step):
    return torch.randn(24, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def steps_of(world):
    """Three steps on 8 shards of 3 rows each; parameters and buffers after them."""
    model = ddp.convert_sync_batchnorm(network())
    reducer = ddp.Reducer(model, shards=8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        parts = batch(step).chunk(8)
        reducer.run_shards(lambda shard, parts=parts: model(parts[shard]).exp().mean().backward())
        optimizer.step()
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("crew", ["gloo-1", "gloo-3", "mpi-2"])
def test_a_step_is_that_of_one_process_with_the_whole_batch(ranks, crew):
    backend, world_size = crew.split("-")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step)).exp().mean().backward()
        optimizer.step()
    for found in ranks(backend, int(world_size))(steps_of):
        for name, expected in model.state_dict().items():
            torch.testing.assert_close(
                torch.tensor(found[name], dtype=expected.dtype), expected, rtol=1e-10, atol=1e-10
            )


def plain(world, name):
    """A program without synchronised batch norm, through `run_shards`."""
    training = Training(PROGRAMS[name])
    for step in range(STEPS):
        training.reducer.run_shards(lambda shard, step=step: training.run(step, shard))
        training.optimizer.step()
    return training.bits()


def test_shards_without_such_layers_run_one_after_the_other(ranks):
    assert set(ranks("gloo", 3)(plain, "cnn")) == {by_definition(PROGRAMS["cnn"])}


# Steps that fail ----------------------------------------------------------------------------------


class Stop(Exception):
    """Ends a shard."""


def stopped(world, name):
    training = Training(IN_LOCK_STEP[name], None, True)
    norm = next(layer for layer in training.model.modules() if isinstance(layer, ddp.SyncBatchNorm))
    training.step(0)

    def before_it(shard):
        if shard == failing:
            raise Stop
        training.run(1, shard)

    def in_forward(shard):
        if shard == failing:
            with norm.register_forward_hook(stop):
                training.run(1, shard)
        training.run(1, shard)

    def in_backward(shard):
        if shard == failing:
            with norm.register_full_backward_hook(stop):
                training.run(1, shard)
        training.run(1, shard)

    runs = (before_it, in_forward, in_backward)
    for failing, run in product(training.reducer.shard_range[::3], runs):  # noqa: B007
        torch.manual_seed(7)
        with pytest.raises(Stop):
            training.reducer.run_shards(run)
        assert torch.initial_seed() == 7
        assert training.reducer.sync
    training.average(1)
    training.reducer.drop_step()  # after the average
    for step in range(1, STEPS):
        training.step(step)
    return training.bits()


def stop(*_):
    raise Stop


@pytest.mark.parametrize("name", ["cnn", "counting"])
def test_a_step_that_failed_is_repeated(ranks, name):
    (expected,) = ranks("gloo", 1)(trained, name)
    assert ranks("gloo", 1)(stopped, name) == [expected]


def different_layers(world):
    model = nn.ModuleList(nn.BatchNorm1d(2) for _ in range(2))
    ddp.convert_sync_batchnorm(model)
    reducer = ddp.Reducer(model, shards=4, find_unused_parameters=True)
    x = torch.ones(3, 2)

    def more(shard):
        outputs = model[0](x)
        (model[1](outputs) if shard == odd else outputs).sum().backward()

    def other_shape(shard):
        model[0](x if shard != odd else torch.ones(3, 3)).sum().backward()

    def twice(shard):
        more(shard)
        if shard == odd:
            model[0](x)

    texts = []
    for odd in (3, 0):  # noqa: B007
        texts.append(message(RuntimeError, lambda: reducer.run_shards(more)))
    texts.append(message(RuntimeError, lambda: reducer.run_shards(twice)))
    odd = 3
    texts.append(message(RuntimeError, lambda: reducer.run_shards(other_shape)))
    odd = None
    reducer.run_shards(more)
    return texts


def test_shards_that_differ(ranks):
    (texts,) = ranks("gloo", 1)(different_layers)
    for text in texts[:3]:
        assert "shards of this rank differ in their synchronised batch norms" in text
    assert "running_mean should contain 3 elements not 2" in texts[3]


def refused(world):
    def layers():
        return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    converted = ddp.convert_sync_batchnorm(layers())
    torchs = nn.SyncBatchNorm.convert_sync_batchnorm(layers())
    group = dist.new_group()
    elsewhere = ddp.convert_sync_batchnorm(layers(), group)
    reducer = ddp.Reducer(converted, shards=2)
    late = ddp.Reducer(layers(), shards=2)
    ddp.convert_sync_batchnorm(late.module, group)
    shard = reducer.shard_range[0]
    texts = [
        message(ValueError, lambda: ddp.Reducer(torchs, shards=2)),
        message(ValueError, lambda: ddp.Reducer(elsewhere, shards=2)),
        message(ValueError, lambda: ddp.Reducer(converted, shards=2, fuse_wgrad=True)),
        message(RuntimeError, lambda: reducer.shard(shard).__enter__()),
        message(ValueError, lambda: late.run_shards(print)),
    ]
    dist.destroy_process_group(group)
    return texts


def test_refusals(ranks):
    for found in ranks("gloo", 2)(refused):
        expected = [
            "torch.nn.SyncBatchNorm cannot be used with shards=V",
            "needs the Reducer's process group",
            "fuse_wgrad cannot be used with shards=V and synchronised batch norm",
            "use reducer.run_shards(function)",
            "needs the Reducer's process group",
        ]
        for text, part in zip(found, expected, strict=True):
            assert part in text


# A thread that takes turns ------------------------------------------------------------------------


def test_a_turn_runs_only_while_it_is_waited_for():
    seen = []

    def function(turn):
        seen.append(turn.gather(torch.tensor([1.0])).item())
        seen.append(turn.gather(torch.tensor([2.0])).item())

    turn = Turn(function)
    turn.resume()
    assert turn.row.item() == 1
    turn.resume(torch.tensor(5.0))
    assert (seen, turn.row.item()) == ([5], 2)
    turn.resume(torch.tensor(6.0))
    assert (seen, turn.row) == ([5, 6], None)
    turn.end()


@pytest.mark.parametrize("begun", [False, True])
def test_a_turn_that_ends_early(begun):
    seen = []

    def function(turn):
        try:
            turn.gather(torch.zeros(1))
            seen.append("more")
        finally:
            seen.append("end")

    turn = Turn(function)
    if begun:
        turn.resume()
    turn.end()
    assert seen == (["end"] if begun else [])
