"""Several Reducers in one backward pass: the same collectives in the same order on all ranks."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import ddp_from_scratch as ddp
from tests.support.tiers import slow

STEPS = 4


class Heads(nn.Module):
    """Two heads of equal size; the loss of a rank may leave one of them out."""

    def __init__(self, norm=nn.Identity):
        super().__init__()
        self.main, self.aux, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), norm()

    def forward(self, x):
        return self.norm(self.main(x)), self.aux(x)


def body(norm=nn.Identity):
    return nn.Sequential(nn.Linear(4, 4), norm(), nn.Linear(4, 4))


def norm():
    return nn.BatchNorm1d(4)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = body(), nn.Linear(4, 4)

    def forward(self, x):
        return checkpoint(self.inner, self.outer(x), use_reentrant=True)


# A program: modules in the order in which they get their Reducers, the options of each, and the
# loss of a rank for its input x.


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


class Twice(nn.Module):
    """Its parameters get a gradient in each of two inner passes, and one in the outer pass."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.inner, torch.tanh(x), use_reentrant=True)
        return self.inner(x)


class Depth(nn.Module):
    """Stochastic depth: a rank may skip the layer."""

    def __init__(self):
        super().__init__()
        self.layer, self.skips = nn.Linear(4, 4), False

    def forward(self, x):
        return x * 1 if self.skips else self.layer(x)


def skipping_loss(modules, x, rank, step):
    a, b = modules
    b.skips = rank == step % 2
    x = x.requires_grad_()
    skipped = b(x)  # before a, whose gradients are then ready first
    return a(x).square().mean() + skipped.square().mean()


UNUSED = {"find_unused_parameters": True}
BUFFERS = {"broadcast_buffers": True}
PROGRAMS = {
    "heads": (lambda: [body(), Heads()], [{}, UNUSED], heads_loss),
    "heads, made first": (lambda: [Heads(), body()], [UNUSED, {}], reversed_loss),
    "heads, both": (lambda: [body(), Heads()], [UNUSED, UNUSED], heads_loss),
    "checkpoint below": (lambda: [Checkpointed(), Heads()], [{}, UNUSED], heads_loss),
    "checkpoint below, both": (lambda: [Checkpointed(), Heads()], [UNUSED, UNUSED], heads_loss),
    "checkpoint, made last": (lambda: [Heads(), Checkpointed()], [UNUSED, {}], reversed_loss),
    "checkpointed twice": (
        lambda: [Twice(), Heads()],
        [{"static_graph": True}, UNUSED],
        heads_loss,
    ),
    "skipped": (lambda: [nn.Linear(4, 4), Depth()], [{}, UNUSED], skipping_loss),
    "chain of three": (lambda: [Heads(), Heads(), Heads()], [UNUSED] * 3, chain_loss),
    "siblings": (lambda: [body(), body()], [{}, {}], siblings_loss),
    "gan": (lambda: [body(), body()], [{}, {"static_graph": True}], gan_loss),
    "static siblings": (lambda: [body(), body()], [{"static_graph": True}, {}], siblings_loss),
    "buffers": (lambda: [body(norm), Heads(norm)], [BUFFERS, UNUSED | BUFFERS], heads_loss),
    "views": (
        lambda: [body(), Heads()],
        [{"gradient_as_bucket_view": True}, UNUSED | {"gradient_as_bucket_view": True}],
        heads_loss,
    ),
}
SETTINGS = ["shared memory", "messages", "own group", "small buckets", "two collectives"]


def two_collectives(group, bucket):
    """A comm hook that starts a second collective when the first has landed."""
    half = bucket.buffer().numel() // 2
    first, second = bucket.buffer()[:half], bucket.buffer()[half:]

    def then(_):
        dist.all_reduce(second, group=group)
        return bucket.buffer().div_(dist.get_world_size(group))

    return dist.all_reduce(first, group=group, async_op=True).get_future().then(then)


def train(world, program, setting):
    """Trains with a Reducer for each module, and alone on all inputs; returns the difference."""
    make, options, loss = PROGRAMS[program]
    torch.manual_seed(0)
    modules = make()
    single = copy.deepcopy(modules)
    groups = [dist.new_group() if setting == "own group" and i == 0 else None for i in (0, 1, 2)]
    common = {"shared_memory": setting != "messages"}
    if setting == "small buckets":
        common["bucket_cap_mb"] = 0
    reducers = [
        ddp.Reducer(module, group, **common, **chosen)
        for module, group, chosen in zip(modules, groups, options, strict=False)
    ]
    if setting == "two collectives":
        reducers[-1].register_comm_hook(None, two_collectives)

    def optimizer(of):
        return torch.optim.SGD([p for module in of for p in module.parameters()], lr=0.1)

    ours, alone = optimizer(modules), optimizer(single)
    for step in range(STEPS):
        inputs = [
            torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))
            for rank in range(world.world_size)
        ]
        ours.zero_grad()
        loss(modules, inputs[world.rank], world.rank, step).backward()
        ours.step()
        alone.zero_grad()
        sum(
            loss(single, x, rank, step) / world.world_size for rank, x in enumerate(inputs)
        ).backward()
        alone.step()
    for module in modules:
        ddp.check_sync(module)
    for reducer in reducers:
        reducer.remove()
    if groups[0] is not None:
        dist.destroy_process_group(groups[0])
    pairs = zip(ours.param_groups[0]["params"], alone.param_groups[0]["params"], strict=True)
    return max(float((p - q).abs().max()) for p, q in pairs)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("size", ["gloo-2", "mpi-2", slow("gloo-3")])
def test_ranks_train_as_one_process_does(ranks, size, setting, program):
    backend, world_size = size.split("-")
    assert max(ranks(backend, int(world_size))(train, program, setting)) < 1e-6


def train_as_torch(world, cls):
    torch.manual_seed(0)
    a, b = body(), Heads()
    first, second = cls(a), cls(b, find_unused_parameters=True)
    optimizer = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)
    torch.manual_seed(world.rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        heads_loss([first, second], torch.randn(3, 4), world.rank, 0).backward()
        optimizer.step()
    return [p.tolist() for p in optimizer.param_groups[0]["params"]]


def test_bits_are_those_of_torchs_class(ranks):
    ours = ranks("gloo", 2)(train_as_torch, ddp.DistributedDataParallel)
    torchs = ranks("gloo", 2)(train_as_torch, nn.parallel.DistributedDataParallel)
    assert ours == torchs
    assert ours[0] == ours[1]


def skip_sync(world, outer):
    """Only one of two Reducers averages: the other's gradients stay local."""
    a, b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    reducers = ddp.Reducer(a), ddp.Reducer(b)
    with torch.no_grad():
        a.weight.fill_(1), b.weight.fill_(1)
    x = torch.full((1, 2), world.rank + 1.0)
    with reducers[outer].no_sync():
        b(a(x)).sum().backward()
    return a.weight.grad[0, 0].item(), b.weight.grad[0, 0].item()


@pytest.mark.parametrize("outer", [0, 1])
def test_a_reducer_under_no_sync_holds_up_no_other(pair, outer):
    # d loss / d a = 2 x, d loss / d b = 2 x; the mean of x over ranks is 1.5.
    local = [(2.0, 2.0), (4.0, 4.0)]
    average = (3.0, 3.0)
    for rank, found in enumerate(pair(skip_sync, outer)):
        assert found[outer] == local[rank][outer]
        assert found[1 - outer] == average[1 - outer]


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("in backward")


def fail_once(world):
    """Backward raises on all ranks inside a's checkpoint, after b's gradients are ready."""
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    reducers = ddp.Reducer(a), ddp.Reducer(b)

    def forward(fails):
        def inner(x):
            return Failing.apply(a(x)) if fails else a(x)

        x = torch.full((1, 2), world.rank + 1.0, requires_grad=True)
        return b(checkpoint(inner, x, use_reentrant=True)).square().sum()

    with pytest.raises(ArithmeticError):
        forward(fails=True).backward()
    for reducer in reducers:
        reducer.drop_step()
    for module in (a, b):
        module.zero_grad()
    forward(fails=False).backward()
    return [p.grad.tolist() for module in (a, b) for p in module.parameters()]


def test_a_pass_that_raised_holds_up_no_later_one(pair):
    first, second = pair(fail_once)
    assert first == second


def leave_out(world):
    """Rank 1 uses one Reducer's module alone, so its collective meets another Reducer's."""
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    reducers = ddp.Reducer(a), ddp.Reducer(b)  # noqa: F841  # their hooks hold them weakly
    h = a(torch.ones(1, 4))
    try:
        (b(h) if world.rank == 0 else h).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_an_error_names_reducer_and_bucket(ranks, backend):
    for error in ranks(backend, 2, fresh=True)(leave_out):
        assert "rank 0 all_reduce" in error
        assert "of 20 x torch.float32 for bucket 0 of Reducer 2" in error
        assert "for bucket 0 of Reducer 1" in error
