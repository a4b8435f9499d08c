"""One copy of parameters and state for a machine: the same numbers, and no copy more."""

import copy
import itertools
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_from_scratch as ddp
from ddp_from_scratch import mpi
from ddp_from_scratch.errors import NoSharedMemory
from ddp_from_scratch.mpi.process_group import ProcessGroupMPI
from ddp_from_scratch.node import shared_memory_beside, windows
from ddp_from_scratch.node.staging import share_of
from tests.support.optimizer_pair import torchs
from tests.support.tiers import slow

SETTINGS = (
    ("SGD", {"lr": 0.01}),
    ("SGD", {"lr": 0.01, "momentum": 0.9}),
    ("SGD", {"lr": 0.01, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.01, "maximize": True}),
    ("AdamW", {"lr": 1e-3}),
    ("AdamW", {"lr": 1e-3, "betas": (0.8, 0.9), "weight_decay": 0.1, "amsgrad": True}),
    ("Adam", {"lr": 1e-3, "weight_decay": 0.1, "maximize": True}),
)
BOTH = (("SGD", {"lr": 0.01, "momentum": 0.9}), ("AdamW", {"lr": 1e-3, "weight_decay": 0.1}))
each_kind = pytest.mark.parametrize(("kind", "settings"), BOTH, ids=["SGD", "AdamW"])


# Without MPI and with it.
each_backend = pytest.mark.parametrize("backend", ["gloo", slow("mpi")])


def node_shared(kind):
    return getattr(ddp, f"NodeShared{kind}")


class Net(nn.Module):
    """Odd sizes, two dtypes, a channels-last weight, a branch, and one of more than a chunk."""

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


def train(world, optimizer_class, settings, two_calls):
    model, reducer, optimizer = made(optimizer_class, settings, find_unused_parameters=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(5):
        branch = step == 3  # so `first` has no gradient, and `other` its first one
        optimizer.zero_grad()
        if step == 4:
            with reducer.no_sync():
                loss_of(model, world, 50).backward()
        loss = loss_of(model, world, step, branch)
        if two_calls:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        else:
            optimizer.backward_and_step(loss)
        scheduler.step()
    ddp.check_sync(model, optimizers=[optimizer])
    return model, optimizer


def as_flat(world):
    # Each way with each class, but not with each of its settings.
    for (kind, settings), two_calls in zip(SETTINGS, itertools.cycle((False, True))):
        expected, flat = train(world, getattr(ddp, kind), settings, two_calls)
        model, shared = train(world, node_shared(kind), settings, two_calls)
        exact = world.world_size & (world.world_size - 1) == 0
        near = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-4, "atol": 1e-6}
        torch.testing.assert_close(model.state_dict(), expected.state_dict(), **near)
        torch.testing.assert_close(shared.state_dict(), flat.state_dict(), **near)


@pytest.mark.parametrize("size", [slow(2), 3, 4])
@each_backend
def test_the_numbers_are_those_of_the_flat_optimizer(ranks, backend, size):
    ranks(backend, size)(as_flat)


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
            with torch.no_grad():
                tensor.fill_(value)
        dist.barrier()
        assert tensor.eq(value).all()
    apart = copy.deepcopy(model)
    dist.barrier()
    with torch.no_grad():
        apart.wide.weight.fill_(world.rank)  # each rank's own
    dist.barrier()
    assert apart.wide.weight.eq(world.rank).all()
    assert model.wide.weight.eq(7.0).all()


@each_kind
@each_backend
def test_all_ranks_have_the_same_memory(ranks, backend, kind, settings):
    ranks(backend, 3)(one_copy, kind, settings)


def resumed(world, kind, settings):
    """With torch's optimizer for the steps between: the same as without."""

    def torch_optimizer(groups, *, reducer, **settings):
        return torchs(kind)(groups, **settings)

    def trained(optimizer_class, states, steps):
        model, _, optimizer = made(optimizer_class, settings, find_unused_parameters=True)
        in_one = hasattr(optimizer, "backward_and_step")
        if in_one:
            optimizer.backward_and_step(loss_of(model, world, 9))  # moves the parameters
            dist.barrier()
        if states is not None:
            model.load_state_dict(states[0])
            optimizer.load_state_dict(states[1])
        dist.barrier()
        for step in steps:
            optimizer.zero_grad()
            loss = loss_of(model, world, step)
            if in_one:
                optimizer.backward_and_step(loss)
            else:
                loss.backward()
                optimizer.step()
        return copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    begun = trained(node_shared(kind), None, range(2))
    expected = trained(node_shared(kind), begun, range(2, 6))
    half = trained(torch_optimizer, begun, range(2, 4))
    found = trained(node_shared(kind), half, range(4, 6))
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0)
    torch.testing.assert_close(found[1]["state"], expected[1]["state"], rtol=0, atol=0)


@each_kind
@each_backend
def test_states_go_both_ways(ranks, backend, kind, settings):
    ranks(backend, 2)(resumed, kind, settings)


def misused(world):
    group = dist.new_group(timeout=timedelta(seconds=20))
    model = nn.Linear(3, 3)
    ddp.broadcast_parameters(model)
    reducer = ddp.Reducer(model, group, gradient_as_bucket_view=True)
    optimizer = ddp.NodeSharedSGD(model.parameters(), lr=0.1, reducer=reducer)
    reducer.register_comm_hook(None, ddp.comm_hooks.bf16_compress_hook)
    with pytest.raises(RuntimeError, match="cannot go through a comm hook"):
        optimizer.backward_and_step(model(torch.ones(1, 3)).sum())
    model = nn.Linear(3, 3)
    torch.nn.init.constant_(model.weight, world.rank)
    reducer = ddp.Reducer(model, group, gradient_as_bucket_view=True)
    optimizer = ddp.NodeSharedSGD(model.parameters(), lr=0.1, reducer=reducer)
    with pytest.raises(RuntimeError, match="weight"):  # unlike parameters would become one
        optimizer.backward_and_step(model(torch.ones(1, 3)).sum())
    ddp.broadcast_parameters(model, process_group=group)
    model.zero_grad()
    optimizer.backward_and_step(model(torch.ones(1, 3)).sum())
    optimizer.param_groups[0]["lr"] = 0.1 * (world.rank + 1)
    with pytest.raises(RuntimeError, match=r"different operations.*step with lr=0\.1 .*lr=0\.2"):
        optimizer.backward_and_step(model(torch.ones(1, 3)).sum())


def other_settings(world, changed):
    group = dist.new_group(timeout=timedelta(seconds=20))
    model = nn.Linear(3, 3)
    ddp.broadcast_parameters(model, process_group=group)
    reducer = ddp.Reducer(model, group)
    optimizer = ddp.NodeSharedAdamW(model.parameters(), torch.tensor(1e-3), reducer=reducer)
    optimizer.backward_and_step(model(torch.ones(1, 3)).sum())
    if world.rank:
        optimizer.param_groups[0].update(changed)
        if "step" in changed:
            optimizer.state[model.weight]["step"] += 1
    with pytest.raises(RuntimeError, match=r"different operations.*step with lr"):
        optimizer.backward_and_step(model(torch.ones(1, 3)).sum())


@pytest.mark.parametrize(
    "changed",
    [
        {"lr": 0.00100001},
        {"betas": (0.9, 0.9)},
        {"eps": 1e-6},
        {"maximize": True},
        {"weight_decay": 0.0},
        {"decoupled_weight_decay": False},
        {"step": 1},
    ],
    ids=str,
)
@each_backend
def test_ranks_that_step_otherwise_are_named(ranks, backend, changed):
    ranks(backend, 2)(other_settings, changed)


@each_backend
def test_what_would_go_wrong_is_named(ranks, backend):
    ranks(backend, 2)(misused)


def replaced(world):
    model = nn.Linear(3, 3)
    ddp.broadcast_parameters(model)
    reducer = ddp.Reducer(model, gradient_as_bucket_view=True)
    optimizer = ddp.NodeSharedSGD(model.parameters(), lr=0.1, reducer=reducer)
    optimizer.backward_and_step(model(torch.ones(1, 3)).sum())
    model.weight.data = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"shape \(3, 3\) does not lie in shared memory any lon"):
        optimizer.backward_and_step(model(torch.ones(1, 3)).sum())


def transposed(world):
    model = nn.Conv2d(3, 3, 2)
    ddp.broadcast_parameters(model)
    reducer = ddp.Reducer(model, gradient_as_bucket_view=True)
    optimizer = ddp.NodeSharedSGD(model.parameters(), lr=0.1, reducer=reducer)
    model.to(memory_format=torch.channels_last)
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"shape \(3, 3, 2, 2\) cannot be moved into shared mem"):
        optimizer.backward_and_step(model(torch.ones(1, 3, 2, 2)).sum())
    assert model.weight.equal(before)


def without_a_rank(world):
    model = nn.Linear(3, 3)
    ddp.broadcast_parameters(model)
    reducer = ddp.Reducer(model, gradient_as_bucket_view=True)
    optimizer = ddp.NodeSharedSGD(model.parameters(), lr=0.1, reducer=reducer)
    with ddp.join(reducer), pytest.raises(RuntimeError, match=r"inside join\(\)"):
        optimizer.backward_and_step(model(torch.ones(1, 3)).sum())


def some_parameters(world):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    ddp.broadcast_parameters(model)
    reducer = ddp.Reducer(model, gradient_as_bucket_view=True)
    with pytest.raises(ValueError, match="must hold all of the reducer's parameters"):
        ddp.NodeSharedSGD(model[0].parameters(), reducer=reducer)
    reducer.remove()
    # What is not synchronised may differ.
    torch.nn.init.constant_(model[1].weight, world.rank)
    names = ["1.weight", "1.bias"]
    reducer = ddp.Reducer(model, gradient_as_bucket_view=True, ignore=names)
    optimizer = ddp.NodeSharedSGD(model.parameters(), lr=0.1, reducer=reducer)
    optimizer.backward_and_step(model(torch.ones(1, 3)).sum())
    ddp.check_sync(model, ignore=names)
    model, optimizer = copy.deepcopy((model, optimizer))  # which has no Reducer
    model(torch.ones(1, 3)).sum().backward()
    before = model[0].weight.clone()
    optimizer.step()
    assert not model[0].weight.equal(before)


@each_backend
def test_which_parameters(ranks, backend):
    ranks(backend, 2)(some_parameters)


def memory_after(world):
    group = dist.new_group()
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    ddp.broadcast_parameters(model, process_group=group)
    reducer = ddp.Reducer(model, group, gradient_as_bucket_view=True, bucket_cap_mb=0)
    optimizer = ddp.NodeSharedSGD(model.parameters(), lr=0.1, momentum=0.9, reducer=reducer)
    for _ in range(4):
        optimizer.zero_grad()
        optimizer.backward_and_step(model(torch.ones(1, 512)).sum())
    windows = shared_memory_beside(group)._windows._memories
    # For each of four runs one of parameters and one of momentum, and one for all gradients.
    assert len(windows) == 9
    weight = model[0].weight.detach()
    expected = weight.clone() * world.world_size
    dist.all_reduce(
        weight, group=shared_memory_beside(group)
    )  # there is one of it, not one of each rank
    assert weight.equal(expected)


@each_backend
def test_memory_that_was_moved_from_is_given_back(ranks, backend):
    ranks(backend, 2)(memory_after)


def a_slow_owner(world):
    model = nn.Linear(300, 300)
    ddp.broadcast_parameters(model)
    reducer = ddp.Reducer(model, gradient_as_bucket_view=True)
    optimizer = ddp.NodeSharedSGD(model.parameters(), lr=0.1, reducer=reducer)
    group = optimizer._group
    reduce_to_owners = group.reduce_to_owners

    def slowly(gradient, op, receive, label):
        def receive_late(begin, chunk):
            time.sleep(0.05 * world.rank)
            receive(begin, chunk)

        reduce_to_owners(gradient, op, receive_late, label)

    group.reduce_to_owners = slowly
    for _ in range(3):
        optimizer.backward_and_step(model(torch.ones(1, 300)).sum())
        seen = model.weight.detach().clone()
        dist.barrier()
        assert model.weight.equal(seen), "a step returned before all shares were written"
    del group.reduce_to_owners


@each_backend
def test_a_step_returns_when_all_shares_are_written(ranks, backend):
    ranks(backend, 2)(a_slow_owner)


def no_room(*_):
    raise NoSharedMemory("no room")


def without_room(world):
    group = dist.new_group()
    model = nn.Linear(3, 3)
    ddp.broadcast_parameters(model)
    shared_memory, windows.SharedMemory = windows.SharedMemory, no_room
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            reducer = ddp.Reducer(model, group, gradient_as_bucket_view=True)
    finally:
        windows.SharedMemory = shared_memory
    assert ["no room" in str(warning.message) for warning in told] == [True] * (world.rank == 0)
    model(torch.full((1, 3), world.rank + 1.0)).sum().backward()
    assert model.weight.grad.eq(1.5).all()
    with pytest.raises(
        ValueError, match="memory that the machine's ranks share, and there was none"
    ):
        ddp.NodeSharedSGD(model.parameters(), reducer=reducer)


@each_backend
def test_where_there_is_no_room_in_shared_memory(ranks, backend):
    ranks(backend, 2)(without_room)


def on_a_copy(world):
    """One rank may make a copy alone, so it has memory of its own."""
    copied = copy.deepcopy(ddp.DistributedDataParallel(nn.Linear(3, 3)))
    message = r"there was none: .* or its module is a copy of a wrapped one, to be wrapped itself"
    with pytest.raises(ValueError, match=message):
        ddp.NodeSharedSGD(copied.parameters(), reducer=copied.reducer)
    wrapped = ddp.DistributedDataParallel(copied.module)
    ddp.NodeSharedSGD(wrapped.parameters(), reducer=wrapped.reducer)


@each_backend
def test_a_copy_of_a_wrapped_module_is_refused(ranks, backend):
    ranks(backend, 2)(on_a_copy)


@each_backend
def test_no_rank_can_be_missing(ranks, backend):
    ranks(backend, 2)(without_a_rank)


@each_backend
def test_a_parameter_that_was_replaced_is_named(ranks, backend):
    ranks(backend, 2)(replaced)


@each_backend
def test_a_parameter_that_cannot_move_any_longer_is_not_stepped_alone(ranks, backend):
    ranks(backend, 2)(transposed)


def refused(world):
    model = nn.Linear(3, 3).bfloat16()
    reducer = ddp.Reducer(model, gradient_as_bucket_view=True)
    with pytest.raises(ValueError, match=r"needs parameters of float32 or float64.*bfloat16"):
        ddp.NodeSharedSGD(model.parameters(), reducer=reducer)


@each_backend
def test_parameters_that_cannot_move_are_refused(ranks, backend):
    ranks(backend, 2)(refused)


def without_shared_memory(world):
    model = nn.Linear(3, 3)
    reducer = ddp.Reducer(model, gradient_as_bucket_view=True, shared_memory=False)
    with pytest.raises(ValueError, match="NodeSharedSGD needs ranks that share memory: a process"):
        ddp.NodeSharedSGD(model.parameters(), reducer=reducer)


def test_a_group_without_shared_memory_is_refused(ranks):
    ranks("gloo", 2)(without_shared_memory)


def shares_over_machines(world, sizes):
    communicator = mpi.runtime.MPI.COMM_WORLD
    machine = next(i for i in range(len(sizes)) if world.rank < sum(sizes[: i + 1]))
    group = ProcessGroupMPI(communicator, timedelta(seconds=20), communicator.Split(machine))
    local, owners = world.rank - sum(sizes[:machine]), min(sizes)
    for numel in (1, 1000, 300_001):
        tensor = group.empty(numel, torch.float32)
        torch.arange(numel, out=tensor)
        tensor += world.rank
        found = torch.full((numel,), -1.0)

        def receive(begin, chunk, found=found):
            found[begin : begin + chunk.numel()] = chunk

        group.reduce_to_owners(tensor, dist.ReduceOp.AVG, receive, "")
        begin, end = share_of(numel, local, owners)
        expected = torch.arange(numel) + (world.world_size - 1) / 2
        torch.testing.assert_close(found[begin:end], expected[begin:end].float())
        assert found[:begin].eq(-1).all()
        assert found[end:].eq(-1).all()
        assert tensor.equal(torch.arange(numel) + float(world.rank))
    group.shutdown()


@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 2), (1, 2)])
def test_each_rank_gets_its_share_of_the_average(ranks, sizes):
    ranks("mpi", sum(sizes))(shares_over_machines, sizes)
