"""The same bits on any number of ranks."""

import os
import re
import signal
from datetime import timedelta
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_from_scratch as ddp
from ddp_from_scratch.core.observer import Observer
from ddp_from_scratch.sync.check_sync import DriftCheck
from ddp_from_scratch.world.closing import close_default_group
from tests.support.on_ranks import on
from tests.support.ranks import Crew
from tests.support.tiers import slow
from tests.virtual_ranks.programs import (
    FIRST_TIER,
    PROGRAMS,
    VIRTUAL_RANKS,
    Training,
    by_definition,
    trained,
)

CREWS = ["gloo-1", "gloo-3", "gloo-3-messages", "gloo-3-2 machines"]
MORE = ["node-3", "mpi-2", "mpi-3-2 machines", "gloo-6-messages", "gloo-4-ranks in turn"]


@pytest.mark.parametrize("crew", CREWS + [slow(crew) for crew in MORE])
def test_bits_are_those_of_one_process(ranks, crew):
    backend, world_size, *way = crew.split("-")
    for name in FIRST_TIER if crew in CREWS else PROGRAMS:
        found = ranks(backend, int(world_size))(trained, name, *way)
        assert set(found) == {by_definition(name)}, name


class Stop(Exception):
    """Ends a virtual rank."""


def stop(*_):
    raise Stop


def repeated(world, name):
    training = Training(PROGRAMS[name])
    run, reducer = training.run, training.reducer
    norm = next(layer for layer in training.model.modules() if hasattr(layer, "running_mean"))
    training.train(steps=1)
    places = (None, norm.register_forward_hook, norm.register_full_backward_hook)
    for failing, place in product(reducer.virtual_rank_range, places):

        def run_until(step, virtual_rank, failing=failing, place=place):
            if virtual_rank != failing:
                run(step, virtual_rank)
            elif place is None:
                raise Stop
            else:
                with place(stop):
                    run(step, virtual_rank)

        torch.manual_seed(7)
        with patch.object(training, "run", run_until), pytest.raises(Stop):
            training.average(1)
        assert (torch.initial_seed(), reducer.sync) == (7, True)
    training.average(1)
    for _ in range(2):
        reducer.abort_step()  # after the average
    return training.train(first=1)


REPEATED = ["cnn", "cnn, a flat optimizer", "branches, in views"]
REPEATED += ["counting"]


@pytest.mark.parametrize("crew", ["gloo-2", slow("mpi-2")])  # all ranks have as many virtual ranks
@pytest.mark.parametrize("name", REPEATED)
def test_a_step_that_failed_is_repeated(ranks, crew, name):
    assert set(ranks(crew[:-2], 2)(repeated, name)) == {by_definition(name)}


class Launches(Observer):
    def __init__(self):
        self.buckets = []

    def on_launch(self, bucket):
        self.buckets.append(bucket.index())


@pytest.mark.parametrize("names", [["static_graph"], ["find_unused_parameters", "skip_unused"]])
@on("gloo-2")
def test_one_rank_repeats_its_part_while_the_others_wait(world, names):
    """After `set_step` some ranks may be new, so all agree again on what is used."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))  # the second is not used
    options, launches = dict.fromkeys(names, True), Launches()
    options["observers"] = [launches]
    reducer = ddp.Reducer(model, virtual_ranks=4, bucket_cap_mb=0, **options)

    def run(virtual_rank):
        reducer.prepare_backward(loss := model[0](X).sum())
        loss.backward()

    for step in range(3):
        if world.rank == step == 1:
            with pytest.raises(Stop), reducer.virtual_rank(reducer.virtual_rank_range[0]):
                raise Stop
        reducer.run_virtual_ranks(run)
        assert model[0].bias.grad.tolist() == [1, 1]
        assert model[1].bias.grad is None
    later = [2, 3] if "skip_unused" in names else [0, 1, 2, 3]
    assert launches.buckets == [0, 1, 2, 3] + later * 2
    reducer.set_step(3)
    reducer.run_virtual_ranks(run)
    assert launches.buckets[-4:] == [0, 1, 2, 3]
    reducer.set_step(4)
    reducer.run_virtual_ranks(lambda _: model(X).sum().backward())
    assert model[1].bias.grad.tolist() == [1, 1]


def kept(world, name):
    training = Training(PROGRAMS[name])
    training.train(steps=1)
    counts, stops, run = [], [world.rank, -1], training.run
    for place in stops:
        stopped = training.reducer.virtual_rank_range[place]

        def run_until(virtual_rank, stopped=stopped):
            if virtual_rank == stopped:
                raise Stop
            run(1, virtual_rank)

        with pytest.raises(Stop):
            training.reducer.run_virtual_ranks(run_until)
        counts.append(training.reducer.set_step(1, keep=True))
    # Ranks have 2, 3 and 3 virtual ranks, of which 0, 1 and 2 end. Then they have 1, 2 and 2.
    assert counts == [3, 5]
    return training.train(first=1)


@pytest.mark.parametrize("crew", ["gloo-3", slow("mpi-3")])
def test_what_ranks_have_finished_of_a_step_is_kept(ranks, crew):
    for name in FIRST_TIER:
        assert set(ranks(crew[:-2], 3)(kept, name)) == {by_definition(name)}, name


def killed(world, name, rendezvous):
    training = Training(PROGRAMS[name])
    training.train(steps=1)

    def die(gradient):
        if training.reducer.sync:
            os.kill(os.getpid(), signal.SIGKILL)

    if world.rank == 1:
        next(training.model.parameters()).register_hook(die)
    with pytest.raises(RuntimeError):
        training.train(first=1)
    close_default_group()  # torch's own waits for what gloo never ends (`group.py`)
    store, limit = dist.FileStore(rendezvous, 2), timedelta(seconds=20)
    ways = {"rank": world.rank // 2, "world_size": 2}
    dist.init_process_group("gloo", store=store, timeout=limit, **ways)
    assert len(training.reducer.virtual_rank_range) == VIRTUAL_RANKS // 2
    return training.train(first=1)


@pytest.mark.parametrize("name", ["cnn", slow("cnn, watched"), slow("branches, in views")])
def test_a_rank_is_killed_and_the_others_repeat_the_step(ranks, tmp_path, name):
    crew = Crew("gloo", 3, fresh=True)
    try:
        found = crew(killed, name, str(tmp_path / "rendezvous"), dies=1)
    finally:
        crew.end()
    assert set(found[::2]) == {by_definition(name)}


X = torch.ones(1, 2)


@on("gloo-2")
def test_refusals(world):
    def make(model=None, **options):
        return ddp.Reducer(model or nn.Linear(2, 2), **{"virtual_ranks": 4} | options)

    def norms(convert=lambda model: model):
        return convert(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))

    def joined():
        with ddp.join(reducer):
            reducer.module(X)

    def hooked():
        reducer.register_comm_hook(None, ddp.comm_hooks.bf16_compress_hook)

    reducer, without = make(), ddp.Reducer(nn.Linear(2, 2))
    late, parameters = make(norms()), reducer.module.parameters()
    ddp.convert_sync_batchnorm(late.module)
    weight = "cannot be used with weight() or join()"
    node = 'virtual_ranks=V has a sum of its own and cannot be used with SGD(shard="node")'
    synced = "synchronised batch norm cannot be used with virtual_ranks=V"
    for call, text in (
        (lambda: make(virtual_ranks=3), "virtual ranks must be a power of two, got 3"),
        (lambda: make(virtual_ranks=0), "virtual ranks must be a power of two, got 0"),
        (lambda: make(virtual_ranks=1), "2 ranks need at least as many virtual ranks, got 1"),
        (lambda: make(nn.Embedding(3, 2, sparse=True)), "sparse gradients cannot be"),
        (lambda: ddp.SGD(parameters, 1, reducer=reducer, shard="node"), node),
        (lambda: reducer.weight(1), weight),
        (joined, weight),
        (hooked, "cannot be used with a comm"),
        (lambda: without.virtual_rank(0), "has no virtual ranks: make it with virtual_ranks"),
        (lambda: make(norms(ddp.convert_sync_batchnorm)), synced),
        (lambda: make(norms(nn.SyncBatchNorm.convert_sync_batchnorm)), synced),
        (lambda: late.run_virtual_ranks(print), synced),
    ):
        with pytest.raises((ValueError, RuntimeError), match=re.escape(text)):
            call()


def test_each_mistake_has_its_error_and_the_next_step_is_right(alone):
    """Each begins with a new step of 4 virtual ranks, which come as 3, 2, 1, 0 on one rank."""
    model = nn.Linear(2, 2)
    reducer = ddp.Reducer(model, virtual_ranks=4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def run(*virtual_ranks):
        for virtual_rank in virtual_ranks:
            with reducer.virtual_rank(virtual_rank):
                model(X).sum().backward()

    def nested():
        with reducer.virtual_rank(3), reducer.virtual_rank(2):
            pass

    def missing():
        run(3, 2)
        optimizer.step()

    def local():
        run(3, 2, 1)
        with reducer.virtual_rank(0), reducer.no_sync():
            model(X).sum().backward()

    def outside():
        model(X).sum().backward()

    for call, text in (
        (lambda: run(2), "virtual rank 2 runs out of order: the next one is 3"),
        (lambda: run(3, 3), "virtual rank 3 runs twice: the next one is 2"),
        (lambda: run(4), "virtual rank 4 is not one of this rank's, which are [3, 2, 1, 0]"),
        (nested, "virtual rank 2 begins inside virtual rank 3"),
        (missing, "the optimizer steps before virtual ranks [1, 0] of this rank have run"),
        (local, "virtual rank 0 ended without gradients of weight, bias: one backward pass"),
        (outside, "every backward pass goes into `with reducer.virtual_rank(i)`"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=re.escape(text)):
            call()
        reducer.abort_step()
        run(3, 2, 1, 0)
        assert model.bias.grad.tolist() == [1, 1]
        optimizer.step()


@on("gloo-3")
def test_buckets_smaller_than_the_number_of_ranks_and_complex_ones(world):
    sizes = {0: torch.float32, 1: torch.float32, 2: torch.float32, 5: torch.complex64}
    parameters = [torch.zeros(size, dtype=dtype) for size, dtype in sizes.items()]
    model = nn.ParameterList(map(nn.Parameter, parameters))
    reducer = ddp.Reducer(model, virtual_ranks=8, bucket_cap_mb=0)
    for virtual_rank in reducer.virtual_rank_range:
        with reducer.virtual_rank(virtual_rank):
            sum((parameter * (1 - 2j) * virtual_rank).sum().real for parameter in model).backward()
    found = [parameter.grad.tolist() for parameter in model]
    assert found == [[], [3.5], [3.5, 3.5], [3.5 + 7j] * 5]


def test_a_rank_alone_is_checked_as_several_are(alone):
    """Other ranks may join later (`elastic`)."""
    with pytest.raises(ValueError, match="which rescales the rows"):
        ddp.Reducer(nn.Embedding(3, 2, max_norm=1.0), virtual_ranks=2)


@torch.no_grad()
def rescale(layer, inputs):
    layer.bias.mul_(1)


@on("gloo-2")
def test_forward_passes_may_write_from_the_first_step_of_new_ranks_on(world):
    model = nn.Linear(2, 2)
    reducer = ddp.Reducer(model, virtual_ranks=2)
    model.register_forward_pre_hook(rescale)
    for step in (7, 8, 20, 21):
        if step in (7, 20):
            reducer.set_step(step)
        reducer.run_virtual_ranks(lambda i: model(X).sum().backward())
        assert reducer.core.observer(DriftCheck) is not None  # ranks are compared


class Masked(nn.Module):
    """Its forward pass makes buffers, and one of them grows."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.register_buffer("none", None)
        self.register_buffer("grown", torch.ones(1))
        self.inner = nn.Module()

    def forward(self, x):
        assert (self.none is None, len(self.grown)) == (True, 1)
        assert "made" not in self.inner._buffers
        self.none = x.new_full((4,), 2.0)
        self.grown = torch.ones(4) * self.grown.sum()
        self.inner.register_buffer("made", torch.full((4,), 3.0))
        return self.fc(x * self.none * self.grown * self.inner.made).sum()


@on("gloo-2")
def test_buffers_that_forward_makes_are_made_by_each_virtual_rank(world):
    model = Masked()
    reducer = ddp.Reducer(model, virtual_ranks=4)
    ran = reducer.run_virtual_ranks(lambda v: model(torch.full((1, 4), v + 1.0)).backward() or v)
    assert ran == sorted(reducer.virtual_rank_range)
    assert model.fc.weight.grad.tolist() == [[15.0] * 4] * 2  # 6 times the mean of 1 to 4
    assert (model.none.tolist(), model.inner.made.tolist()) == ([2] * 4, [3] * 4)
    reducer.abort_step()
    assert (model.none, model.grown.tolist(), *model.inner.buffers()) == (None, [1])
