"""Steps that the ranks divide: the same numbers, and only a share of the work and the state."""

import copy
import gc
import os
import time
import warnings
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import chain
from unittest.mock import patch
from weakref import ref

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import ddp_from_scratch as ddp
from ddp_from_scratch.backend import stage
from ddp_from_scratch.backend.reduction import Reduction
from ddp_from_scratch.common.errors import NoSharedMemory
from ddp_from_scratch.common.group import all_gather_single, exchange
from ddp_from_scratch.core.observer import Observer
from ddp_from_scratch.node import shared_memory_group
from ddp_from_scratch.optim import shards
from tests.support.on_ranks import on
from tests.support.refusal import refusal
from tests.support.tiers import slow

KINDS = (("SGD", {"momentum": 0.9}), ("Adam", {"amsgrad": True}), ("AdamW", {"weight_decay": 0.1}))
each_kind = pytest.mark.parametrize(("kind", "settings"), KINDS, ids=[kind for kind, _ in KINDS])
each_shard = pytest.mark.parametrize("shard", ["node", "world"])
X = torch.ones(1, 3)


def linear(group=None, model=None, same=True, kind="SGD", settings=None, shard="node", **options):
    model = model or nn.Linear(3, 3)
    if same:
        ddp.broadcast_parameters(model, process_group=group)
    reducer = ddp.Reducer(model, group, **options)
    settings = {"shard": shard, **(settings or {"lr": 0.1})}
    optimizer = getattr(ddp, kind)(model.parameters(), **settings, reducer=reducer)

    def step(x=X):
        optimizer.zero_grad()
        optimizer.backward_and_step(model(x).sum())

    return model, reducer, optimizer, step


@each_kind
@on("gloo_pair")
def test_all_ranks_have_the_same_memory(world, kind, settings):
    model, _, optimizer, step = linear(model=nn.Linear(3, 70_001), kind=kind, settings=settings)
    step()
    assert all(parameter.grad is None for parameter in model.parameters())
    state = dict(optimizer.state[model.weight])
    state.pop("step", None)  # each rank's own
    for value, tensor in enumerate((model.weight, *state.values()), 7):
        dist.barrier()
        if world.rank == world.world_size - 1:
            torch.nn.init.constant_(tensor, value)
        dist.barrier()
        assert tensor.eq(value).all()
    apart = copy.deepcopy(model)
    torch.nn.init.constant_(apart.weight, world.rank)  # each rank's own
    dist.barrier()
    assert apart.weight.eq(world.rank).all()
    assert model.weight.eq(7.0).all()


@each_shard
@on("gloo-2")
def test_refuses_a_comm_hook_and_to_miss_a_rank(world, shard):
    _, reducer, _, step = linear(shard=shard)
    reducer.register_comm_hook(None, ddp.comm_hooks.bf16_compress_hook)
    with pytest.raises(RuntimeError, match="cannot go through a comm hook"):
        step()
    _, reducer, _, step = linear(shard=shard)
    with ddp.join(reducer), pytest.raises(RuntimeError, match=r"so join\(\) cannot be used"):
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


def divided(world, kind="AdamW", memory=True, tensors=False, **options):
    """A divided optimizer of two groups in a group of its own, which an error may end."""
    group = dist.new_group(timeout=timedelta(seconds=20))
    model = nn.Sequential(nn.Linear(3, 300), nn.Linear(300, 3))
    ddp.broadcast_parameters(model)
    named = {"shard": "world"} | {k: options.pop(k) for k in [*options] if k in OF_OPTIMIZER}
    reducer = ddp.Reducer(model, group, shared_memory=memory, **options)
    groups = [{"params": layer.parameters(), "lr": 0.125} for layer in model]
    for group in groups if tensors else ():
        group["lr"] = torch.tensor(0.125)
    if kind == "SGD":
        named["momentum"] = 0.5
    return model, getattr(ddp, kind)(groups, reducer=reducer, **named), reducer


OF_OPTIMIZER = ("shard", "overlap_forward")


def at_once(model, optimizer, max_norm=None):
    optimizer.zero_grad()
    optimizer.backward_and_step(model(X).sum(), max_norm=max_norm)


def in_two(model, optimizer):
    optimizer.zero_grad()
    model(X).sum().backward()
    optimizer.step()


# The kind, the change on one rank, and what the error says of it.
CHANGES = [
    ("AdamW", {"lr": 0.25}, "with lr=0.125,.*with lr=0.125/0.25,"),
    ("AdamW", {"weight_decay": 0.5}, "weight_decay=0.01.*weight_decay=0.01/0.5"),
    ("AdamW", {"betas": (0.5, 0.999)}, r"betas=\(0.9, 0.999\).*/\(0.5, 0.999\)"),
    ("AdamW", {"eps": 1e-3}, "eps=1e-08.*eps=1e-08/0.001"),
    ("AdamW", {"maximize": True}, "maximize=False/True"),
    ("AdamW", {"step": 3}, "of parts"),
    ("SGD", {"momentum": 0.25}, "momentum=0.5.*momentum=0.5/0.25"),
    ("SGD", {"nesterov": True}, "nesterov=False/True"),
    ("SGD", {"dampening": 0.5}, "dampening=0.0/0.5"),
]


@pytest.mark.parametrize("memory", [True, False], ids=["shared memory", "messages"])
@on("gloo-2")
def test_refuses_settings_that_are_not_those_of_the_other_ranks(world, memory):
    for number, (kind, change, text) in enumerate(CHANGES):
        overlap = number % 3 == 2
        step = at_once if number % 2 else in_two
        model, optimizer, reducer = divided(world, kind, memory, overlap_forward=overlap)
        step(model, optimizer)
        if world.rank:
            optimizer.param_groups[1].update(change)
            if "step" in change:
                optimizer.state[model[0].weight]["step"] += 1
        steps = [step] * (1 + overlap)  # with overlap in the next step
        with pytest.raises(RuntimeError, match=text):
            [each(model, optimizer) for each in steps]
        reducer.remove()


def settings_differ_on(world):
    model, optimizer, reducer = divided(world)
    at_once(model, optimizer, max_norm=1.0)
    optimizer.param_groups[0]["lr"] = 0.25 - 0.125 * (world.rank == 1)
    with pytest.raises(RuntimeError, match=r"different operations.*lr=0\.25.*lr=0\.125"):
        at_once(model, optimizer, max_norm=1.0)
    reducer.remove()


@pytest.mark.parametrize(
    ("shard", "memory"),
    [("node", True), ("world", True), ("world", False)],
    ids=["node", "world", "messages"],
)
@on("gloo-2")
def test_refuses_norms_that_are_not_those_of_the_other_ranks(world, shard, memory):
    model, optimizer, reducer = divided(world, memory=memory, shard=shard)
    for norm in (1.0, None, torch.tensor(0.5)):
        at_once(model, optimizer, max_norm=norm)
    with pytest.raises(RuntimeError, match=r"max_norm=0\.25(?s:.*)max_norm=0\.5"):
        at_once(model, optimizer, max_norm=0.25 * (1 + world.rank))
    reducer.remove()


@pytest.mark.parametrize("memory", [True, False], ids=["shared memory", "messages"])
@on("gloo-2")
def test_refuses_parameters_in_another_group_than_on_other_ranks(world, memory):
    for rates in ((0.125, 0.5), (0.125, 0.125)):  # groups of equal settings step equally
        model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
        ddp.broadcast_parameters(model)
        reducer = ddp.Reducer(model, dist.new_group(), shared_memory=memory)
        layers = reversed(model) if world.rank else model
        groups = [
            {"params": layer.parameters(), "lr": lr}
            for layer, lr in zip(layers, rates, strict=True)
        ]
        optimizer = ddp.SGD(groups, reducer=reducer, shard="world")
        told = r"lr=0.125/0.5, parameters of groups (\w+)(?s:.*)of groups (?!\1)"
        with nullcontext() if len({*rates}) == 1 else pytest.raises(RuntimeError, match=told):
            optimizer.backward_and_step(model(torch.ones(1, 32)).sum())
        reducer.remove()


@pytest.mark.parametrize(
    ("shard", "memory"),
    [("node", True), ("world", True), ("world", False)],
    ids=["node", "world", "messages"],
)
@on("gloo-2")
def test_refuses_another_state_than_other_ranks_have_loaded(world, shard, memory):
    for change in ("none", "broadcast", "moment", "step", "one rank"):
        model, optimizer, reducer = divided(world, memory=memory, shard=shard)
        at_once(model, optimizer)
        state = copy.deepcopy(optimizer.state_dict())
        dist.barrier()  # loading writes to memory that the other rank has just read
        if change in ("moment", "step") and world.rank:
            name = "exp_avg" if change == "moment" else "step"
            state["state"][3][name].view(-1)[-1] += 1
        if world.rank or change not in ("one rank", "broadcast"):
            optimizer.load_state_dict(state)
        if change == "broadcast":
            ddp.broadcast_optimizer_state(optimizer, 1)
        equal = change in ("none", "broadcast")
        told = r"load_state_dict\(\) of a state with checksum \w+"
        with nullcontext() if equal else pytest.raises(RuntimeError, match=told):
            at_once(model, optimizer)
        if equal:
            at_once(model, optimizer)
        reducer.remove()


@pytest.mark.parametrize("crew", [slow("mpi-2"), "gloo-3"], indirect=True)
def test_refuses_a_rate_that_is_not_that_of_the_other_ranks(crew):
    crew(settings_differ_on)


@pytest.mark.parametrize("memory", [True, False], ids=["shared memory", "messages"])
@on("gloo-2")
def test_settings_that_change_on_all_ranks_cost_nothing(world, memory):
    """Also numbers of other types, and a rate in a tensor that changes in place."""
    model, optimizer, reducer = divided(world, "SGD", memory, tensors=True)
    twin, plain, beside = divided(world, "SGD", memory, shard="none")
    twin.load_state_dict(model.state_dict())
    compared = patch.object(shards, "gather_objects", side_effect=AssertionError)
    # A bucket of its own message, and one that carries the checksum.
    for worth in (0, shards._MAX_CARRIED_NBYTES):
        with compared, patch.object(shards, "_MAX_CARRIED_NBYTES", worth):
            for step in range(3):
                for group, other in zip(optimizer.param_groups, plain.param_groups, strict=True):
                    group["lr"].mul_(0.5)
                    group["momentum"] = torch.tensor(0.25) if world.rank else 0.25
                    other.update(lr=group["lr"].item(), momentum=0.25)
                (at_once if step % 2 else in_two)(model, optimizer)
                (at_once if step % 2 else in_two)(twin, plain)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    reducer.remove(), beside.remove()


def changes_a_gradient(world, shard):
    for program in ("on one rank", "on all ranks", "not averaged"):
        options = {"check_every": 3, "local_steps": program == "not averaged"}
        model, optimizer, reducer = divided(world, "SGD", shard=shard, **options)
        optimizer.param_groups[1]["lr"] = 0.25
        for step in range(3):
            optimizer.zero_grad()
            refused = pytest.raises(RuntimeError, match=CHANGED)
            with refused if step == 2 and program != "on all ranks" else nullcontext():
                model(X * (1 + world.rank)).sum().backward()
            if step == 1 and program == "not averaged":
                optimizer.zero_grad()
                with reducer.no_sync():
                    model(X * (1 + world.rank)).sum().backward()
            elif step == 1 and (world.rank or program == "on all ranks"):
                model[0].weight.grad.zero_()
            if step < 2:
                optimizer.step()
        reducer.remove()


CHANGED = (
    r"average 3: the gradient of 0.weight in the last step of the optimizer is not the same .*: "
    r"\[1\] differ from rank 0: it was changed between backward\(\) and step\(\), or not averaged$"
)


@each_shard
@pytest.mark.parametrize("crew", ["gloo-2", slow("mpi-2")], indirect=True)
def test_a_check_finds_a_gradient_that_one_rank_has_changed(crew, shard):
    crew(changes_a_gradient, shard)


@each_shard
@on("gloo-2")
def test_refuses_parameters_that_were_replaced_or_cannot_move(world, shard):
    model, _, _, step = linear(shard=shard)
    step()
    model.weight.data = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"shape \(3, 3\) is not where SGD\(shard=.* put it"):
        step()
    model, _, _, step = linear(model=nn.Conv2d(3, 3, 2), shard=shard)
    model.to(memory_format=torch.channels_last)
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"shape \(3, 3, 2, 2\) cannot be moved any longer"):
        step(torch.ones(1, 3, 2, 2))
    assert model.weight.equal(before)
    for each in (shard, "none"):
        model, _, optimizer, _ = linear(shard=each)
        model(X).sum().backward()
        expected = (model.double().weight - 0.1 * model.weight.grad).detach()
        refused = pytest.raises(RuntimeError, match=r"shape \(3, 3\) cannot be moved any longer")
        with nullcontext() if each == "none" else refused:
            optimizer.step()
    torch.testing.assert_close(model.weight.detach(), expected)
    with pytest.raises(ValueError, match=r"of float32 or float64 on a CPU.*bfloat16"):
        linear(model=nn.Linear(3, 3).bfloat16(), shard=shard)


@on("gloo-2")
def test_takes_all_parameters_but_those_that_are_ignored(world):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    ddp.broadcast_parameters(model)
    reducer = ddp.Reducer(model)
    with pytest.raises(ValueError, match="must hold all of the reducer's parameters"):
        ddp.SGD(model[0].parameters(), shard="node", reducer=reducer)
    reducer.remove()
    torch.nn.init.constant_(model[1].weight, world.rank)  # may differ
    names = ["1.weight", "1.bias"]
    *_, step = linear(model=model, same=False, ignore=names)
    step()
    ddp.check_sync(model, ignore=names)


@on("gloo_pair")
def test_gives_memory_that_was_moved_from_back(world):
    group = dist.new_group()
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    *_, step = linear(group, model, settings={"lr": 0.1, "momentum": 0.9}, bucket_cap_mb=0)
    for _ in range(4):
        step(torch.ones(1, 512))
    beside = shared_memory_group(group)
    # For each of four segments one of parameters and one of momentum, and one for all gradients.
    assert len(beside._shared._memories) == 9
    weight = model[0].weight.detach()
    expected = weight.clone() * world.world_size
    dist.all_reduce(weight, group=beside)  # there is one of it, not one of each rank
    assert weight.equal(expected)


@on("gloo_pair")
def test_returns_when_all_shares_are_written(world):
    """Rank 1 writes its share when rank 0 waits for it, or has not waited and continues."""
    model, _, optimizer, step = linear(model=nn.Linear(300, 300, bias=False))
    step(torch.ones(1, 300))  # frees what has moved
    group = optimizer._shards._shared
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


@pytest.mark.parametrize("keeps", [True, False], ids=["beside it", "after it"])
@pytest.mark.parametrize("other", ["torch.optim.SGD", "ddp.SGD", "world", "one of the layers"])
@on("pair")
def test_another_optimizer_cannot_step_what_ranks_share(world, other, keeps):
    """Each rank would add its own step to the one copy."""
    model, optimizer, reducer = divided(world, "SGD", shard="node")
    at_once(model, optimizer)
    if not keeps:
        del optimizer
    parameters = model[1].parameters() if other == "one of the layers" else model.parameters()
    if other in ("ddp.SGD", "world"):
        shard = "none" if other == "ddp.SGD" else "world"
        second = ddp.SGD(parameters, lr=0.25, reducer=reducer, shard=shard)
    else:
        second = torch.optim.SGD(parameters, lr=0.25)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model(X).sum().backward()
    with pytest.raises(RuntimeError, match=r"^SGD would step a parameter of shape \(.*clone"):
        second.step()
    dist.barrier()
    assert all(map(torch.equal, before, model.parameters()))
    if other.startswith("torch"):
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        dist.barrier()
        second.step()
        changes = [b - 0.25 * p.grad for b, p in zip(before, model.parameters(), strict=True)]
        torch.testing.assert_close(changes, [*model.parameters()])


@on("pair")
def test_another_optimizer_that_divides_the_steps_takes_over(world):
    model, optimizer, reducer = divided(world, "SGD", shard="node")
    at_once(model, optimizer)
    at_once(model, ddp.AdamW(model.parameters(), reducer=reducer, shard="node"))
    ddp.check_sync(model, reducer.process_group)


@on("gloo-2")
def test_refuses_gradients_that_are_not_shared(world):
    """For lack of memory; in a copy, which one rank may make alone; and without shared memory."""
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
        ddp.SGD(model.parameters(), shard="node", reducer=reducer)
    copied = copy.deepcopy(ddp.DistributedDataParallel(nn.Linear(3, 3)))
    with pytest.raises(ValueError, match=r"there was none: .* or its module is a copy of a wrapp"):
        ddp.SGD(copied.parameters(), shard="node", reducer=copied.reducer)
    wrapped = ddp.DistributedDataParallel(copied.module)
    ddp.SGD(wrapped.parameters(), shard="node", reducer=wrapped.reducer)
    told = refusal(linear, shared_memory=False)
    assert "needs ranks that share memory, on Linux" in told


# What the ranks divide, beside what they do not ---------------------------------------------------


class Odd(nn.Module):
    """Sizes that fill no cache line, channels last, a number of float64, and an unused layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        # Larger than a block, so that a share ends inside it.
        self.conv = nn.Conv2d(3, 60, 3).to(memory_format=torch.channels_last)
        self.first, self.second = nn.Linear(60, 417), nn.Linear(417, 7)
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.unused = nn.Linear(3, 3)
        self.table = nn.Embedding(9, 7, sparse=True)

    def forward(self, x):
        x = self.second(self.first(self.conv(x).mean((2, 3))).relu()) * self.scale
        return (x + self.table(torch.arange(len(x)))).tanh()


class Little(nn.Module):
    """A parameter without elements, in a bucket of its own, and one that cannot move on a CPU."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.nothing, self.first = nn.Parameter(torch.zeros(0, 2)), nn.Linear(3, 3)
        self.last = nn.Linear(3, 3, dtype=dtype)

    def forward(self, x):
        x = self.first(x) + self.nothing.sum()
        return self.last(x.to(self.last.weight.dtype)).float()


@each_shard
@on("gloo-2")
def test_buckets_without_elements_and_norms_of_none(world, shard):
    *_, optimizer, step = linear(model=Little(), bucket_cap_mb=0, shard=shard)
    for _ in range(3):
        step()
    optimizer.state_dict()
    for clipped, model in ((True, Little()), (False, Little(torch.bfloat16))):
        *_, optimizer, _ = linear(
            model=model, bucket_cap_mb=0, shard=shard if clipped else "none", settings={"lr": 0.0}
        )
        norm = optimizer.backward_and_step(model(X).sum(), max_norm=0.5)
        optimizer.zero_grad()
        model(X).sum().backward()
        gradients = [p.grad.flatten().double() for p in model.parameters()]
        torch.testing.assert_close(norm, torch.cat(gradients).norm())
    with pytest.raises(ValueError, match="max_norm must be 0 or more, got -1"):
        optimizer.backward_and_step(model(X).sum(), max_norm=-1)


fold = Reduction.fold


def folds_late(*arguments):
    time.sleep(0.1)
    return fold(*arguments)


class Relaid(Observer):
    def on_average(self, iteration, takes_part):
        if iteration == 2:
            self._reducer().caps = [2000]
            self._reducer().lay_out()


def scaled(model, reducer, optimizer):
    """A loss scaler; in the third step one rank alone has an inf, and no rank steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    dense = [p for p in model.parameters() if p is not model.table.weight]

    def step_with(step, loss):
        before = model.first.weight.detach().clone()
        overflows = step == 2 and reducer.core.rank == 1
        scaler.scale(loss * (float("inf") if overflows else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(dense, 0.3)
        scaler.step(optimizer)
        scaler.update()
        assert model.first.weight.equal(before) == (step == 2)
        return scaler.get_scale()

    return step_with


def changing(model, reducer, optimizer):
    """Accumulation, a schedule, a group that is added, a frozen weight, and state that is read."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)

    def step_with(step, loss):
        with reducer.no_sync():
            loss.backward(retain_graph=True)
        optimizer.backward_and_step(loss)
        scheduler.step()
        assert all(value.to_dense().isfinite().all() for value in chain(*map(dict.values, states)))
        if step == 1:
            group = {"params": [optimizer.param_groups[1]["params"].pop(1)], "lr": 0.05}
            optimizer.add_param_group(group)
        model.second.weight.requires_grad_(step != 1)
        optimizer.zero_grad(set_to_none=step == 1)

    states = optimizer.state.values()
    return step_with


def trained(world, kind, shard, settings, clip=None, program=None, relaid=False, **how):
    """Parameters, state and norms after four steps; `how` chooses the Reducer."""
    model = Odd()
    if relaid:
        del model.unused  # buckets are rebuilt in the first step, as all parameters are used
        how |= {"observers": [Relaid()], "bucket_cap_mb": float("inf")}
    else:
        how["find_unused_parameters"] = True
    if kind != "SGD":
        model.table.requires_grad_(False)  # Adam takes no sparse gradients
    reducer = ddp.Reducer(model, **({"bucket_cap_mb": 0.002} | how))
    groups = [
        {"params": [p for p in model.parameters() if p.requires_grad and p.dim() == 1], "lr": 0.02},
        {"params": [p for p in model.parameters() if p.requires_grad and p.dim() != 1]},
    ]
    optimizer = getattr(ddp, kind)(groups, lr=0.01, reducer=reducer, shard=shard, **settings)
    norms = []
    step_with = program and program(model, reducer, optimizer)
    for step in range(4):
        torch.manual_seed(100 * step + world.rank)
        if program is not changing:
            optimizer.zero_grad()
        loss = model(torch.randn(4, 3, 8, 8)).square().mean() * 9
        # One rank reads the others' gradients late, when they have left the average.
        late = relaid and step == 1 and world.rank == 0
        if program:
            norms.append(step_with(step, loss))
        else:
            with patch.object(Reduction, "fold", folds_late) if late else nullcontext():
                norms.append(optimizer.backward_and_step(loss, max_norm=clip))
    return list(model.parameters()), optimizer.state_dict(), norms


def check_equal(one, other):
    assert all(map(torch.equal, one[0], other[0]))
    mine, others = one[1]["state"], other[1]["state"]
    assert mine.keys() == others.keys()
    for index in mine:
        assert mine[index].keys() == others[index].keys()
        for name, value in mine[index].items():
            expected = others[index][name]
            assert value.to_dense().equal(expected.to_dense()), (index, name)
            assert value.is_sparse or value.stride() == expected.stride()
    assert one[2] == other[2]


@each_kind
@pytest.mark.parametrize("crew", ["gloo-2", slow("gloo-3"), slow("mpi-3")], indirect=True)
@on("crew")
def test_ranks_that_divide_a_step_get_the_bits_of_those_that_do_not(world, kind, settings):
    undivided = partial(trained, world, kind, "none", settings)
    plain, clipped, relaid = undivided(), undivided(clip=0.3), undivided(relaid=True)
    programs = {program: undivided(program=program) for program in (scaled, changing)}
    assert clipped[2][0] > 0.3  # or it would test nothing
    for shard in ("node", "world"):
        case = partial(trained, world, kind, shard, settings)
        if shard == "world" or world.world_size == 2:  # "node" rounds once more with three ranks
            check_equal(case(), plain)
            check_equal(case(clip=0.3), clipped)
            check_equal(case(relaid=True), relaid)
            for program, expected in programs.items():
                check_equal(case(program=program), expected)


@pytest.mark.parametrize("crew", ["gloo-2", "gloo-3"], indirect=True)
@on("crew")
def test_gloo_without_shared_memory_divides_a_step(world):
    for kind, settings in KINDS:
        case = partial(trained, world, kind, settings=settings, shared_memory=False, clip=0.3)
        one, other = case(shard="world"), case(shard="none")
        if world.world_size == 2:
            check_equal(one, other)
        for mine, expected in zip(one[0], other[0], strict=True):  # gloo's sum has another order
            torch.testing.assert_close(mine, expected)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch before 2.14
def test_torchs_clipping_is_the_same_to_rounding(alone):
    reducer = ddp.Reducer(model := Odd())
    optimizer = ddp.SGD(model.parameters(), lr=0.0, reducer=reducer, shard="none")
    images = torch.randn(4, 3, 8, 8)
    for max_norm in (0.1, 1e3):
        loss = [model(images).square().sum() + model.unused.weight.sum() for _ in range(2)]
        loss = [each + model.unused.bias.sum() for each in loss]
        optimizer.zero_grad()
        loss[0].backward()
        gradients = [p.grad.to_dense().clone() for p in model.parameters()]
        expected = torch.cat([g.flatten() for g in gradients]).double().norm()
        optimizer.zero_grad()
        norm = optimizer.backward_and_step(loss[1], max_norm=max_norm)
        torch.testing.assert_close(norm, expected)
        factor = min(1.0, max_norm / (float(expected) + 1e-6))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad.to_dense(), gradient * factor)


@on("gloo-2")
def test_a_rank_has_its_share_of_the_state_alone(world):
    model = nn.Sequential(*[nn.Linear(300, 300) for _ in range(4)])
    # Compared before a step: later each rank has stepped its share alone.
    reducer = ddp.Reducer(model, bucket_cap_mb=0.5, check_every=1)
    optimizer = ddp.AdamW(model.parameters(), reducer=reducer, shard="world")
    for _ in range(3):  # the buckets are laid out again after the first
        optimizer.zero_grad()
        optimizer.backward_and_step(model(torch.ones(1, 300)).sum())
        held = {
            value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
            for value in chain(*(state.values() for state in optimizer.state.values()))
            if value.dim()
        }
        whole = sum(2 * p.nbytes for p in model.parameters())
        assert sum(held.values()) <= 1.05 * whole / world.world_size
    with pytest.raises(TypeError, match=r"only this rank's share of the state.*state_dict\(\)"):
        copy.deepcopy(optimizer)
    theirs = torch.optim.AdamW(model.parameters())
    theirs.load_state_dict(optimizer.state_dict())
    assert theirs.state[model[0].weight]["exp_avg"].shape == (300, 300)


@on("gloo-2")
def test_a_lost_share_cannot_be_replaced(world):
    reducer = ddp.Reducer(model := nn.Linear(3, 3), virtual_ranks=2)
    optimizer = ddp.SGD(model.parameters(), lr=0.1, reducer=reducer, shard="world")
    with pytest.raises(ValueError, match=r'shard="world".*is lost with it: use shard="none"'):
        ddp.elastic(world, reducer, optimizer)
    with pytest.raises(ValueError, match='shard must be "none", "node" or "world", got "all"'):
        ddp.SGD(model.parameters(), lr=0.1, reducer=reducer, shard="all")


def on_virtual_ranks(world):
    model = Odd()
    del model.unused, model.table
    model.table = nn.Embedding(9, 7)
    reducer = ddp.Reducer(model, bucket_cap_mb=0.002, virtual_ranks=4)
    optimizer = ddp.AdamW(model.parameters(), lr=0.01, reducer=reducer, shard="world")
    for step in range(3):
        optimizer.zero_grad()
        for index in reducer.virtual_rank_range:
            with reducer.virtual_rank(index):
                torch.manual_seed(100 * step + index)
                loss = model(torch.randn(4, 3, 8, 8)).square().mean() * 9
                if index == reducer.virtual_rank_range[-1]:
                    optimizer.backward_and_step(loss, max_norm=0.3)
                else:
                    loss.backward()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().tobytes()


@pytest.mark.parametrize("crew", ["gloo-3", slow("mpi-2")], indirect=True)
def test_divided_steps_have_the_same_bits_on_any_number_of_ranks(crew, alone):
    assert set(crew(on_virtual_ranks)) == {on_virtual_ranks(None)}


def checkpointed(world, folder, shard, saves):
    """Saves after two steps, or begins there; parameters after three more steps."""
    model = Odd()
    del model.unused, model.table
    model.table = nn.Embedding(9, 7)
    for parameter in model.parameters() if not saves else ():
        nn.init.zeros_(parameter)
    # A sum with zeros has the same bits on any number of ranks.
    reducer = ddp.Reducer(model, bucket_cap_mb=0.002, reduce="sum")
    settings = {"fused": True} if shard == "torch" else {"reducer": reducer, "shard": shard}
    library = torch.optim if shard == "torch" else ddp
    optimizer = library.AdamW(model.parameters(), lr=0.01, **settings)

    def train(steps):
        for step in steps:
            torch.manual_seed(step)
            loss = model(torch.randn(4, 3, 8, 8)).square().mean() * (world.rank == 0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    train(range(2 * saves))
    weights, moments = get_state_dict(model, optimizer)
    checkpoint = {"model": weights, "optimizer": moments}
    (dcp.save if saves else dcp.load)(checkpoint, checkpoint_id=folder)
    if not saves:
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    train(range(2, 5))
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().tobytes()


@pytest.mark.parametrize("shard", ["none", "node", "world"])
def test_distributed_checkpoints_go_to_any_number_of_ranks_and_to_torch(ranks, shard, tmp_path):
    saved = set(ranks("gloo", 2)(checkpointed, tmp_path, shard, True))
    for size, other in ((1, "none"), (2, shard), (2, "torch"), (3, "world")):
        assert set(ranks("gloo", size)(checkpointed, tmp_path, other, False)) == saved, other


@each_shard
@on("gloo-2")
def test_a_gradient_that_this_pass_does_not_compute_is_clipped_too(world, shard):
    def run(at_once):
        model = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        reducer = ddp.Reducer(model, find_unused_parameters=True)
        options = {"lr": 0.1, "reducer": reducer, "shard": shard if at_once else "none"}
        optimizer = ddp.SGD(model.parameters(), **options)
        x = X * (1 + world.rank)
        (model[0](x) + model[1](x)).sum().backward()  # without a step
        reducer.prepare_backward(loss := model[0](x).sum())
        norm = optimizer.backward_and_step(loss, max_norm=1.0)
        reducer.remove()
        return torch.cat([norm.float()[None], *(p.detach().flatten() for p in model.parameters())])

    assert torch.equal(run(at_once=True), run(at_once=False))


class Reading(nn.Module):
    """Modules that read parameters of others: of a child that is never called, and a tied one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2)  # reads its out_proj.weight
        self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])

    def forward(self, tokens):
        x = self.table(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return nn.functional.linear(self.layers(x), self.table.weight)


class LateGather:
    """An all-gather whose result only arrives when somebody waits for it."""

    def __init__(self, whole, share, *, group, async_op):
        self.whole, self.arrives = whole, torch.empty_like(whole)
        all_gather_single(self.arrives, share, group=group)

    def wait(self):
        self.whole.copy_(self.arrives)


def LateExchange(group, sent, received):
    """Messages that only arrive when somebody waits for them."""
    arrived = [torch.empty_like(tensor) for tensor in received]
    for work in exchange(group, sent, arrived):
        work.wait()
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    return [LateMessage(received[rank], arrived[rank]) for rank in others]


class LateMessage:
    def __init__(self, target, arrived):
        self.target, self.arrived = target, arrived

    def wait(self):
        self.target.copy_(self.arrived)


@on("gloo-2")
def test_forward_waits_for_the_parameters_that_it_reads(world):
    def run(parts, compiled=False, **options):
        model = Reading()
        reducer = ddp.Reducer(model, bucket_cap_mb=0, find_unused_parameters=True)
        optimizer = ddp.SGD(model.parameters(), 0.01, momentum=0.9, reducer=reducer, **options)
        called = torch.compile(model, backend="eager") if compiled else model
        for step in range(5):
            tokens = torch.randint(11, (5, 3), generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            if parts and step % 2:  # not the whole module; the Reducer does not see its graph
                with reducer.no_sync():
                    assert model.layers(model.table(tokens)).sum().backward() is None
            optimizer.backward_and_step(called(tokens).square().mean() * (1 + world.rank))
            arriving = len(getattr(optimizer._shards, "_arriving", ()))
            assert arriving == options.get("overlap_forward", False) * len(
                reducer.core.flat_buckets
            )
        saved = [tensor.clone() for tensor in model.state_dict().values()]
        optimizer.synchronize()
        assert all(map(torch.equal, model.state_dict().values(), saved))
        return saved

    for parts in (False, True):
        expected = run(parts)
        with patch.object(shards, "all_gather_single", LateGather):
            found = run(parts, shard="world", overlap_forward=True)
        assert all(map(torch.equal, found, expected))
        with patch.object(shards, "all_gather_single", LateGather):
            found = run(parts, compiled=True, shard="world", overlap_forward=True)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
    with pytest.raises(ValueError, match='overlap_forward=True needs shard="world", got "node"'):
        linear(settings={"lr": 0.1, "overlap_forward": True})


class Fused(nn.Module):
    """Reads its children's parameters in every way, by the name of a way."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k = (nn.Linear(4, 4, bias=False) for _ in "qk")
        self.tied = self.q
        nn.utils.parametrizations.weight_norm(self.k)
        self.recurrent = nn.LSTM(4, 4)
        self.kept = {"in a dict": [self.q.weight]}
        self.way = "calls"

    def forward(self, x):
        if self.way == "calls":
            return self.recurrent(self.q(x) + self.k(x))[0]
        return READS[self.way](self, x)


def substituted(model, x):
    return torch.func.functional_call(model.q, dict(model.q.named_parameters()), x)


def mapped(model, x):
    return torch.vmap(model.q)(x)


def of_a_hook(model, x):
    handle = model.q.register_forward_hook(lambda q, inputs, output: output @ model.k.weight)
    output = model.q(x)
    handle.remove()
    return output


def recomputed(model, x):
    return torch.utils.checkpoint.checkpoint(lambda x: x @ model.q.weight, x, use_reentrant=False)


READS = {
    "children": lambda model, x: x @ (model.q.weight + model.k.weight),
    "a tied one": lambda model, x: x @ model.tied.weight,
    "kept": lambda model, x: x @ model.kept["in a dict"][0],
    "recurrent": lambda model, x: model.recurrent(x)[0],
    "its list": lambda model, x: x @ model.recurrent.all_weights[0][0][:4],
    "parameters": lambda model, x: x * torch.cat([p.flatten() for p in model.parameters()]).sum(),
    "by name": lambda model, x: x @ model.get_parameter("q.weight"),
    "a parametrization": lambda model, x: model.k(x),
    "substituted": substituted,
    "mapped": mapped,
    "a hook": of_a_hook,
    "recomputed": recomputed,
    "compiled": lambda model, x: torch.compile(lambda x: x @ model.q.weight, backend="eager")(x),
    "a copy": lambda model, x: copy.deepcopy(model.q)(x),
}


@pytest.mark.parametrize("memory", [True, False], ids=["shared memory", "messages"])
@on("gloo-2")
def test_whoever_reads_a_parameter_waits_for_it(world, memory):
    """In training all modules are called; an evaluation on each rank alone then reads otherwise."""
    model = Fused()
    reducer = ddp.Reducer(model, bucket_cap_mb=0, shared_memory=memory)
    options = {"lr": 0.5, "shard": "world", "overlap_forward": True, "reducer": reducer}
    optimizer = ddp.SGD(model.parameters(), **options)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    late = patch.object(shards, "all_gather_single", LateGather)
    late = late if memory else patch.object(shards, "exchange", LateExchange)
    with late:
        for way, read in READS.items():
            model.way = "calls"
            optimizer.zero_grad()
            optimizer.backward_and_step(model(x).square().sum() * (1 + world.rank))
            model.way = way
            with nullcontext() if way == "recomputed" else torch.no_grad():
                # Within a forward pass, or not.
                within = world.rank == 0 or way == "kept"
                first = model(x) if within else read(model, x)
                # What nobody reads is still on its way.
                assert optimizer._shards._arriving or way in ("parameters", "compiled"), way
                optimizer.synchronize()
                assert first.equal(read(model, x)), way
        model.way = "calls"
        optimizer.backward_and_step(model(x).square().sum())
        with torch.no_grad():
            model.q.weight.fill_(3)  # a write waits, too, and is not lost
            optimizer.synchronize()
            assert model.q.weight.eq(3).all()
    reducer.remove()


@on("gloo-2")
def test_a_change_of_the_module_is_still_noticed(world):
    for change in ("before", "after"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        reducer = ddp.Reducer(model)
        if change == "before":
            model[0].register_parameter("more", nn.Parameter(torch.ones(1)))
        parameters = reducer.core.parameters
        ddp.SGD(parameters, lr=0.1, reducer=reducer, shard="world", overlap_forward=True)
        if change == "after":
            model[0].register_parameter("more", nn.Parameter(torch.ones(1)))
        with pytest.raises(RuntimeError, match=r"parameter 0\.more was added"):
            model(X)


@on("gloo-2")
def test_what_compares_or_loads_parameters_waits_for_them(world):
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    watched = {"find_unused_parameters": True, "check_every": 1}
    settings = {"lr": 0.1, "overlap_forward": True}
    with patch.object(shards, "all_gather_single", LateGather):
        _, reducer, optimizer, _ = linear(None, model, True, "SGD", settings, "world", **watched)
        for step in range(4):
            optimizer.zero_grad()
            # The second layer's parameters are under way when a pass without it is compared.
            loss = sum(layer(X).sum() for layer in model[: 1 + step % 2])
            reducer.prepare_backward(loss)
            optimizer.backward_and_step(loss)
        ddp.check_sync(model, optimizers=[optimizer])
        saved = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
        optimizer.backward_and_step(sum(layer(X).sum() for layer in model))
        model.load_state_dict(saved)
        optimizer.synchronize()
        assert not any(value.any() for value in model.state_dict().values())
    reducer.remove()


@on("gloo-2")
def test_a_copy_of_the_module_does_not_wait_and_the_module_keeps_no_optimizer(world):
    settings = {"lr": 0.1, "overlap_forward": True}
    model, _, optimizer, step = linear(shard="world", settings=settings)
    step()
    optimizer.synchronize()
    copied = copy.deepcopy(model)
    assert torch.equal(copied(X), model(X))
    assert all(map(torch.equal, copied.state_dict().values(), model.state_dict().values()))
    # A group that it kept would keep the threads of gloo after the group is closed.
    assert not any(isinstance(held, dist.ProcessGroup) for held in vars(optimizer._shards).values())
    found = ref(optimizer._shards)
    del optimizer, step
    model(X).sum().backward()  # with a comm hook that is not the optimizer's
    gc.collect()
    assert found() is None


@on("gloo_pair")
def test_a_state_dict_on_one_rank_alone_says_what_to_do(world):
    settings = {"lr": 0.1, "momentum": 0.9}
    _, _, optimizer, step = linear(dist.new_group(), settings=settings, shard="world")
    step()
    told = r'rank 0 .* for optimizer.state_dict\(\), collective with shard="world": call it on all'
    with pytest.raises(ddp.CommunicationError, match=told):
        step() if world.rank else optimizer.state_dict()


@pytest.mark.parametrize("shard", ["node", "world"])
@on("gloo-2")
def test_a_process_that_a_rank_forks_writes_to_the_rank_s_parameters(world, shard):
    model, optimizer, _ = divided(world, "SGD", shard=shard)
    at_once(model, optimizer)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    dist.barrier()
    if world.rank == 0:
        if (child := os.fork()) == 0:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 1.0
            os._exit(0)
        os.waitpid(child, 0)
    dist.barrier()
    shared = float(shard == "node" or world.rank == 0)
    assert all(torch.equal(b + shared, p) for b, p in zip(before, model.parameters(), strict=True))
