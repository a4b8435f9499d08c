"""Gradients that are lazy, complex, of another dtype, undefined, taken away, or never averaged.

Rank r contributes n (r + 1) with n the world size: every average is exact, and no summand is it.
"""

import math
import re
import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.utils.checkpoint import checkpoint

import ddp_from_scratch as ddp
from ddp_from_scratch import Reducer
from ddp_from_scratch.core.observer import Observer
from tests.support.on_ranks import on
from tests.support.refusal import text_of
from tests.support.terms import Terms, assert_grads, mean, own

OPTIONS = [
    {},
    {"gradient_as_bucket_view": True},
    {"gradient_as_bucket_view": True, "shared_memory": False},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"bucket_cap_mb": 0},
]


# Lazy and complex -----------------------------------------------------------------------------


class Lazy(nn.Module):
    """Its gradients are lazily conjugated and negated tensors: conj(x) and -Re(x)."""

    def __init__(self, numel=3):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(numel, dtype=torch.complex64))
        self.v = nn.Parameter(torch.zeros(numel))
        self.v.register_hook(lambda gradient: torch._neg_view(gradient.clone()))

    def forward(self, x):
        return (self.w.conj() * x).real.sum() + (self.v * x.real).sum()


# The second size is packed gradient by gradient.
@pytest.mark.parametrize("numel", [3, 40_000])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@on("gloo-2")
def test_lazily_conjugated_and_negated_gradients_are_averaged(world, options, numel):
    model = Lazy(numel)
    reducer = Reducer(model, **options)
    optimizers = [torch.optim.SGD(model.parameters(), 1.0)]
    if "static_graph" not in options:
        optimizers.append(ddp.SGD(model.parameters(), 1.0, reducer=reducer))
    expected, x = complex(mean(world), 1), torch.full((numel,), complex(own(world), 1))
    seen = []
    model.w.register_hook(lambda gradient: seen.append(gradient.is_conj()))
    for optimizer in [*optimizers, *optimizers]:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        optimizer.zero_grad()
        model(x).backward()
        assert torch.equal(model.w.grad.resolve_conj(), torch.full_like(model.w, expected))
        assert torch.equal(model.v.grad, torch.full_like(model.v, -mean(world)))
        optimizer.step()
        assert torch.equal(model.w, torch.full_like(model.w, -expected))
        # A lazy view of the averages themselves, which a step must not take for them.
        model.w.grad = model.w.grad.conj()
        optimizer.step()
        assert torch.equal(model.w, torch.full_like(model.w, -2 * expected.real))
    assert all(seen)


@on("pair")
def test_lazily_conjugated_gradients_are_averaged_over_virtual_ranks(world):
    model = Lazy()
    reducer = Reducer(model, virtual_ranks=4)
    x = torch.full((3,), complex(own(world), 1))
    reducer.run_virtual_ranks(lambda _: model(x).backward())
    assert torch.equal(model.w.grad, torch.full((3,), complex(mean(world), 1)))
    assert torch.equal(model.v.grad, torch.full((3,), -mean(world)))


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        # The strides of the first are not those of a contiguous tensor.
        self.w = nn.Parameter(torch.zeros(2, 3, dtype=torch.complex64).t())
        self.v = nn.Parameter(torch.zeros(2, dtype=torch.complex64))

    def forward(self, x):
        return (self.w.conj() * x).real.sum() + (self.v.conj() * x).real.sum()


def all_reduce_of_gradients(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reads and writes what torch's hooks do, and replaces the buffer."""
    assert bucket.buffer().dtype == torch.float32
    shapes = [(*p.shape, 2) for p in bucket.parameters()]
    assert [tuple(gradient.shape) for gradient in bucket.gradients()] == shapes
    assert sum(map(torch.numel, bucket.gradients())) == bucket.buffer().numel()
    for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
        assert torch.equal(torch.view_as_complex(gradient), parameter.grad)
        gradient.mul_(1 / dist.get_world_size())
    bucket.set_buffer(bucket.buffer().double())
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


@pytest.mark.parametrize(
    "hook",
    [
        default_hooks.allreduce_hook,
        default_hooks.fp16_compress_hook,
        default_hooks.bf16_compress_hook,
        all_reduce_of_gradients,
        ddp.comm_hooks.fp16_compress_hook,
        ddp.comm_hooks.allreduce_hook,
        ddp.power_sgd.power_sgd_hook,
        powerSGD_hook.powerSGD_hook,
    ],
    ids=lambda hook: f"{hook.__module__}.{hook.__name__}",
)
@on("crew")
def test_hooks_see_complex_gradients_as_pairs_of_reals(world, hook):
    model, state = Complex(), None
    if hook is ddp.power_sgd.power_sgd_hook:
        state = ddp.power_sgd.PowerSGDState(start=0)
    elif hook is powerSGD_hook.powerSGD_hook:
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=10)
    reducer = Reducer(model)
    reducer.register_comm_hook(state, hook)
    for _ in range(3):
        model.zero_grad()
        model(torch.tensor(complex(own(world), 3 * own(world)))).backward()
        for parameter in model.parameters():
            expected = torch.full_like(parameter, complex(mean(world), 3 * mean(world)))
            torch.testing.assert_close(parameter.grad, expected)


# Another dtype than the parameter's -----------------------------------------------------------


class Precise(torch.autograd.Function):
    """Multiplies in the input's precision, also for the gradient of a parameter of fewer bits."""

    @staticmethod
    def forward(context, parameter, x):
        context.save_for_backward(x)
        return (parameter.to(x.dtype) * x).sum()

    @staticmethod
    def backward(context, gradient):
        return gradient * context.saved_tensors[0], None


class LowPrecision(nn.Module):
    def __init__(self, numel=3):
        super().__init__()
        self.ordinary = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
        self.precise = nn.Parameter(torch.zeros(numel, dtype=torch.bfloat16))
        self.precise.grad_dtype = torch.float32
        self.full = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return Precise.apply(self.precise, x) + (self.ordinary.sum() + self.full.sum()) * x[0]


@pytest.mark.parametrize("options", [*OPTIONS, {"virtual_ranks": 2}, {"fuse_wgrad": True}], ids=str)
@pytest.mark.parametrize("numel", [3, 40_000])
@on("gloo-2")
def test_gradients_are_averaged_in_their_own_dtype(world, options, numel):
    model = LowPrecision(numel)
    reducer = Reducer(model, **options)
    if "bucket_cap_mb" not in options:
        # Buckets are of one dtype, that of their gradients.
        assert {"precise", "full"} in map(set, reducer.buckets)
    exact = mean(world) * (1 + 2**-20)
    for _ in range(3):
        model.zero_grad()
        with reducer.virtual_rank(world.rank) if "virtual_ranks" in options else nullcontext():
            model(torch.full((numel,), own(world) * (1 + 2**-20))).backward()
        assert model.precise.grad.dtype == torch.float32
        assert torch.equal(model.precise.grad, torch.full((numel,), exact))
        assert model.ordinary.grad.tolist() == [mean(world)] * 2
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.step()
    assert torch.equal(model.precise, torch.full_like(model.precise, -exact))


@on("gloo-2")
def test_a_gradient_of_any_dtype_is_refused(world):
    model = LowPrecision()
    model.precise.grad_dtype = None
    assert "shape (3,) has grad_dtype=None" in text_of(ValueError, Reducer, model)


# Undefined ------------------------------------------------------------------------------------


class Gives(torch.autograd.Function):
    """Adds a term for the parameter, whose gradient is undefined unless `gives`."""

    @staticmethod
    def forward(context, total, parameter, x, gives):
        context.x, context.shape, context.gives = x, parameter.shape, gives
        return total + parameter.sum() * x

    @staticmethod
    def backward(context, gradient):
        own = gradient * torch.full(context.shape, context.x) if context.gives else None
        return gradient, own, None, None


class Undefined(nn.Module):
    """The sum of its parameters times x; the gradients of all but the given are undefined."""

    def __init__(self, numel=2):
        super().__init__()
        self.p = nn.ParameterList(nn.Parameter(torch.zeros(numel)) for _ in range(4))

    def forward(self, x, gives, reentrant=False):
        def terms(total):
            for index, parameter in enumerate(self.p):
                total = Gives.apply(total, parameter, x, index in gives)
            return total

        total = torch.zeros((), requires_grad=True)
        return checkpoint(terms, total, use_reentrant=True) if reentrant else terms(total)


EVERY = (0, 1, 2, 3)


@pytest.mark.parametrize("numel", [2, 40_000])
@pytest.mark.parametrize("hooked", ["", "hooked", "hooked later"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@on("gloo-2")
def test_an_undefined_gradient_adds_nothing(world, options, hooked, numel):
    """As with torch's DDP, also where the program has harmless hooks of its own."""
    model, alone = Undefined(numel), ((0, 1, 3), EVERY)
    for parameter in model.p if hooked == "hooked" else ():
        parameter.register_post_accumulate_grad_hook(lambda _: None)
    reducer = Reducer(model, **options)
    for parameter in model.p if hooked == "hooked later" else ():
        parameter.register_post_accumulate_grad_hook(lambda _: None)
    same = [(gives, gives) for gives in (EVERY, EVERY, (1,), ())]
    # After the first two, autograd calls once for each bucket.
    for gives in (*same[:2], alone, *same, alone):
        model.zero_grad()
        model(own(world), gives[world.rank]).backward()
        for index, parameter in enumerate(model.p):
            average = sum(rank + 1.0 for rank in range(2) if index in gives[rank])
            if parameter.grad is None:
                assert average == 0
            else:
                assert torch.equal(parameter.grad, torch.full((numel,), average))
    assert reducer.iteration == 8


@on("gloo-2")
def test_an_undefined_gradient_keeps_what_was_accumulated(world):
    for views in (False, True):
        model = Undefined()
        reducer = Reducer(model, gradient_as_bucket_view=views)
        for _ in range(3):
            model.zero_grad()
            with reducer.no_sync():
                model(own(world), (1, 2)).backward()
            model(own(world), (0, 1)).backward()
            found = [parameter.grad[0].item() for parameter in model.p]
            assert found == [mean(world), 2 * mean(world), mean(world), 0]


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}])
@on("gloo-2")
def test_undefined_gradients_of_checkpoints_and_virtual_ranks(world, options):
    model = Undefined()
    reducer = Reducer(model, virtual_ranks=2, **options)
    for gives in (EVERY, (0, 2), ()):
        model.zero_grad()
        reducer.run_virtual_ranks(
            lambda _, gives=gives: model(own(world), gives, reentrant=True).backward()
        )
        found = [None if p.grad is None else p.grad[0].item() for p in model.p]
        assert all(found[index] == mean(world) for index in gives)
        assert not any(found[index] for index in EVERY if index not in gives)


# Taken away -----------------------------------------------------------------------------------


def clear(parameter):
    parameter.grad = None


def stash(parameter):
    parameter.kept, parameter.grad = parameter.grad, None


@pytest.mark.parametrize("later", [False, True], ids=["before the Reducer", "after"])
@pytest.mark.parametrize("take", [clear, stash], ids=lambda take: take.__name__)
@pytest.mark.parametrize("options", [*OPTIONS, {"virtual_ranks": 2}], ids=str)
@on("gloo-2")
def test_a_gradient_that_a_hook_takes_is_missed(world, options, take, later):
    """It raises on the rank whose hook it is, or, sent already, it gets the average."""
    model = Terms(2, 3, 40_000)

    def hook():
        if world.rank == 1:
            model.p1.register_post_accumulate_grad_hook(take)

    if not later:
        hook()
    reducer = Reducer(model, **options)
    virtual = partial(reducer.virtual_rank, world.rank) if "virtual_ranks" in options else None
    for _ in range(3 if later else 0):
        model.zero_grad()
        with virtual() if virtual else nullcontext():
            model(own(world)).backward()
    if later:
        hook()
    model.zero_grad()
    text = ""
    try:
        with virtual() if virtual else nullcontext():
            model(own(world)).backward()
    except RuntimeError as error:
        text = str(error)
    if world.rank == 0 or not text:
        assert model.p1.grad is not None
    texts = [None, None]
    dist.all_gather_object(texts, text)
    assert texts[0] == ""
    if texts[1]:
        assert "parameter p1 was taken away on rank 1" in texts[1]
    else:
        assert later
        assert_grads(model, mean(world))


def add(parameter):
    with torch.no_grad():
        parameter.add_(1)


def add_to_all_and_clear(gradient, model):
    """As LOMO does: each gradient's hook steps and clears those that are there already."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.data.add_(parameter.grad, alpha=-1)
            parameter.grad = None


@pytest.mark.parametrize("lomo", [False, True], ids=["adds", "adds and clears"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@on("gloo-2")
def test_a_hook_that_steps_by_hand_raises(world, options, lomo):
    """It runs after ours, on a gradient that is in its bucket or sent already."""
    model = Terms(2, 3) if lomo else Terms(2, 3, 40_000)  # large views are in the bucket at once
    reducer = Reducer(model, **options)
    model(own(world)).backward()
    model.zero_grad()
    for parameter in model.parameters():
        if lomo:
            parameter.register_hook(partial(add_to_all_and_clear, model=model))
        else:
            parameter.register_post_accumulate_grad_hook(add)
    with pytest.raises(RuntimeError, match=r"was taken away on rank|changed during the backward"):
        model(own(world)).backward()
    assert reducer.iteration == 2


@on("gloo-2")
def test_local_steps_in_a_hook_are_allowed(world):
    model = Terms(2, 3)
    Reducer(model, local_steps=True)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(add)
    model(own(world)).backward()
    assert_grads(model, mean(world))


@on("gloo-2")
def test_an_optimizer_that_steps_in_a_hook_before_ours_is_refused(world):
    """For the first gradient of the pass, too, which our hooks have not seen yet."""
    model = Terms(2, 3)
    optimizers = {p: torch.optim.SGD([p], lr=1.0) for p in model.parameters()}
    for parameter, optimizer in optimizers.items():
        parameter.register_post_accumulate_grad_hook(
            lambda _, optimizer=optimizer: optimizer.step()
        )
    reducer = Reducer(model)
    with pytest.raises(RuntimeError, match="an optimizer stepped during backward"):
        model(own(world)).backward()
    assert not any(parameter.any() for parameter in model.parameters())
    # A rank's own steps are its own.
    reducer.abort_step()
    model.zero_grad()
    with reducer.no_sync():
        model(1.0).backward()
    assert model.p1.tolist() == [-2.0] * 3


# Never averaged -------------------------------------------------------------------------------


def off_by_one(model, reducer, optimizer, x):
    for part in range(4):
        with reducer.no_sync() if part else nullcontext():
            model(x).backward()
    optimizer.step()


def all_local(model, reducer, optimizer, x):
    with reducer.no_sync():
        model(x).backward()
        optimizer.step()


def by_autograd_grad(model, reducer, optimizer, x):
    parameters = list(model.parameters())
    for parameter, gradient in zip(
        parameters, torch.autograd.grad(model(x), parameters), strict=True
    ):
        parameter.grad = gradient
    optimizer.step()


def added_by_hand(model, reducer, optimizer, x):
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # makes the optimizer's state
    for parameter in model.parameters():
        parameter.grad.add_(x)
    optimizer.step()


def closure_without_average(model, reducer, optimizer, x):
    def closure():
        with reducer.no_sync():
            loss = model(x)
            loss.backward()
        return loss

    optimizer.step(closure)


LOCAL = [off_by_one, all_local, by_autograd_grad, added_by_hand, closure_without_average]


@pytest.mark.parametrize("program", LOCAL, ids=lambda program: program.__name__)
@pytest.mark.parametrize("kind", ["torch", "ddp", "node", "world"])
@on("gloo-2")
def test_the_first_step_on_local_gradients_warns(world, program, kind):
    for averages in (0, 2):  # before
        model = Terms(2, 3)
        reducer = Reducer(model)
        if kind == "torch":
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        else:
            shard = "none" if kind == "ddp" else kind
            optimizer = ddp.SGD(model.parameters(), lr=1.0, reducer=reducer, shard=shard)
        for _ in range(averages):
            optimizer.zero_grad()
            model(own(world)).backward()
            optimizer.step()
        optimizer.zero_grad()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            program(model, reducer, optimizer, own(world))
            program(model, reducer, optimizer, own(world))
        assert len(told) == 1
        assert re.search("no_sync.*average_gradients.*local_steps=True", str(told[0].message))
        assert told[0].filename == __file__
        ddp.broadcast_parameters(model)  # what follows begins with equal models


@pytest.mark.parametrize("program", LOCAL, ids=lambda program: program.__name__)
@on("gloo-2")
def test_with_check_every_a_step_on_local_gradients_raises(world, program):
    model = Terms(2, 3)
    reducer, optimizer = Reducer(model, check_every=1), torch.optim.SGD(model.parameters(), 1.0)
    with pytest.raises(RuntimeError, match="not averaged"):
        program(model, reducer, optimizer, own(world))
    model = Terms(2, 3)
    reducer = Reducer(model, check_every=1, local_steps=True)
    program(model, reducer, torch.optim.SGD(model.parameters(), 1.0), own(world))


def local_sgd(model, reducer, optimizer, x):
    for step in range(4):
        optimizer.zero_grad()
        with reducer.no_sync():
            model(x).backward()
        optimizer.step()
        if step % 2:
            for parameter in model.parameters():
                dist.all_reduce(parameter.data, op=dist.ReduceOp.SUM)
                parameter.data.div_(2)


def accumulation(model, reducer, optimizer, x):
    for _ in range(2):
        optimizer.zero_grad()
        with reducer.no_sync():
            model(x).backward()
        model(x).backward()
        optimizer.step()


def two_optimizers(model, reducer, optimizer, x):
    others = [torch.optim.SGD([p], lr=1.0) for p in model.parameters()]
    for _ in range(2):
        model.zero_grad()
        model(x).backward()
        for each in (*others, optimizer):
            each.step()


def two_steps_on_one_average(model, reducer, optimizer, x):
    model(x).backward()
    optimizer.step()
    optimizer.step()


def closures(model, reducer, optimizer, x):
    def closure():
        optimizer.zero_grad()
        with reducer.no_sync():
            model(x).backward()
        loss = model(x)
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.step(closure)


def another_part_is_local(model, reducer, optimizer, x):
    """The optimizer steps the part that was averaged."""
    model(x).backward()
    optimizer = torch.optim.SGD([model.p0], lr=1.0)
    with reducer.no_sync():
        model(x, use=[1]).backward()
    optimizer.step()


def averaged_by_hand(model, reducer, optimizer, x):
    for _ in range(2):
        optimizer.zero_grad()
        with reducer.no_sync():
            model(x).backward()
        reducer.average_gradients()
        optimizer.step()


def dropped(model, reducer, optimizer, x):
    with reducer.no_sync():
        model(x).backward()
    optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()


def two_reducers(model, reducer, optimizer, x):
    """The first is averaged in every second step, and its average is kept."""
    other = Terms(3)
    another = Reducer(other)
    both = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=1.0)
    for step in range(4):
        if step % 2 == 0:
            model.zero_grad()
            model(x).backward()
        other.zero_grad()
        other(x).backward()
        both.step()
    another.remove()


def another_reducer(model, reducer, optimizer, x):
    """It is made between the average and the step."""
    model(x).backward()
    Reducer(model, check_every=1)
    torch.optim.SGD(model.parameters(), lr=1.0).step()


def clipped_again(model, reducer, optimizer, x):
    model(x).backward()
    optimizer.step()
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()  # may warn, but does not raise


AVERAGED = [two_reducers, another_reducer, clipped_again]
AVERAGED += [accumulation, two_optimizers, two_steps_on_one_average, closures, dropped]
AVERAGED += [another_part_is_local, averaged_by_hand]


@pytest.mark.parametrize("program", [*AVERAGED, local_sgd], ids=lambda program: program.__name__)
@pytest.mark.parametrize("kind", ["torch", "ddp"])
@on("gloo-2")
def test_other_steps_do_not_warn(world, program, kind):
    model = Terms(2, 3)
    reducer = Reducer(model, check_every=1, local_steps=program is local_sgd)
    if kind == "torch":
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    else:
        optimizer = ddp.SGD(model.parameters(), lr=1.0, reducer=reducer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program(model, reducer, optimizer, own(world))
    ddp.check_sync(model)


class Launches(Observer):
    def __init__(self):
        self.seen = []

    def on_launch(self, bucket):
        self.seen.append(bucket.index())


@pytest.mark.parametrize("options", [*OPTIONS, {"check_finite": True}, {"reduce": "sum"}], ids=str)
@on("pair")
def test_gradients_are_averaged_without_a_backward_pass(world, options):
    model, launches = Terms(2, 3, 40_000), Launches()
    reducer = Reducer(model, observers=[launches], **options)
    times = 2 if options.get("reduce") == "sum" else 1
    for step in range(4):
        model.zero_grad()
        if step == 2:  # a backward pass between them
            model(own(world)).backward()
        else:
            parameters = list(model.parameters())
            gradients = torch.autograd.grad(model(own(world)), parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            reducer.average_gradients()
        assert_grads(model, times * mean(world))
        assert reducer.iteration == step + 1
        assert launches.seen == [*range(len(reducer.core.all_buckets))]
        launches.seen.clear()


@on("gloo-2")
def test_average_gradients_names_a_parameter_without_one(world):
    for find_unused in (False, True):
        model = Terms(2, 3)
        reducer = Reducer(model, find_unused_parameters=find_unused)
        model.p0.grad = torch.full((2,), own(world))
        if world.rank == 0 and not find_unused:
            model.p1.grad = torch.full((3,), own(world))
        fails = world.rank == 1 and not find_unused
        error = pytest.raises(RuntimeError, match=r"no gradient to average on rank 1 for: p1\.")
        with error if fails else nullcontext():
            reducer.average_gradients()
        if find_unused:
            assert model.p0.grad.tolist() == [mean(world)] * 2
            assert model.p1.grad is None


@on("pair")
def test_average_gradients_raises_what_backward_does(world):
    """For buffers that differ, and for a gradient that is new in a static graph."""
    model = Terms(2, 3)
    model.register_buffer("mask", torch.ones(2))
    reducer = Reducer(model, static_graph=True, sync_buffers=True)
    model(own(world), use=[0]).backward()
    if world.rank:
        model.mask = torch.ones(5)
    with pytest.raises(RuntimeError, match=r"mask: shape \(2,\).*mask: shape \(5,\)"):
        reducer.average_gradients()
    model.mask = torch.ones(2)
    model.zero_grad()
    with reducer.no_sync():
        model(own(world), use=[0, 1]).backward()
    text = rf"average_gradients\(\) on rank {world.rank} found gradients .*first average: p1\. "
    with pytest.raises(RuntimeError, match=text):
        reducer.average_gradients()
    model.zero_grad()
    model(own(world), use=[0]).backward()
    assert model.p0.grad.tolist() == [mean(world)] * 2


@on("pair")
def test_a_static_graph_goes_on_after_another_error(world):
    model = Terms(2, 3)
    reducer = Reducer(model, static_graph=True, check_finite=True)
    for step in range(4):
        model.zero_grad()
        is_finite = step % 2 == 0
        with nullcontext() if is_finite else pytest.raises(RuntimeError, match="not finite"):
            model(own(world) if is_finite else math.inf).backward()
    assert reducer.iteration == 4


def in_backward(model, reducer):
    model.p0.register_hook(lambda _: reducer.average_gradients())
    model(1.0).backward()


def with_virtual_ranks(model, reducer):
    Reducer(model, virtual_ranks=2).average_gradients()


@pytest.mark.parametrize(
    ("program", "text"), [(in_backward, "inside a backward pass"), (with_virtual_ranks, "virtual")]
)
@on("gloo-2")
def test_where_average_gradients_cannot_be_used(world, program, text):
    model = Terms(2)
    with pytest.raises(RuntimeError, match=text):
        program(model, Reducer(model))


@pytest.mark.parametrize("how", ["swapped", "shared"])
@pytest.mark.parametrize("size", [3, 128])  # packed together, and each as it is ready
@pytest.mark.parametrize("cap", [0, 25])
@on("gloo-2")
def test_a_gradient_in_the_window_of_another_parameter_raises(world, how, size, cap):
    """It would be overwritten while the other one is averaged."""

    def backward():
        model.zero_grad(set_to_none=False)
        model(torch.full((1, size), world.rank + 1.0)).sum().backward()

    model = nn.Sequential(*[nn.Linear(size, size, bias=False) for _ in range(3)])
    ddp.broadcast_parameters(model)
    reducer = Reducer(model, bucket_cap_mb=cap, gradient_as_bucket_view=True)
    backward()
    backward()
    one, two = model[0].weight, model[2].weight
    expected = one.grad.clone()
    one.grad, two.grad = (two.grad, one.grad) if how == "swapped" else (two.grad, two.grad)
    text = r"the \.grad of [02]\.weight is that of [02]\.weight, which is a part of a bucket"
    with pytest.raises(RuntimeError, match=text):
        backward()
    reducer.remove()
    model.zero_grad()
    reducer = Reducer(model, bucket_cap_mb=cap, gradient_as_bucket_view=True)
    backward()
    backward()
    one.grad, two.grad = two.grad, one.grad
    model.zero_grad()  # gradients are new again
    backward()
    assert torch.equal(one.grad, expected)
