"""One copy of parameters and state for a machine: the same numbers, and no copy more."""

import copy
import os
import warnings
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_from_scratch as ddp
from ddp_from_scratch.backend import stage
from ddp_from_scratch.common.errors import NoSharedMemory
from ddp_from_scratch.node import shared_memory_group
from tests.support.on_ranks import on
from tests.support.tiers import slow

BOTH = (("SGD", {"lr": 0.01, "momentum": 0.9}), ("AdamW", {"lr": 1e-3, "weight_decay": 0.1}))
each_kind = pytest.mark.parametrize(("kind", "settings"), BOTH, ids=["SGD", "AdamW"])
gloo_and_mpi = pytest.mark.parametrize("crew", ["gloo-2", slow("mpi-2")], indirect=True)


def node_shared(kind):
    return getattr(ddp, f"NodeShared{kind}")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.wide = nn.Linear(5, 70_001)
        self.narrow = nn.Linear(70_001, 3)
        self.first = nn.Linear(3, 3, dtype=torch.float64)
        self.other = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x, branch=False):
        x = self.narrow(self.wide(self.conv(x).mean((2, 3))).relu()).double()
        return (self.other if branch else self.first)(x)


def made(optimizer_class, settings, **reducer_settings):
    torch.manual_seed(0)
    model = Net()
    reducer = ddp.Reducer(model, gradient_as_bucket_view=True, **reducer_settings)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        {"params": [p for p in model.parameters() if p.dim() > 1]},
    ]
    return model, reducer, optimizer_class(groups, **settings, reducer=reducer)


def loss_of(model, world, step, branch=False):
    torch.manual_seed(100 * step + world.rank)
    return model(torch.randn(4, 3, 8, 8), branch).tanh().mean()


def one_copy(world, kind, settings):
    model, _, optimizer = made(node_shared(kind), settings)
    loss = loss_of(model, world, 0) + loss_of(model, world, 0, branch=True)
    optimizer.backward_and_step(loss)
    assert all(parameter.grad is None for parameter in model.parameters())
    state = dict(optimizer.state[model.wide.weight])
    state.pop("step", None)  # each rank's own
    for value, tensor in enumerate((model.wide.weight, *state.values()), 7):
        dist.barrier()
        if world.rank == world.world_size - 1:
            torch.nn.init.constant_(tensor, value)
        dist.barrier()
        assert tensor.eq(value).all()
    apart = copy.deepcopy(model)
    torch.nn.init.constant_(apart.wide.weight, world.rank)  # each rank's own
    dist.barrier()
    assert apart.wide.weight.eq(world.rank).all()
    assert model.wide.weight.eq(7.0).all()


@each_kind
@gloo_and_mpi
def test_all_ranks_have_the_same_memory(crew, kind, settings):
    crew(one_copy, kind, settings)


X = torch.ones(1, 3)


def linear(group=None, model=None, same=True, kind="SGD", settings=None, **options):
    model = model or nn.Linear(3, 3)
    if same:
        ddp.broadcast_parameters(model, process_group=group)
    reducer = ddp.Reducer(model, group, **options)
    optimizer = node_shared(kind)(model.parameters(), **settings or {"lr": 0.1}, reducer=reducer)

    def step(x=X):
        optimizer.zero_grad()
        optimizer.backward_and_step(model(x).sum())

    return model, reducer, optimizer, step


@on("gloo-2")
def test_refuses_a_comm_hook_and_to_miss_a_rank(world):
    _, reducer, _, step = linear()
    reducer.register_comm_hook(None, ddp.comm_hooks.bf16_compress_hook)
    with pytest.raises(RuntimeError, match="cannot go through a comm hook"):
        step()
    _, reducer, _, step = linear()
    with ddp.join(reducer), pytest.raises(RuntimeError, match=r"inside join\(\)"):
        step()


@on("gloo-2")
def test_refuses_unlike_parameters_and_unlike_steps(world):
    group = dist.new_group(timeout=timedelta(seconds=20))
    model = nn.Linear(3, 3)
    torch.nn.init.constant_(model.weight, world.rank)
    *_, step = linear(group, model, same=False)
    with pytest.raises(RuntimeError, match="weight"):
        step()
    for changed in ({"lr": 0.2}, {"betas": (0.9, 0.9)}, {"step": 1}, {"weight_decay": 0.0}):
        group = dist.new_group(timeout=timedelta(seconds=20))
        settings = {"lr": torch.tensor(0.1)}
        model, _, optimizer, step = linear(group, kind="AdamW", settings=settings)
        step()
        if world.rank:
            optimizer.param_groups[0].update(changed)
            if "step" in changed:
                optimizer.state[model.weight]["step"] += 1
        told = r"different operations.*step with lr=0\.1"
        told += r".*lr=0\.2" if changed == {"lr": 0.2} else ""
        with pytest.raises(RuntimeError, match=told):
            step()


@on("gloo-2")
def test_refuses_parameters_that_were_replaced_or_cannot_move(world):
    model, _, _, step = linear()
    step()
    model.weight.data = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"shape \(3, 3\) does not lie in shared memory any lon"):
        step()
    model, _, _, step = linear(model=nn.Conv2d(3, 3, 2))
    model.to(memory_format=torch.channels_last)
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"shape \(3, 3, 2, 2\) cannot be moved into shared mem"):
        step(torch.ones(1, 3, 2, 2))
    assert model.weight.equal(before)
    with pytest.raises(ValueError, match=r"needs parameters of float32 or float64.*bfloat16"):
        linear(model=nn.Linear(3, 3).bfloat16())


@on("gloo-2")
def test_takes_all_parameters_but_those_that_are_ignored(world):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    ddp.broadcast_parameters(model)
    reducer = ddp.Reducer(model)
    with pytest.raises(ValueError, match="must hold all of the reducer's parameters"):
        ddp.NodeSharedSGD(model[0].parameters(), reducer=reducer)
    reducer.remove()
    torch.nn.init.constant_(model[1].weight, world.rank)  # may differ
    names = ["1.weight", "1.bias"]
    *_, step = linear(model=model, same=False, ignore=names)
    step()
    ddp.check_sync(model, ignore=names)


@gloo_and_mpi
@on("crew")
def test_gives_memory_that_was_moved_from_back(world):
    group = dist.new_group()
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    *_, step = linear(group, model, settings={"lr": 0.1, "momentum": 0.9}, bucket_cap_mb=0)
    for _ in range(4):
        step(torch.ones(1, 512))
    beside = shared_memory_group(group)
    # For each of four runs one of parameters and one of momentum, and one for all gradients.
    assert len(beside._windows._memories) == 9
    weight = model[0].weight.detach()
    expected = weight.clone() * world.world_size
    dist.all_reduce(weight, group=beside)  # there is one of it, not one of each rank
    assert weight.equal(expected)


@gloo_and_mpi
@on("crew")
def test_returns_when_all_shares_are_written(world):
    """Rank 1 writes its share when rank 0 waits for it, or has not waited and continues."""
    model, _, optimizer, step = linear(model=nn.Linear(300, 300, bias=False))
    step(torch.ones(1, 300))  # frees what has moved
    group = optimizer._group
    came = group.empty(1, torch.int64, for_all=True).zero_()
    dist.barrier()
    reduce_to_owners, barrier = group.reduce_to_owners, group.barrier

    def slowly(gradient, op, receive, label):
        def receive_late(begin, chunk):
            while world.rank == 1 and not came:
                os.sched_yield()
            receive(begin, chunk)

        reduce_to_owners(gradient, op, receive_late, label)

    def at_the_end():
        came.add_(world.rank == 0)
        return barrier()

    changed = {"reduce_to_owners": slowly, "barrier": at_the_end}
    with patch.multiple(group, **changed):
        step(torch.ones(1, 300))
    seen = model.weight.detach().clone()
    came.add_(world.rank == 0)
    dist.barrier()
    assert model.weight.equal(seen)


@on("gloo-2")
def test_refuses_gradients_that_are_not_shared(world):
    """As there is no room; in a copy, which one rank may make alone; and without shared memory."""
    group = dist.new_group()
    model = nn.Linear(3, 3)
    ddp.broadcast_parameters(model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with patch.object(stage, "SharedMemory", side_effect=NoSharedMemory("no room")):
            reducer = ddp.Reducer(model, group, gradient_as_bucket_view=True)
    assert ["no room" in str(warning.message) for warning in told] == [True] * (world.rank == 0)
    model(torch.full((1, 3), world.rank + 1.0)).sum().backward()
    assert model.weight.grad.eq(1.5).all()
    with pytest.raises(ValueError, match="that the machine's ranks share, and there was none"):
        ddp.NodeSharedSGD(model.parameters(), reducer=reducer)
    copied = copy.deepcopy(ddp.DistributedDataParallel(nn.Linear(3, 3)))
    with pytest.raises(ValueError, match=r"there was none: .* or its module is a copy of a wrapp"):
        ddp.NodeSharedSGD(copied.parameters(), reducer=copied.reducer)
    wrapped = ddp.DistributedDataParallel(copied.module)
    ddp.NodeSharedSGD(wrapped.parameters(), reducer=wrapped.reducer)
    with pytest.raises(ValueError, match="needs ranks that share memory: a process"):
        linear(shared_memory=False)
