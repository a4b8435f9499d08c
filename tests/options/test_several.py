"""Several Reducers in one backward pass: the same collectives in the same order on all ranks."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import ddp_from_scratch as ddp
from ddp_from_scratch.options import unused
from tests.support.fuzz_case import in_halves
from tests.support.on_ranks import on
from tests.support.refusal import text_of
from tests.support.terms import Terms, assert_grads, is_rank_0s, mean, own
from tests.support.tiers import slow, spread

STEPS = 4


class Heads(nn.Module):
    def __init__(self, norm=nn.Identity):
        super().__init__()
        self.main, self.aux, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), norm()

    def forward(self, x):
        return self.norm(self.main(x)), self.aux(x)


def body(norm=nn.Identity):
    return nn.Sequential(nn.Linear(4, 4), norm(), nn.Linear(4, 4))


normed_body = partial(body, partial(nn.BatchNorm1d, 4))
NormedHeads = partial(Heads, partial(nn.BatchNorm1d, 4))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = body(), nn.Linear(4, 4)

    def forward(self, x):
        return checkpoint(self.inner, self.outer(x), use_reentrant=True)


class Twice(nn.Module):
    """Its parameters get a gradient in each of two inner passes, and one in the outer pass."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.inner, torch.tanh(x), use_reentrant=True)
        return self.inner(x)


# The loss of a rank for its input x.


def heads_loss(modules, x, rank, step):
    a, b = modules
    main, aux = b(a(x))
    return main.square().mean() + (aux.square().mean() if rank == step % 2 else 0)


def reversed_loss(modules, x, rank, step):
    return heads_loss(modules[::-1], x, rank, step)


def chain_loss(modules, x, rank, step):
    loss = torch.zeros(())
    for place, module in enumerate(modules):
        x, aux = module(x)
        if (place + step) % 2 == rank % 2:
            loss = loss + aux.square().mean()
    return loss + x.square().mean()


def siblings_loss(modules, x, rank, step):
    # Autograd runs backward in the reverse order of forward, which is each rank's own.
    order = (0, 1) if rank == 0 else (1, 0)
    outputs = {i: modules[i](x) for i in order}
    return sum((i + 1) * outputs[i].square().mean() for i in (0, 1))


def gan_loss(modules, x, rank, step):
    generator, discriminator = modules
    return discriminator(generator(x)).square().mean() - discriminator(x).mean()


UNUSED = {"find_unused_parameters": True}
BUFFERS = {"broadcast_buffers": True}
STATIC = {"static_graph": True}
VIEWS = {"gradient_as_bucket_view": True}
# Modules in the order in which they get their Reducers, the options of each, and the loss.
PROGRAMS = {
    "heads": ((body, Heads), ({}, UNUSED), heads_loss),
    "checkpoint below": ((Checkpointed, Heads), ({}, UNUSED), heads_loss),
    "checkpoint, made last": ((Heads, Checkpointed), (UNUSED, {}), reversed_loss),
    "checkpointed twice": ((Twice, Heads), (STATIC, UNUSED), heads_loss),
    "chain of three": ((Heads, Heads, Heads), (UNUSED, UNUSED, UNUSED), chain_loss),
    "siblings": ((body, body), ({}, {}), siblings_loss),
    "gan": ((body, body), ({}, STATIC), gan_loss),
    "buffers": ((normed_body, NormedHeads), (BUFFERS, UNUSED | BUFFERS), heads_loss),
    "views": ((body, Heads), (VIEWS, UNUSED | VIEWS), heads_loss),
}
SETTINGS = ["shared memory", "messages", "own group", "small buckets", "two collectives"]


CASES = spread(PROGRAMS, SETTINGS, ["gloo-2", "mpi-2", "gloo-3"])


@pytest.mark.parametrize(("program", "setting", "crew"), CASES, indirect=["crew"])
@on("crew")
def test_ranks_train_as_one_process_does(world, program, setting):
    kinds, options, loss = PROGRAMS[program]
    torch.manual_seed(0)
    modules = [kind() for kind in kinds]
    single = copy.deepcopy(modules)
    group = dist.new_group() if setting == "own group" else None
    common = {"shared_memory": setting != "messages"}
    if setting == "small buckets":
        common["bucket_cap_mb"] = 0
    reducers = [
        ddp.Reducer(module, None if number else group, **common, **chosen)
        for number, (module, chosen) in enumerate(zip(modules, options, strict=True))
    ]
    if setting == "two collectives":
        reducers[-1].register_comm_hook(None, in_halves)
    parameters = [[*nn.ModuleList(each).parameters()] for each in (modules, single)]
    ours, alone = (torch.optim.SGD(each, lr=0.1) for each in parameters)
    everyone = range(world.world_size)
    for step in range(STEPS):
        inputs = [
            torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))
            for rank in everyone
        ]
        for called, optimizer, by in ((modules, ours, [world.rank]), (single, alone, everyone)):
            optimizer.zero_grad()
            sum(loss(called, inputs[rank], rank, step) / len(by) for rank in by).backward()
            optimizer.step()
    for module in modules:
        ddp.check_sync(module)
    torch.testing.assert_close(*parameters, rtol=0, atol=1e-6)


@pytest.mark.parametrize("outer", [0, 1])
@on("gloo-2")
def test_a_reducer_under_no_sync_holds_up_no_other(world, outer):
    a, b = Terms(1), Terms(1)
    reducers = ddp.Reducer(a), ddp.Reducer(b)
    with reducers[outer].no_sync():
        (a(own(world)) + b(own(world))).backward()
    assert_grads((a, b)[outer], own(world))
    assert_grads((a, b)[1 - outer], mean(world))


@on("gloo-2")
def test_a_pass_that_raised_holds_up_no_later_one(world):
    """Backward raises on all ranks inside a's checkpoint, after b's gradients are ready."""
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    reducers = ddp.Reducer(a), ddp.Reducer(b)

    def forward(fails):
        def inner(x):
            h = a(x)
            if fails and h.requires_grad:
                h.register_hook(lambda _: 1 / 0)
            return h

        x = torch.full((1, 2), world.rank + 1.0, requires_grad=True)
        return b(checkpoint(inner, x, use_reentrant=True)).square().sum()

    with pytest.raises(ZeroDivisionError):
        forward(fails=True).backward()
    for module, reducer in zip((a, b), reducers, strict=True):
        reducer.abort_step()
        module.zero_grad()
    forward(fails=False).backward()
    assert all(is_rank_0s(p.grad) for p in (*a.parameters(), *b.parameters()))


@on("gloo-2")
def test_a_step_that_is_dropped_waits_for_what_is_in_flight(world):
    model = Terms(1, 2, 10**6)  # the last one's gradient is ready first
    reducer = ddp.Reducer(model, bucket_cap_mb=0)
    model(own(world)).backward()
    for _ in range(5):
        model.zero_grad()
        handle = model.p0.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(own(world)).backward()
        handle.remove()
        reducer.abort_step()
        model.zero_grad()
        model(own(world)).backward()
        assert_grads(model, mean(world))
    reducer.remove()


def leave_out(world):
    """Rank 1 uses one Reducer's module alone, so its collective meets another Reducer's."""
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    reducers = ddp.Reducer(a), ddp.Reducer(b)  # noqa: F841  # their hooks hold them weakly
    h = a(torch.ones(1, 4))
    return text_of(RuntimeError, (b(h) if world.rank == 0 else h).sum().backward)


@pytest.mark.parametrize("backend", ["gloo", slow("mpi")])
def test_an_error_names_reducer_and_bucket(ranks, backend):
    for error in ranks(backend, 2, fresh=True)(leave_out):
        assert "rank 0 all_reduce" in error
        assert "of 20 x torch.float32 for bucket 0 of Reducer 2" in error
        assert "for bucket 0 of Reducer 1" in error


@on("gloo-2")
def test_a_reducer_asks_autograd_and_not_each_parameter_of_those_before_it(world):
    """With thousands of parameters, a Python call for each took longer than the average."""
    model, other = Terms(1, 2), nn.Sequential(*(nn.Linear(1, 1) for _ in range(3)))
    for module in (model, other):  # the one made last is first
        ddp.Reducer(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unused, "will_accumulate", None)
        for _ in range(2):
            model.zero_grad()
            model(own(world)).backward()
            assert_grads(model, mean(world))
    # torch.autograd.grad with respect to one of them cannot be asked for.
    model(own(world)).backward(inputs=[model.p0])


@pytest.mark.parametrize("shard", ["none", "node", "world"])
@pytest.mark.parametrize("first", [0, 1])
@on("gloo-2")
def test_the_norm_is_that_of_all_reducers_averages(world, first, shard):
    """The optimizer's Reducer ends the pass last, although the one that was made last is first."""
    model = Terms(1, 2), Terms(3)
    reducers = [ddp.Reducer(part) for part in model]
    parameters = [p for part in model for p in part.parameters()]
    optimizer = ddp.SGD(parameters, lr=1.0, reducer=reducers[first], shard=shard)
    for step in range(3):
        optimizer.zero_grad()
        x = mean(world)
        norm = optimizer.backward_and_step(sum(part(own(world)) for part in model), max_norm=1.0)
        assert norm == pytest.approx(x * (1 + 2 * 4 + 3) ** 0.5)
        taken = torch.cat([p.detach().flatten() for p in parameters]).norm()
        assert taken.item() == pytest.approx(step + 1, abs=1e-4)
