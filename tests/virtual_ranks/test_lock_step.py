"""Virtual ranks of a rank in lock step, for synchronised batch norm."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_from_scratch as ddp
from tests.support.on_ranks import on
from tests.support.tiers import slow
from tests.virtual_ranks.programs import IN_LOCK_STEP, Training, assert_bits, trained
from tests.virtual_ranks.test_virtual_ranks import Stop, stop


def in_lock_step(ranks, crew, name):
    backend, world_size, *way = crew.split("-")
    return ranks(backend, int(world_size))(trained, name, "".join(way), True)


@pytest.mark.parametrize(
    "crew",
    ["gloo-3-messages", "gloo-3-2 machines"]
    + [slow(crew) for crew in ("gloo-3", "mpi-2", "mpi-4-2 machines", "node-3")],
)
def test_bits_of_any_number_of_ranks(ranks, crew):
    for name in IN_LOCK_STEP if crew in ("gloo-3", "mpi-2") else ["cnn"]:
        (expected,) = in_lock_step(ranks, "gloo-1", name)
        assert_bits(expected, in_lock_step(ranks, crew, name), name)


def network():
    torch.manual_seed(3)
    layers = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5), nn.BatchNorm1d(5)
    return nn.Sequential(*layers, nn.Linear(5, 1)).double()


@on("gloo-3")
def test_a_step_is_that_of_one_process_with_the_whole_batch(world):
    ours, whole = ddp.convert_sync_batchnorm(network()), network()
    reducer = ddp.Reducer(ours, virtual_ranks=8)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (ours, whole)]
    for step in range(3):
        x = torch.randn(24, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        reducer.run_virtual_ranks(
            lambda virtual_rank, x=x: ours(x.chunk(8)[virtual_rank]).exp().mean().backward()
        )
        whole.zero_grad()
        whole(x).exp().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours.state_dict(), whole.state_dict(), rtol=1e-10, atol=1e-10)


def stopped(world, name):
    training = Training(IN_LOCK_STEP[name], None, True)
    norm = next(layer for layer in training.model.modules() if isinstance(layer, ddp.SyncBatchNorm))
    training.train(steps=1)

    def run(virtual_rank, place, failing):
        if virtual_rank == failing:
            if place is None:
                raise Stop
            with place(stop):
                training.run(1, virtual_rank)
        training.run(1, virtual_rank)

    places = (None, norm.register_forward_hook, norm.register_full_backward_hook)
    for failing, place in product(training.reducer.virtual_rank_range[::3], places):
        torch.manual_seed(7)
        with pytest.raises(Stop):
            training.reducer.run_virtual_ranks(partial(run, place=place, failing=failing))
        assert torch.initial_seed() == 7
        assert training.reducer.sync
    training.average(1)
    training.reducer.abort_step()  # after the average
    return training.train(first=1)


@pytest.mark.parametrize("name", ["cnn", "counting"])
def test_a_step_that_failed_is_repeated(ranks, name):
    (expected,) = in_lock_step(ranks, "gloo-1", name)
    assert_bits(expected, ranks("gloo", 1)(stopped, name))


def test_virtual_ranks_that_differ(alone):
    model = nn.ModuleList(nn.BatchNorm1d(2) for _ in range(2))
    ddp.convert_sync_batchnorm(model)
    reducer = ddp.Reducer(model, virtual_ranks=4, find_unused_parameters=True)

    def run(virtual_rank, odd, width=2, twice=False):
        outputs = model[0](torch.ones(3, width if virtual_rank == odd else 2))
        (model[1](outputs) if virtual_rank == odd and width == 2 else outputs).sum().backward()
        if twice and virtual_rank == odd:
            model[0](torch.ones(3, 2))

    differ = "virtual ranks of this rank differ in their synchronised batch norms"
    for options, text in (
        ({"odd": 0}, differ),
        ({"odd": 0, "twice": True}, differ),
        ({"odd": 3, "width": 3}, "running_mean should contain 3 elements not 2"),
    ):
        with pytest.raises(RuntimeError, match=text):
            reducer.run_virtual_ranks(partial(run, **options))
    reducer.run_virtual_ranks(partial(run, odd=None))


@on("gloo-2")
def test_refusals(world):
    def layers():
        return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    converted = ddp.convert_sync_batchnorm(layers())
    torchs = nn.SyncBatchNorm.convert_sync_batchnorm(layers())
    group = dist.new_group()
    elsewhere = ddp.convert_sync_batchnorm(layers(), group)
    reducer = ddp.Reducer(converted, virtual_ranks=2)
    late = ddp.Reducer(layers(), virtual_ranks=2)
    ddp.convert_sync_batchnorm(late.module, group)
    own = "needs the Reducer's process group"
    fused = "fuse_wgrad cannot be used with virtual_ranks=V and synchronised batch norm"
    for call, text in (
        (lambda: ddp.Reducer(torchs, virtual_ranks=2), "torch.nn.SyncBatchNorm cannot be"),
        (lambda: ddp.Reducer(elsewhere, virtual_ranks=2), own),
        (lambda: ddp.Reducer(converted, virtual_ranks=2, fuse_wgrad=True), fused),
        (
            reducer.virtual_rank(reducer.virtual_rank_range[0]).__enter__,
            r"use reducer\.run_virtual_ranks\(function\)",
        ),
        (lambda: late.run_virtual_ranks(print), own),
    ):
        with pytest.raises((ValueError, RuntimeError), match=text):
            call()
    dist.destroy_process_group(group)
