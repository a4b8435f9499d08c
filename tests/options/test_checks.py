"""What may change in a module after the Reducer was made: frozen, renamed or lent parameters."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.distributed.autograd
from torch import nn
from torch.distributed import rpc
from torch.func import functional_call
from torch.nn.utils import parametrize, prune, stateless

import ddp_from_scratch as ddp
from ddp_from_scratch import Reducer
from ddp_from_scratch.options.checks import Checks
from tests.support.on_ranks import on
from tests.support.refusal import text_of
from tests.support.terms import Terms, own


def agree(model):
    """All ranks hold the same parameters, bit for bit."""
    return ddp.check_sync(model)


# Frozen -----------------------------------------------------------------------------------------

FREEZES = {
    "copies": {},
    "messages": {"shared_memory": False},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "compared": {"check_every": 1, "sync_buffers": True},
}


def adversarial(world, attach, step):
    """A GAN's parameters after three steps; the discriminator is frozen while the other steps."""
    torch.manual_seed(0)
    generator, discriminator = nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    nets = [(attach(net), step(net)) for net in (generator, discriminator)]
    (make, step_make), (judge, step_judge) = nets
    x = torch.arange(8.0).reshape(4, 2) + world.rank
    for _ in range(3):
        discriminator.requires_grad_(False)
        generator.zero_grad()
        judge(make(x)).square()[:, 0].mean().backward()
        step_make()
        discriminator.requires_grad_(True)
        discriminator.zero_grad()
        judge(make(x).detach()).square()[:, 1].mean().backward()
        step_judge()
    return [p.detach().clone() for net in (generator, discriminator) for p in net.parameters()]


def by_hand(net):
    """A step on gradients that are averaged one by one."""

    def step():
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p.data -= 0.1 * p.grad / dist.get_world_size()

    return step


@pytest.mark.parametrize("options", FREEZES.values(), ids=FREEZES)
@on("pair")
def test_a_model_is_frozen_as_a_whole_for_a_while(world, options):
    kept = []

    def attach(net):
        kept.append(Reducer(net, **options))
        return net

    def step(net):
        return torch.optim.SGD(net.parameters(), lr=0.1).step

    with_reducers = adversarial(world, attach, step)
    torch.testing.assert_close(with_reducers, adversarial(world, lambda net: net, by_hand))
    assert kept[0].iteration == 3
    # With unused parameters, other ranks may have frozen nothing, so it takes part each time.
    assert kept[1].iteration == 6 if "find_unused_parameters" in options else 3


@pytest.mark.parametrize("shard", ["none", "node", "world"])
@on("gloo-2")
def test_a_frozen_model_of_flat_optimizers(world, shard):
    reducers = {}

    def attach(net):
        reducers[net] = Reducer(net)
        return net

    def step(net):
        optimizer = ddp.SGD(net.parameters(), lr=0.1, reducer=reducers[net], shard=shard)

        def act():
            optimizer.step()
            optimizer.synchronize()

        return act

    found = adversarial(world, attach, step)
    torch.testing.assert_close(found, adversarial(world, lambda net: net, by_hand))


@on("gloo-2")
def test_a_wrapped_model_is_frozen_before_its_first_step_and_in_join(world):
    model = ddp.DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.full((2, 3), world.rank + 1.0, requires_grad=True)
    with model.join():
        for step in range(3 + 2 * world.rank):
            model.requires_grad_(step % 2 == 1)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert model.reducer.iteration == 2
    agree(model.module)


@on("gloo-2")
def test_a_frozen_model_that_thaws_in_part_is_named(world):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    Reducer(model)
    x = torch.ones(1, 2, requires_grad=True)
    model.requires_grad_(False)
    model(x).sum().backward()
    model[1].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"parameter 0.weight became requires_grad=False on"):
        model(x)


# Methods of the module --------------------------------------------------------------------------


class Parts(nn.Module):
    """A model that is called as such, or by a method, where no hook of the model itself runs."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)

    def loss(self, x):
        return self.last(self.first(x) + getattr(self, "more", 0.0)).square().mean()

    forward = loss


def thaw(parts):
    parts.first.requires_grad_(True)


def grow(parts):
    parts.more = nn.Parameter(torch.zeros(2))


def torchs_sgd(parameters, reducer):
    return torch.optim.SGD(parameters, lr=0.1)


def flat_sgd(parameters, reducer):
    return ddp.SGD(parameters, lr=0.1, reducer=reducer)


def sharded_sgd(parameters, reducer):
    return ddp.SGD(parameters, lr=0.1, reducer=reducer, shard="world")


@pytest.mark.parametrize("change", [thaw, grow])
@pytest.mark.parametrize("make", [Reducer, ddp.DistributedDataParallel])
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("optimize", [torchs_sgd, flat_sgd, sharded_sgd])
@on("gloo-2")
def test_a_step_looks_at_a_module_whose_methods_are_called(world, change, make, views, optimize):
    parts = Parts()
    parts.first.requires_grad_(change is not thaw)
    made = make(parts, gradient_as_bucket_view=views)
    reducer = made if make is Reducer else made.reducer
    optimizer = optimize([p for p in parts.parameters() if p.requires_grad], reducer)
    x = torch.ones(1, 2) + world.rank
    for _ in range(2):
        optimizer.zero_grad()
        parts.loss(x).backward()
        optimizer.step()
    change(parts)
    parts.loss(x).backward()
    with pytest.raises(RuntimeError, match=rf"on rank {world.rank} after the Reducer was made"):
        optimizer.step()


@on("gloo-2")
def test_a_step_in_backward_looks_at_a_module_whose_methods_are_called(world):
    parts = Parts()
    optimizer = ddp.SGD(parts.parameters(), lr=0.1, reducer=Reducer(parts))
    x = torch.ones(1, 2) + world.rank
    optimizer.backward_and_step(parts.loss(x))
    grow(parts)
    with pytest.raises(RuntimeError, match="parameter more was added"):
        optimizer.backward_and_step(parts.loss(x))


@on("gloo-2")
def test_a_step_under_no_grad_looks_at_a_list_of_modules(world):
    listed = nn.ModuleList([nn.Linear(2, 2)])
    Reducer(listed)
    optimizer = torch.optim.SGD(listed.parameters(), lr=0.1)
    listed.append(nn.Linear(2, 2))
    listed[1](listed[0](torch.ones(1, 2))).sum().backward()
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"parameter 1\.weight was added"):
        optimizer.step()


@on("gloo-2")
def test_each_average_looks_at_the_module_once(world):
    looks, parts = [], Parts()
    snapshot = Reducer(parts).core.observer(Checks).snapshot
    snapshot.looks_different = lambda *_: looks.append(1)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts.children()]
    for loss in (parts, parts, parts.loss, parts.loss, parts):
        loss(torch.ones(1, 2) + world.rank).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert len(looks) == 5


# Renamed ----------------------------------------------------------------------------------------


class Halved(nn.Module):
    def forward(self, x):
        return x / 2

    def right_inverse(self, x):
        return x * 2


def parametrised(layer):
    parametrize.register_parametrization(layer, "weight", Halved())


def plain(layer):
    parametrize.remove_parametrizations(layer, "weight")


def pruned(layer):
    prune.l1_unstructured(layer, "weight", 0.5)


def whole(layer):
    prune.remove(layer, "weight")


RENAMES = {
    "pruned": (pruned, whole, "weight_orig"),
    "parametrised": (parametrised, plain, "parametrizations.weight.original"),
}


@pytest.mark.parametrize("name", RENAMES)
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True, "find_unused_parameters": True}, {"static_graph": True}],
    ids=["copies", "views", "static"],
)
@on("gloo-2")
def test_a_parameter_that_gets_another_name_remains_the_same(world, name, options):
    change, restore, present = RENAMES[name]
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    own = copy.deepcopy(model)
    reducer = Reducer(model, check_every=1, **options)
    for net, step in ((model, None), (own, by_hand(own))):
        for number in range(6):
            if number in (2, 4):
                (change if number == 2 else restore)(net)
            net.zero_grad()
            net(torch.full((2, 4), world.rank + 1.0)).square().mean().backward()
            if step is None:
                with torch.no_grad():
                    for p in net.parameters():
                        p -= 0.1 * p.grad
            else:
                step()
            if number == 2:
                assert present in dict(net.named_parameters())
    torch.testing.assert_close([*model.parameters()], [*own.parameters()])
    # The Reducer keeps the names of its construction.
    assert sorted(reducer.core.names) == ["bias", "weight"]


# Lent -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [functional_call, stateless.functional_call])
@pytest.mark.parametrize("recorded", [False, True])
@on("gloo-2")
def test_other_parameters_are_lent_for_a_call(world, call, recorded):
    model = nn.Linear(3, 1)
    ddp.broadcast_parameters(model)
    reducer = Reducer(model)
    target = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    x = torch.full((2, 3), world.rank + 1.0)
    for _ in range(3):
        model.zero_grad()
        with nullcontext() if recorded else torch.no_grad():
            goals = [call(model, target, (x,)).detach() for _ in range(2)]
        (model(x) - sum(goals)).sum().backward()
    assert model.weight.grad.tolist() == [[3.0] * 3]
    assert reducer.iteration == 3
    assert target["weight"].grad is None
    model.weight = target["weight"]  # for good
    with pytest.raises(RuntimeError, match=f"parameter weight was replaced on rank {world.rank}"):
        model(x)


# Perturbed --------------------------------------------------------------------------------------


def climb(world, **options):
    """Each rank's parameters differ during backward, and are put back before the step."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    reducer = Reducer(model, **options)
    for _ in range(2):
        with torch.no_grad():
            model.weight += world.rank
        model.zero_grad()
        model(torch.ones(1, 1)).square().sum().backward()
        with torch.no_grad():
            model.weight -= world.rank
            model.weight -= 0.25 * model.weight.grad
    reducer.remove()
    return model.weight.item()


@on("gloo-2")
def test_ranks_may_differ_in_the_first_average_if_the_program_says_so(world):
    with pytest.raises(RuntimeError, match=r"average 1: .*check_first_average=False"):
        climb(world)
    # The averages of 2 and 4, and then of 0.5 and 2.5.
    assert climb(world, check_first_average=False) == 0.25 - 0.375
    assert climb(world, check_first_average=world.rank == 0) == 0.25 - 0.375  # one rank is enough
    with pytest.raises(RuntimeError, match="average 2: "):
        climb(world, check_first_average=False, check_every=2)
    assert ddp.DistributedDataParallel(nn.Linear(1, 1), check_first_average=False).reducer.sync


@on("gloo-2")
def test_forward_writes_raise_where_nothing_is_compared(world):
    model = nn.Linear(1, 1)
    model.register_forward_pre_hook(lambda module, _: module.bias.data.copy_(torch.ones(1)))
    model.bias.requires_grad_(False)
    reducer = Reducer(model, check_first_average=False)
    written = torch.no_grad()(lambda module, _: module.bias.fill_(world.rank))
    model.register_forward_pre_hook(written)
    model(torch.ones(1, 1)).sum().backward()
    with pytest.raises(RuntimeError, match=r"has written to bias.*check_every=N"):
        model(torch.ones(1, 1))
    reducer.remove()


# Defaults of torch ------------------------------------------------------------------------------


@on("pair")
def test_the_default_device_is_the_programs_own(world):
    """No tensor of the library's lands on the program's default device."""
    models = [nn.Linear(3, 1), nn.Linear(3, 1)]
    x = torch.full((2, 3), world.rank + 1.0)
    with torch.device("meta"):
        for shard, model in zip(("none", "world"), models, strict=True):
            ddp.broadcast_parameters(model)
            reducer = Reducer(model, sync_buffers=True, check_finite=True, stall_after=60)
            optimizer = ddp.AdamW(model.parameters(), lr=0.1, reducer=reducer, shard=shard)
            for _ in range(2):
                reducer.weight(1.0)
                optimizer.backward_and_step(model(x).square().mean(), max_norm=1.0)
            optimizer.synchronize()
            with ddp.join(reducer):
                for _ in range(1 + world.rank):
                    model(x).sum().backward()
    for model in models:
        agree(model)


def inside_distributed_autograd(world, folder):
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/rank{world.rank}")
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    try:
        model = Terms(2)
        ddp.Reducer(model)
        model(own(world)).backward()
        with torch.distributed.autograd.context():
            return text_of(RuntimeError, lambda: [model(1.0) for _ in range(10)])
    finally:
        rpc.shutdown()


def test_distributed_autograd_is_refused(ranks, tmp_path):
    """Its backward pass leaves `.grad` alone, so no hook of ours would run."""
    for text in ranks("gloo", 2, fresh=True)(inside_distributed_autograd, str(tmp_path)):
        assert "torch.distributed.autograd.context()" in text


@on("gloo-2")
def test_another_grad_dtype_is_noticed(world):
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    ddp.Reducer(model)
    model.weight.grad_dtype = torch.float32
    text = text_of(RuntimeError, model, torch.ones(2, 2, dtype=torch.bfloat16))
    assert "parameter weight became torch.bfloat16 on cpu with gradients of torch.float32" in text
