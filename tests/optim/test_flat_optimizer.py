"""Flat optimizers beside torch's: the same bits of parameters and state in every program."""

import copy
import io
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ddp_from_scratch as ddp
from ddp_from_scratch import SGD, Adam, AdamW, Reducer
from ddp_from_scratch.core.bucket import BucketState
from ddp_from_scratch.optim.flat_params import FlatParams
from ddp_from_scratch.optim.update_rules import AdamRule, SGDRule
from tests.support.on_ranks import on
from tests.support.terms import torchs
from tests.support.tiers import slow

pytestmark = pytest.mark.usefixtures("alone")

SEVERAL, ALL = 5e-4, float("inf")  # MiB: a few buckets, and one


class Net(nn.Module):
    """Odd sizes, a channels-last weight, a number, nothing, and more than a chunk; out of order."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        torch.manual_seed(0)
        shapes: list[Sequence[int]] = [(3,), (5, 7), (4, 3, 2, 2), (), (0, 2), (70_001,), (17,)]
        for k, shape in enumerate(shapes):
            values = torch.randn(shape, dtype=dtype)
            if len(shape) == 4:
                values = values.to(memory_format=torch.channels_last)
            self.register_parameter(f"p{k}", nn.Parameter(values))
        self.order = (2, 0, 6, 1, 5, 3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for k in self.order:
            p = getattr(self, f"p{k}")
            total = total + ((p * p * x * (k + 1)).real.sum() + (p * x).real.sum()).double()
        return total


def inputs(count: int) -> list[float]:
    return [0.3 + 0.1 * (step % 3) for step in range(count)]


class Pair:
    def __init__(
        self,
        make: Callable[[], nn.Module] = Net,
        groups: Callable[[nn.Module], Any] = nn.Module.parameters,
        cap: float = SEVERAL,
        kind: str = "SGD",
        flat: bool = True,
        **options: Any,
    ):
        self.ours, self.theirs = make(), make()
        self.reducer = ddp.Reducer(self.ours, bucket_cap_mb=cap)
        if flat:  # without a hook, one rank packs and moves nothing
            self.reducer.register_comm_hook(None, ddp.comm_hooks.allreduce_hook)
        options.setdefault("lr", 0.05)
        ours = groups(self.ours)
        self.our_optimizer = getattr(ddp, kind)(ours, reducer=self.reducer, **options)
        # A Reducer too, so that packing and averaging are the same.
        ddp.Reducer(self.theirs, bucket_cap_mb=cap, gradient_as_bucket_view=True)
        self.their_optimizer = torchs(kind)(groups(self.theirs), **options)

    @property
    def both(self) -> tuple[tuple[nn.Module, torch.optim.Optimizer], ...]:
        return (self.ours, self.our_optimizer), (self.theirs, self.their_optimizer)

    def step(self, x: float, set_to_none: bool = True) -> None:
        for model, optimizer in self.both:
            optimizer.zero_grad(set_to_none=set_to_none)
            model(x).backward()
            optimizer.step()

    def check(self) -> None:
        assert_same(self.ours, self.theirs)
        names, pairs = self.ours.state_dict(), (self.ours.parameters(), self.theirs.parameters())
        for name, p, q in zip(names, *pairs, strict=True):
            mine, other = self.our_optimizer.state.get(p, {}), self.their_optimizer.state.get(q, {})
            assert mine.keys() == other.keys(), name
            for key in mine:
                assert torch.equal(mine[key], other[key]), f"{name}, {key}"

    def train(self, count: int = 4, **how: Any) -> None:
        for x in inputs(count):
            self.step(x, **how)
            self.check()


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q), name
        assert p.stride() == q.stride(), name


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    own = dict(model.named_parameters())
    first = [own.pop("p1"), own.pop("p6")]
    return [{"params": own.values()}, {"params": first, "lr": 0.3, "momentum": 0.0}]


def alternating(model: nn.Module) -> list[dict[str, Any]]:
    own = list(model.parameters())
    return [{"params": own[::2]}, {"params": own[1::2], "weight_decay": 0.2, "nesterov": True}]


MOMENTUM = {"momentum": 0.9, "weight_decay": 0.01}
ADAMW = {"kind": "AdamW", "weight_decay": 0.1}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weight decay": {"weight_decay": 0.01},
    "momentum": {"momentum": 0.9},
    "dampening": {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
    "nesterov": {"momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
    "maximize": {"momentum": 0.8, "maximize": True, "weight_decay": 0.01},
    "tensor lr": {"lr": torch.tensor(0.03), "momentum": 0.9},
    "AdamW": {"kind": "AdamW"},
    "AdamW, amsgrad": {"kind": "AdamW", "amsgrad": True, "weight_decay": 0.1, "maximize": True},
    "AdamW, tensor lr": ADAMW | {"lr": torch.tensor(1e-2), "betas": (0.7, 0.9), "eps": 1e-3},
    "Adam": {"kind": "Adam", "weight_decay": 0.1},
    "two groups": MOMENTUM | {"groups": two_groups},
    "alternating groups": MOMENTUM | {"groups": alternating},
    "names": MOMENTUM | {"groups": nn.Module.named_parameters},
    "bfloat16": MOMENTUM | {"make": partial(Net, torch.bfloat16)},
    "complex64": MOMENTUM | {"make": partial(Net, torch.complex64)},  # Adam takes none
    "AdamW, bfloat16": ADAMW | {"make": partial(Net, torch.bfloat16)},
    "AdamW, float16": ADAMW | {"make": partial(Net, torch.float16)},
}
either_way = pytest.mark.parametrize("flat", [True, False], ids=["flat", "not flat"])
each_kind = pytest.mark.parametrize("options", [MOMENTUM, ADAMW], ids=["SGD", "AdamW"])


def train_in_one(pair: Pair, count: int, accumulates: bool = False) -> None:
    for x in inputs(count):
        for model, optimizer in pair.both:
            optimizer.zero_grad()
            if accumulates:
                with pair.reducer.no_sync():
                    model(2 * x).backward()
        pair.our_optimizer.backward_and_step(pair.ours(x))
        pair.theirs(x).backward()
        pair.their_optimizer.step()
        pair.check()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize(
    ("cap", "flat"),
    [(0, True), (SEVERAL, True), slow(ALL, True), (SEVERAL, False)],
    ids=["each its own", "several", "one", "not flat"],
)
def test_bits_are_those_of_torch_and_state_goes_both_ways(options, cap, flat):
    pair = Pair(cap=cap, flat=flat, **options)
    pair.train(3, set_to_none=cap != 0)
    train_in_one(pair, 2)
    ours, theirs = pair.our_optimizer.state_dict(), pair.their_optimizer.state_dict()
    assert ours["state"].keys() == theirs["state"].keys()
    keys = [[group.keys() for group in state["param_groups"]] for state in (ours, theirs)]
    assert keys[0] == keys[1]
    torch.save(ours, file := io.BytesIO())
    file.seek(0)
    other = Pair(**{**options, "lr": 7.0}, flat=flat)  # comes from the state
    states = copy.deepcopy(theirs), torch.load(file, weights_only=True)
    for (model, optimizer), state in zip(other.both, states, strict=True):
        model.load_state_dict(pair.ours.state_dict())
        optimizer.load_state_dict(state)
    other.check()
    other.train(2)
    pair.train(2)  # the saved one continues from where it was
    assert_same(pair.ours, other.ours)


class Layers(nn.Module):
    def __init__(self, *sizes: tuple[int, int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(*size) for size in sizes)

    def forward(self, x: float) -> torch.Tensor:
        each = (f(torch.linspace(0, x, f.in_features)[None]).square().sum() for f in self.layers)
        return torch.stack([*each]).sum()


def test_parameters_begin_where_products_have_torchs_bits():
    """The rounding of products with single rows depends on where a weight lies in memory."""
    sizes = [(38, 138), (183, 139), (48, 189), (37, 61), (64, 64)]
    pair = Pair(lambda: Layers(*sizes), cap=ALL, lr=1e-4, momentum=0.9)
    pair.train(10)
    assert all(p.data_ptr() % 64 == 0 for p in pair.ours.parameters())


@pytest.mark.parametrize(("options", "rule"), [(MOMENTUM, SGDRule), (ADAMW, AdamRule)])
@pytest.mark.parametrize("widths", [(16, 32, 48, 16, 32), (15, 33, 48, 17, 2)], ids=["even", "odd"])
def test_one_call_per_bucket(options, rule, widths):
    """Of one part, where sizes are multiples of 16 elements; else of the chunks between gaps."""
    pair = Pair(lambda: Layers(*((1, k) for k in widths), (1, 30_000)), **options)
    pair.train(2)
    with patch.object(rule, "update_flat", autospec=True, side_effect=rule.update_flat) as update:
        pair.train(1)
    sizes = [[parameter.numel() for parameter in call.args[1][0]] for call in update.mock_calls]
    buckets = pair.reducer.core.flat_buckets
    assert 1 < len(buckets) < len(list(pair.ours.parameters()))
    assert len(sizes) == len(buckets)
    if widths[0] == 16:
        assert sizes == [[bucket.flat.numel()] for bucket in buckets]
    for bucket in buckets:
        assert len({p.untyped_storage().data_ptr() for p in bucket.parameters()}) == 1


@either_way
def test_parameters_added_later(flat):
    pair = Pair(groups=lambda model: list(model.parameters())[:4], **MOMENTUM, flat=flat)
    pair.train(2)
    for model, optimizer in pair.both:
        one, *added = list(model.parameters())[4:]
        optimizer.param_groups[0]["params"].append(one)  # by hand
        optimizer.add_param_group({"params": added, "lr": 0.2})
    pair.train(2)


def test_two_optimizers_for_one_reducer_one_with_a_parameter_of_no_bucket():
    models = model, reference = Net(), Net()
    reducer = Reducer(model, bucket_cap_mb=SEVERAL)
    others = [nn.Parameter(torch.ones(5)) for _ in models]
    (own, other), (extra, theirs_too) = ([*m.parameters()] for m in models), others
    halves = [SGD([*own[:3], extra], 0.1, 0.9, reducer=reducer), SGD(own[3:], 0.2, reducer=reducer)]
    theirs = [torch.optim.SGD([*other[:3], theirs_too], 0.1, 0.9), torch.optim.SGD(other[3:], 0.2)]
    for x in inputs(4):
        for each, beside in zip(models, others, strict=True):
            each.zero_grad()
            each(x).backward()
            beside.grad = beside.detach() * x
        for optimizer in (*halves, *theirs):
            optimizer.step()
    assert_same(model, reference)
    assert torch.equal(extra, theirs_too)
    assert not torch.equal(extra, torch.ones(5))


def a_step_that_is_skipped(pair):
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) for _ in "12"]
    for step, x in enumerate(inputs(6)):
        before = pair.ours.p5.detach().clone()
        for (model, optimizer), scaler in zip(pair.both, scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(model(float("inf") if step == 3 else x)).backward()
            scaler.step(optimizer)
            scaler.update()
        pair.check()
        assert torch.equal(before, pair.ours.p5) == (step == 3)
    assert scalers[0].state_dict() == scalers[1].state_dict()


def replaced_data_and_gradients(pair):
    """Data is stepped where it lies; a closure computes gradients, which are scaled then."""
    pair.train(2)
    elsewhere = [model.p5.detach().clone() for model, _ in pair.both]
    for (model, _), data in zip(pair.both, elsewhere, strict=True):
        model.p5.data = data
    pair.train(2)
    assert pair.ours.p5.data_ptr() == elsewhere[0].data_ptr()
    losses = []
    for model, optimizer in pair.both:

        def closure(model: nn.Module = model) -> torch.Tensor:
            model.zero_grad()
            loss = model(0.5)
            loss.backward()
            model.p5.grad = model.p5.grad * 2
            return loss

        losses.append(optimizer.step(closure))
    assert losses[0] == losses[1]
    pair.check()


def a_copy(pair):
    pair.train(2)
    before = copy.deepcopy(pair.ours)
    state = copy.deepcopy(pair.our_optimizer.state_dict())["state"]
    model, optimizer = copy.deepcopy((pair.ours, pair.our_optimizer))
    for x in inputs(2):
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"a copy of a ddp\.\w+ has no Reducer"):
        optimizer.backward_and_step(model(0.5))
    assert_same(pair.ours, before)
    held = copy.deepcopy(pair.our_optimizer.state_dict()["state"])
    torch.testing.assert_close(state, held, rtol=0, atol=0)
    pair.train(2)
    assert_same(pair.ours, model)


@each_kind
@either_way
@pytest.mark.parametrize("program", [a_step_that_is_skipped, replaced_data_and_gradients, a_copy])
def test_bits_are_those_of_torch_with(program, options, flat):
    program(Pair(**options, flat=flat))


@each_kind
@either_way
def test_parameters_in_shared_memory_stay_shared(options, flat):
    def make() -> nn.Module:
        model = Net()
        model.p6 = nn.Parameter(model.p5.data[:17])
        return model

    pair = Pair(make, **options, flat=flat)
    pair.train()
    assert pair.ours.p6.data_ptr() == pair.ours.p5.data_ptr()


@either_way
def test_backward_and_step_counts_as_a_step_after_accumulation(flat):
    pair = Pair(**MOMENTUM, flat=flat)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for _, o in pair.both]
    told: list[str] = []
    pair.our_optimizer.register_step_pre_hook(lambda *_: told.append("pre"))
    pair.our_optimizer.register_step_post_hook(lambda *_: told.append("post"))
    for _ in range(3):
        train_in_one(pair, 1, accumulates=True)
        for scheduler in schedulers:
            scheduler.step()  # warns, here an error, unless it knows of a step
    assert told == ["pre", "post"] * 3


@either_way
def test_backward_and_step_that_averages_nothing_steps_nothing(flat):
    pair = Pair(**MOMENTUM, flat=flat)
    train_in_one(pair, 2)
    before = copy.deepcopy(pair.ours)
    told = r"nothing was averaged.*no_sync\(\)"
    with pair.reducer.no_sync(), pytest.raises(RuntimeError, match=told):
        pair.our_optimizer.backward_and_step(pair.ours(1.0))
    with pytest.raises(RuntimeError, match="nothing was averaged"):
        pair.our_optimizer.backward_and_step(torch.ones((), requires_grad=True) * 2)
    pair.ours.order = (0, 1, 2, 3, 4)
    with pytest.raises(RuntimeError, match=r"no gradient .* for: (p5, p6|p6, p5)"):
        pair.our_optimizer.backward_and_step(pair.ours(1.0))
    assert_same(pair.ours, before)


@on("gloo-2")
def test_buckets_are_stepped_while_others_are_under_way(world):
    model = Layers((2, 3), (3, 4), (4, 1))
    reducer = Reducer(model, bucket_cap_mb=0, gradient_as_bucket_view=True)
    optimizer = SGD(model.parameters(), 0.1, 0.9, reducer=reducer)
    in_flight: list[int] = []
    original = FlatParams.update

    def record(*arguments: Any) -> None:
        in_flight.append(sum(b.state is not BucketState.FILLING for b in reducer.core.flat_buckets))
        original(*arguments)

    with patch.object(FlatParams, "update", record):
        for step in range(2):
            in_flight.clear()
            optimizer.zero_grad()
            optimizer.backward_and_step(model(0.5 + step))
    assert len(reducer.buckets) == 6
    assert list(dict.fromkeys(in_flight)) == list(reversed(range(len(reducer.buckets))))


@on("gloo-2")
def test_a_pass_that_raises_steps_nothing(world):
    """A layer gets two gradients in one pass, the second while its bucket is in flight."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    reducer = Reducer(model, bucket_cap_mb=0, gradient_as_bucket_view=True)
    optimizer = SGD(model.parameters(), lr=0.1, reducer=reducer)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    x = model[0](torch.ones(1, 2))
    for _ in range(2):
        x = checkpoint(model[1], x, use_reentrant=True)
    with pytest.raises(RuntimeError, match="got a second gradient"):
        optimizer.backward_and_step(x.sum())
    assert all(map(torch.equal, model.parameters(), before))


def test_wrong_settings_are_refused():
    model = Net()
    reducer = Reducer(model)
    for options in ({"lr": -1.0}, {"momentum": -1.0}, {"nesterov": True}):
        with pytest.raises(ValueError, match=r"Invalid|Nesterov momentum requires"):
            SGD(model.parameters(), reducer=reducer, **options)
    with pytest.raises(TypeError, match="AdamW takes no fused: it has one kernel"):
        AdamW(model.parameters(), reducer=reducer, fused=True)
    with pytest.raises(ValueError, match="none of params is one of the reducer's"):
        SGD(Net().parameters(), reducer=reducer)


def test_adam_refuses_complex_parameters_at_once_and_later():
    real, complex_ = nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.complex64)
    for shard in ("none", "world"):
        with pytest.raises(ValueError, match=r"Adam takes no complex parameters, got one of "):
            Adam(complex_.parameters(), reducer=Reducer(complex_), shard=shard)
    optimizer = Adam(real.parameters(), reducer=Reducer(real))
    with pytest.raises(ValueError, match="Adam takes no complex parameters"):
        optimizer.add_param_group({"params": complex_.parameters()})
    assert len(optimizer.param_groups) == 1  # no group was added


# State that does not fit, and gradients of another dtype ---------------------------------------


def small(kind, shard="none", **settings):
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, 0.5)
    ddp.broadcast_parameters(model)
    reducer = ddp.Reducer(model)
    options = {"lr": 0.125, "reducer": reducer, "shard": shard, **settings}
    return model, getattr(ddp, kind)(model.parameters(), **options)


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("shard", ["none", "node", "world"])
@on("gloo-2")
def test_state_that_does_not_fit_is_refused(world, shard):
    model, optimizer = small("AdamW", shard)
    step(model, optimizer)
    whole = optimizer.state_dict()
    theirs = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    theirs.state[model.weight]["momentum_buffer"] = torch.ones(2, 3)
    text = "lacks betas, eps: AdamW loads a state_dict\\(\\) of ddp.AdamW or torch.optim.AdamW"
    with pytest.raises(ValueError, match=text):
        optimizer.load_state_dict(theirs.state_dict())
    for key, value, text in (
        ("step", None, r"of shape \(2, 3\) has exp_avg, exp_avg_sq and lacks step: load"),
        ("exp_avg", torch.ones(3, 2), r"exp_avg .* of shape \(2, 3\) has shape \(3, 2\): load"),
        ("step", torch.ones(2, 3), r"step .* of shape \(2, 3\) has shape \(2, 3\): load the state"),
    ):
        broken = copy.deepcopy(whole)
        broken["state"][0][key] = value
        if value is None:
            del broken["state"][0][key]
        with pytest.raises(ValueError, match=text):
            optimizer.load_state_dict(broken)
    saved = optimizer.state_dict()  # unchanged
    assert saved["state"][0]["exp_avg"].equal(whole["state"][0]["exp_avg"])
    assert saved["param_groups"] == whole["param_groups"]
    step(model, optimizer)
    # Held, and not loaded.
    model, optimizer = small("AdamW", shard)
    optimizer.state[model.weight]["momentum_buffer"] = torch.ones(2, 3)
    with pytest.raises(ValueError, match="has momentum_buffer and lacks step, exp_avg, exp_avg_sq"):
        step(model, optimizer)
    model, optimizer = small("SGD", shard, momentum=0.5)
    optimizer.state[model.weight]["momentum_buffer"] = torch.ones(3, 2)
    with pytest.raises(ValueError, match=r"momentum_buffer .* has shape \(3, 2\)"):
        step(model, optimizer)


@on("gloo-2")
def test_older_checkpoints_load(world):
    """Without settings that torch's classes add, and with a step that is a number."""
    model, optimizer = small("Adam")
    step(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    for name in ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused"):
        saved["param_groups"][0].pop(name, None)
    saved["state"][0]["step"] = 1
    optimizer.load_state_dict(saved)
    step(model, optimizer)
    assert optimizer.state[model.weight]["step"] == 2


def with_dtype(kind, shard="none"):
    """A model of bfloat16 whose gradients are float32."""
    torch.manual_seed(0)
    model = nn.Linear(30, 30, dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    if kind is torch.optim.SGD:
        return model, kind(model.parameters(), lr=0.125, momentum=0.5)
    options = {"momentum": 0.5} if kind is ddp.SGD else {}
    reducer = ddp.Reducer(model)
    return model, kind(model.parameters(), lr=0.125, reducer=reducer, shard=shard, **options)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch lacks grad_dtype")
@on("gloo-2")
def test_gradients_of_another_dtype(world):
    stepped = []
    for kind in (torch.optim.SGD, ddp.SGD):
        model, optimizer = with_dtype(kind)
        for number in range(3):
            for parameter in model.parameters():
                values = torch.arange(parameter.numel()).view(parameter.shape)
                parameter.grad = values * 1.001 + number  # bits that bfloat16 lacks
            optimizer.step()
        momentum = optimizer.state[model.weight]["momentum_buffer"]
        assert momentum.dtype == torch.float32
        stepped.append((model.weight, model.bias, momentum))
    assert all(map(torch.equal, *stepped))
    model, optimizer = with_dtype(ddp.AdamW)
    model.weight.grad = torch.ones(30, 30)
    text = "takes gradients of the dtype of their parameter, got torch.float32 for torch.bfloat16"
    with pytest.raises(RuntimeError, match=text):
        optimizer.step()
    for shard in ("node", "world"):
        with pytest.raises(ValueError, match=r"with gradients of torch\.float32: leave grad_dtype"):
            with_dtype(ddp.SGD, shard)
