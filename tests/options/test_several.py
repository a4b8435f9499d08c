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
BUFFERS = {"sync_buffers": True}
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


# Several Reducers of one parameter --------------------------------------------------------------


class Pair(nn.Module):
    """`second` is tied to `first`, or a module of its own."""

    def __init__(self, tied):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        # Above the size from which gradients are packed one by one.
        self.large = nn.Linear(200, 200)
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x):
        hidden = self.second(torch.tanh(self.first(x)))
        return hidden.square().mean() + self.large(hidden.sum() * torch.ones(2, 200)).mean()


class Attached:
    """A module with a Reducer of some kind, and an optimizer of its parameters."""

    def __init__(self, kind, module, **options):
        views = {"gradient_as_bucket_view": kind != "plain"} | options
        if kind == "wrapper":
            self.wrapper = ddp.DistributedDataParallel(module, **views)
            self.reducer = self.wrapper.reducer
        else:
            self.reducer = ddp.Reducer(module, **views)
        if kind in ("plain", "views", "wrapper"):
            self.optimizer = torch.optim.SGD(module.parameters(), 0.1)
        else:
            shard = {"ddp.SGD": "none"}.get(kind, kind)
            settings = {"reducer": self.reducer, "shard": shard}
            self.optimizer = ddp.SGD(module.parameters(), 0.1, **settings)


KINDS = ("plain", "views", "ddp.SGD", "node", "world", "wrapper")
RELATIONS = {
    "same module": lambda model: (model, model),
    "part after whole": lambda model: (model, model.first),
    "whole after part": lambda model: (model.first, model),
    "same parameters": lambda model: (model, nn.ParameterList(model.parameters())),
    "tied": lambda model: (model.first, nn.ModuleList([model.second, model.large])),
}


def averaged_by_hand(model, inputs):
    """The gradients of the mean loss over all ranks' inputs."""
    loss = sum(model(x) for x in inputs) / len(inputs)
    return torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("one", KINDS)
@pytest.mark.parametrize("other", KINDS)
@pytest.mark.parametrize("messages", [False, True], ids=["", "messages"])
@on("gloo-2")
def test_a_parameter_of_two_reducers_gets_the_average(world, one, other, messages):
    if messages and "node" in (one, other):
        return  # it needs shared memory
    options = {"shared_memory": False} if messages else {}
    for relation, parts_of in RELATIONS.items():
        torch.manual_seed(0)
        model = Pair(tied=relation == "tied")
        parts = parts_of(model)
        # The lists live as long as the modules.
        kept = [
            Attached(kind, part, **options) for kind, part in zip((one, other), parts, strict=True)
        ]
        stepped = kept[-1].optimizer
        missing = {*model.parameters()} - {p for g in stepped.param_groups for p in g["params"]}
        others = torch.optim.SGD(missing, 0.1) if missing else None
        for step in range(5):
            inputs = [torch.randn(4, 3) * (rank + 1) for rank in range(2)]
            expected = averaged_by_hand(model, inputs)
            if step % 2 == 0:  # otherwise zeros, or windows of a bucket, stay
                model.zero_grad()
            else:
                model.zero_grad(set_to_none=False)
            model(inputs[world.rank]).backward()
            for parameter, right in zip(model.parameters(), expected, strict=True):
                torch.testing.assert_close(parameter.grad, right, msg=relation)
            stepped.step()
            if others is not None:
                others.step()
        ddp.check_sync(model)
        for each in kept:
            each.reducer.remove()


@pytest.mark.parametrize("shard", ["none", "node", "world"])
@pytest.mark.parametrize("first", [False, True], ids=["after", "before"])
@on("gloo-2")
def test_backward_and_step_beside_a_reducer_of_a_part(world, shard, first):
    """No gradient is left behind, so a loop needs no `zero_grad`."""
    torch.manual_seed(0)
    model, alone = Pair(tied=False), Pair(tied=False)
    alone.load_state_dict(model.state_dict())
    made = {}
    for part in ("first", "whole") if first else ("whole", "first"):
        module = model.first if part == "first" else model
        made[part] = ddp.Reducer(module, gradient_as_bucket_view=True)
    optimizer = ddp.SGD(model.parameters(), 0.1, reducer=made["whole"], shard=shard)
    plain = torch.optim.SGD(alone.parameters(), 0.1)
    for _ in range(4):
        inputs = [torch.randn(4, 3) * (rank + 1) for rank in range(2)]
        for parameter, right in zip(
            alone.parameters(), averaged_by_hand(alone, inputs), strict=True
        ):
            parameter.grad = right
        plain.step()
        if shard == "none":
            optimizer.zero_grad()
        optimizer.backward_and_step(model(inputs[world.rank]))
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)
    optimizer.synchronize()
    ddp.check_sync(model)


@on("gloo-2")
def test_a_replaced_reducer_says_so(world):
    model = Terms(2)
    old, new = ddp.Reducer(model), ddp.Reducer(model)
    uses = [
        old.no_sync().__enter__,
        partial(old.weight, 1.0),
        old.average_gradients,
        partial(old.register_comm_hook, None, ddp.comm_hooks.average),
        ddp.join(old).__enter__,
        old.set_static_graph,
        old.keep_bucket_views,
    ]
    for use in uses:
        assert "has replaced this one" in text_of(RuntimeError, use)
    model(own(world)).backward()
    assert_grads(model, mean(world))
    assert new.iteration == 1
    wrapper = ddp.DistributedDataParallel(model)
    ddp.DistributedDataParallel(model)
    for use in (wrapper.no_sync().__enter__, wrapper.join):
        assert "has replaced this one" in text_of(RuntimeError, use)


def of_another_group(model):
    ddp.Reducer(model[0], dist.new_group([0, 1]))


def summed(model):
    ddp.Reducer(model[0], reduce="sum")


@pytest.mark.parametrize("make", [of_another_group, summed], ids=lambda make: make.__name__)
@on("gloo-2")
def test_reducers_that_disagree_about_a_parameter_are_refused(world, make):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    reducer = ddp.Reducer(model)
    text = text_of(ValueError, make, model)
    assert text.startswith("another Reducer has weight, bias, too, and ")
    assert "ignore=" in text
    reducer.remove()
    make(model)


@pytest.mark.parametrize("options", [{"reduce": "sum"}, {"process_group": True}], ids=str)
@on("gloo-2")
def test_a_whole_that_disagrees_with_an_older_part_is_refused(world, options):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if "process_group" in options:
        options = {"process_group": dist.new_group([0, 1])}
    part = ddp.Reducer(model[0])
    text = text_of(ValueError, partial(ddp.Reducer, model, **options))
    assert text.startswith("another Reducer has 0.weight, 0.bias, too, and ")
    part.remove()
    ddp.Reducer(model, **options)


@on("gloo-2")
def test_two_halves_of_one_module_are_no_leftovers(world):
    model = Terms(2, 3)
    halves = [ddp.Reducer(model, ignore=[name]) for name in ("p0", "p1")]
    model(own(world)).backward()
    assert_grads(model, mean(world))
    assert [half.iteration for half in halves] == [1, 1]
