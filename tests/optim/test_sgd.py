"""ddp.SGD beside torch.optim.SGD: the same bits of parameters and momentum, in every program.

Most tests need no second rank and run in a group of one, in this process.
"""

import copy
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from ddp_from_scratch import SGD, Reducer, broadcast_parameters
from ddp_from_scratch.buckets.gradient_bucket import BucketState
from ddp_from_scratch.optim import flat_params, sgd

SEVERAL = 5e-4  # MiB: a few buckets
ALL = float("inf")


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


class Net(nn.Module):
    """Odd sizes, a channels-last weight, a number, nothing, and one of more than a chunk.

    The gradients become ready in another order than that of registration.
    """

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
    """The library's optimizer and torch's, on equal models with equal gradients."""

    def __init__(
        self,
        make: Callable[[], nn.Module] = Net,
        groups: Callable[[nn.Module], Any] = nn.Module.parameters,
        cap: float = SEVERAL,
        **options: Any,
    ):
        self.ours, self.theirs = make(), make()
        self.reducer = Reducer(self.ours, bucket_cap_mb=cap, gradient_as_bucket_view=True)
        # A Reducer too, so that packing and averaging are the same.
        Reducer(self.theirs, bucket_cap_mb=cap, gradient_as_bucket_view=True)
        options.setdefault("lr", 0.05)
        self.our_sgd = SGD(groups(self.ours), reducer=self.reducer, **options)
        self.their_sgd = torch.optim.SGD(groups(self.theirs), foreach=False, **options)

    @property
    def both(self) -> tuple[tuple[nn.Module, torch.optim.SGD], ...]:
        return (self.ours, self.our_sgd), (self.theirs, self.their_sgd)

    def backward(self, x: float, set_to_none: bool = True) -> None:
        for model, optimizer in self.both:
            optimizer.zero_grad(set_to_none=set_to_none)
            model(x).backward()

    def step(self, x: float, set_to_none: bool = True) -> None:
        self.backward(x, set_to_none)
        for _, optimizer in self.both:
            optimizer.step()

    def check(self) -> None:
        assert_same(self.ours, self.theirs)
        for (name, p), q in zip(
            self.ours.named_parameters(), self.theirs.parameters(), strict=True
        ):
            mine, other = self.our_sgd.state.get(p, {}), self.their_sgd.state.get(q, {})
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


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weight decay": {"weight_decay": 0.01},
    "momentum": {"momentum": 0.9},
    "dampening": {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
    "nesterov": {"momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
    "maximize": {"momentum": 0.8, "maximize": True, "weight_decay": 0.01},
    "tensor lr": {"lr": torch.tensor(0.03), "momentum": 0.9},
}
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
MOMENTUM = {"momentum": 0.9, "weight_decay": 0.01}


class OddHeads(nn.Module):
    """Products with single rows, whose rounding depends on where a weight lies in memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [(38, 138), (183, 139), (48, 189), (37, 61), (64, 64)]
        self.layers = nn.ModuleList(nn.Linear(*size) for size in sizes)

    def forward(self, x: float) -> torch.Tensor:
        return torch.stack(
            [
                layer(torch.linspace(0, x, layer.in_features)[None]).square().sum()
                for layer in self.layers
            ]
        ).sum()


@pytest.mark.parametrize("cap", [SEVERAL, ALL])
def test_parameters_begin_where_products_have_torchs_bits(cap):
    pair = Pair(OddHeads, cap=cap, lr=1e-4, momentum=0.9)
    pair.train(10)
    assert all(p.data_ptr() % 64 == 0 for p in pair.ours.parameters())


# Arithmetic -------------------------------------------------------------------------------------


def test_one_step_by_hand():
    """lr 0.5, decay 0.5, momentum 0.5: d = g + p / 2, m = m / 2 + d, p = p - m / 2."""
    p, g, m = torch.tensor([4.0]), torch.tensor([2.0]), torch.zeros(1)
    group = {"lr": 0.5, "momentum": 0.5, "dampening": 0.0, "weight_decay": 0.5}
    group |= {"nesterov": False, "maximize": False}
    sgd.update(p, g, m, True, group)
    assert (p.item(), g.item(), m.item()) == (2.0, 2.0, 4.0)
    sgd.update(p, g, m, False, group)
    assert (p.item(), g.item(), m.item()) == (-0.5, 2.0, 5.0)


def test_parameters_that_share_memory_are_found():
    whole = torch.zeros(10)
    inside, apart, empty = whole[2:4], torch.zeros(3), torch.zeros(0)
    halves = torch.zeros(4).split(2)
    assert flat_params.overlapping([apart, inside, whole, empty, *halves]) == {
        id(whole),
        id(inside),
    }


# As torch ---------------------------------------------------------------------------------------


@each_option
@pytest.mark.parametrize("cap", [0, SEVERAL, ALL], ids=["each its own", "several", "all in one"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_bits_are_those_of_torch(options, cap, set_to_none):
    Pair(cap=cap, **options).train(set_to_none=set_to_none)


@each_option
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64], ids=str
)
def test_bits_are_those_of_torch_in_every_dtype(options, dtype):
    Pair(lambda: Net(dtype), **options).train()


def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of elements of each call of the arithmetic."""
    sizes: list[int] = []
    original = sgd.update

    def record(parameter: torch.Tensor, *arguments: Any) -> None:
        sizes.append(parameter.numel())
        original(parameter, *arguments)

    monkeypatch.setattr(sgd, "update", record)
    return sizes


def even() -> nn.Module:
    """Sizes that are multiples of 16 elements, so that neighbours are stepped together."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(1, 16 * k) for k in (1, 2, 3, 1, 2)), nn.Linear(1, 30_000))


class Even(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = even()

    def forward(self, x: float) -> torch.Tensor:
        return torch.stack([layer(torch.tensor([x])).square().sum() for layer in self.layers]).sum()


def test_one_call_per_bucket(monkeypatch):
    monkeypatch.setattr(sgd, "_CHUNK", 10**9)
    pair = Pair(Even, **MOMENTUM)
    pair.train(2)
    sizes = calls(monkeypatch)
    pair.train(1)
    buckets = pair.reducer.flat_buckets
    assert 1 < len(buckets) < len(list(pair.ours.parameters()))
    assert sizes == [bucket.layout.numel for bucket in buckets]
    for bucket in buckets:
        assert len({p.untyped_storage().data_ptr() for p in bucket.parameters()}) == 1


def test_chunks_stay_in_the_cache(monkeypatch):
    monkeypatch.setattr(sgd, "_CHUNK", 2**14)
    pair = Pair(Even, cap=ALL)
    pair.train(1)
    sizes = calls(monkeypatch)
    pair.train(1)
    chunk = 2**14 * torch.get_num_threads()
    whole = sum(p.numel() for p in pair.ours.parameters())
    assert sizes == [chunk] * (whole // chunk) + [whole % chunk]


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    own = dict(model.named_parameters())
    first = [own.pop("p1"), own.pop("p6")]
    return [{"params": own.values()}, {"params": first, "lr": 0.3, "momentum": 0.0}]


def alternating(model: nn.Module) -> list[dict[str, Any]]:
    own = list(model.parameters())
    return [{"params": own[::2]}, {"params": own[1::2], "weight_decay": 0.2, "nesterov": True}]


@pytest.mark.parametrize("groups", [two_groups, alternating])
def test_groups(groups):
    Pair(groups=groups, **MOMENTUM).train()


def test_named_parameters():
    Pair(groups=nn.Module.named_parameters, **MOMENTUM).train()


def test_group_added_later():
    def half(model: nn.Module) -> list[torch.Tensor]:
        return list(model.parameters())[:4]

    pair = Pair(groups=half, **MOMENTUM)
    pair.train(2)
    for model, optimizer in pair.both:
        optimizer.add_param_group({"params": list(model.parameters())[4:], "lr": 0.2})
    pair.train(2)


def test_group_changed_by_hand():
    pair = Pair(groups=lambda model: list(model.parameters())[:4], **MOMENTUM)
    pair.train(2)
    for model, optimizer in pair.both:
        optimizer.param_groups[0]["params"] += list(model.parameters())[4:]
    pair.train(2)


def test_parameter_of_no_bucket():
    def with_another(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model.__dict__["other"] = nn.Parameter(torch.randn(5))  # no part of the module
        return [*model.parameters(), model.__dict__["other"]]

    pair = Pair(groups=with_another, **MOMENTUM)
    for x in inputs(3):
        pair.backward(x)
        for model, optimizer in pair.both:
            other = model.__dict__["other"]
            before = other.detach().clone()
            (other * other).sum().backward()
            optimizer.step()
            assert not torch.equal(other, before)
        pair.check()
    assert torch.equal(*(model.__dict__["other"] for model, _ in pair.both))


def test_two_optimizers_for_one_reducer():
    model, reference = Net(), Net()
    reducer = Reducer(model, bucket_cap_mb=SEVERAL, gradient_as_bucket_view=True)
    own = list(model.parameters())
    halves = [SGD(own[:3], 0.1, 0.9, reducer=reducer), SGD(own[3:], 0.2, reducer=reducer)]
    other = list(reference.parameters())
    theirs = [torch.optim.SGD(other[:3], 0.1, 0.9), torch.optim.SGD(other[3:], 0.2)]
    for x in inputs(4):
        model.zero_grad()
        reference.zero_grad()
        model(x).backward()
        reference(x).backward()
        for optimizer in (*halves, *theirs):
            optimizer.step()
    assert_same(model, reference)


# What goes with it ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),  # momentum, too
    ],
)
def test_schedulers(make):
    pair = Pair(**MOMENTUM)
    schedulers = [make(optimizer) for _, optimizer in pair.both]
    for x in inputs(6):
        pair.step(x)
        pair.check()
        for scheduler in schedulers:
            scheduler.step()
    assert pair.our_sgd.param_groups[0]["lr"] != 0.05


def test_grad_scaler_skips_the_same_step():
    pair = Pair(**MOMENTUM)
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


def test_clipping():
    pair = Pair(**MOMENTUM)
    for x in inputs(4):
        pair.backward(x)
        norms = [clip_grad_norm_(model.parameters(), 0.1) for model, _ in pair.both]
        assert norms[0] == norms[1] > 0.1
        for _, optimizer in pair.both:
            optimizer.step()
        pair.check()


def test_closure():
    pair = Pair(**MOMENTUM)
    for x in inputs(3):
        losses = []
        for model, optimizer in pair.both:

            def closure(model: nn.Module = model, x: float = x) -> torch.Tensor:
                model.zero_grad()
                loss = model(x)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure))
        assert losses[0] == losses[1]
        pair.check()


def test_model_loaded_in_the_course():
    pair = Pair(**MOMENTUM)
    pair.train(2)
    saved = copy.deepcopy(pair.ours.state_dict())
    pair.train(2)
    for model, _ in pair.both:
        model.load_state_dict(saved)
    pair.train(2)


def test_parameter_without_a_gradient_stays():
    pair = Pair(**MOMENTUM)
    for step, x in enumerate(inputs(5)):
        pair.backward(x)
        if step != 2:  # the first steps, too, so that only some members have momentum
            for model, _ in pair.both:
                model.p1.grad = None
        before = pair.ours.p1.detach().clone()
        for _, optimizer in pair.both:
            optimizer.step()
        pair.check()
        assert torch.equal(before, pair.ours.p1) == (step != 2)


def test_data_that_was_replaced_is_stepped_where_it_lies():
    pair = Pair(**MOMENTUM)
    pair.train(2)
    before = [model.p5.data for model, _ in pair.both]
    elsewhere = [model.p5.detach().clone() for model, _ in pair.both]
    for (model, _), data in zip(pair.both, elsewhere, strict=True):
        model.p5.data = data
    pair.train(2)
    assert pair.ours.p5.data_ptr() == elsewhere[0].data_ptr()
    for (model, _), data in zip(pair.both, before, strict=True):
        model.p5.data = data
    pair.train(2)


def test_gradient_that_was_replaced():
    pair = Pair(**MOMENTUM)
    for x in inputs(3):
        pair.backward(x)
        for model, optimizer in pair.both:
            model.p5.grad = model.p5.grad * 2
            optimizer.step()
        pair.check()


def test_parameters_in_shared_memory_stay_shared():
    def make() -> nn.Module:
        model = Net()
        model.p6 = nn.Parameter(model.p5.data[:17])
        return model

    pair = Pair(make, **MOMENTUM)
    pair.train()
    assert pair.ours.p6.data_ptr() == pair.ours.p5.data_ptr()


def test_autograd_notices_that_parameters_changed():
    for optimizer_of in (
        lambda m, r: SGD(m.parameters(), 0.1, reducer=r),
        lambda m, _: torch.optim.SGD(m.parameters(), 0.1),
    ):
        model = Net()
        reducer = Reducer(model, gradient_as_bucket_view=True)
        optimizer = optimizer_of(model, reducer)
        loss = model(0.5)
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        reducer.remove()


def test_a_reducer_taken_off():
    pair = Pair(**MOMENTUM)
    pair.train(2)
    pair.reducer.remove()
    pair.train(2)


# State ------------------------------------------------------------------------------------------


def saved_and_loaded(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@each_option
@pytest.mark.parametrize("how", [copy.deepcopy, saved_and_loaded])
def test_state_goes_both_ways(options, how):
    pair = Pair(**options)
    pair.train(3)
    ours, theirs = pair.our_sgd.state_dict(), pair.their_sgd.state_dict()
    assert ours["state"].keys() == theirs["state"].keys()
    assert [group.keys() for group in ours["param_groups"]] == [
        group.keys() for group in theirs["param_groups"]
    ]
    other = Pair(**{**options, "lr": 7.0})  # comes from the state
    for (model, optimizer), state in zip(
        other.both, (copy.deepcopy(theirs), how(ours)), strict=True
    ):
        model.load_state_dict(pair.ours.state_dict())
        optimizer.load_state_dict(state)
    other.check()
    other.train(3)
    pair.train(3)  # the one that was saved goes on from where it was
    assert_same(pair.ours, other.ours)


def test_copied_state_stays():
    pair = Pair(**MOMENTUM)
    pair.train(2)
    state = copy.deepcopy(pair.our_sgd.state_dict())["state"]
    before = {index: entry["momentum_buffer"].clone() for index, entry in state.items()}
    pair.train(2)
    for index, entry in state.items():
        assert torch.equal(entry["momentum_buffer"], before[index])


def test_a_file_is_no_larger_for_it():
    pair = Pair(**MOMENTUM)
    pair.train(2)
    sizes = []
    for model, optimizer in pair.both:
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        sizes.append(file.tell())
    assert sizes[0] <= sizes[1]


def test_a_copy_steps_its_own_parameters():
    pair = Pair(**MOMENTUM)
    pair.train(2)
    before = copy.deepcopy(pair.ours)
    model, optimizer = copy.deepcopy((pair.ours, pair.our_sgd))
    for x in inputs(2):
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"a copy of a ddp\.SGD has no Reducer"):
        optimizer.backward_and_step(model(0.5))
    assert_same(pair.ours, before)
    pair.train(2)
    assert_same(pair.ours, model)


def test_the_hand_over_to_a_second_optimizer():
    pair = Pair(**MOMENTUM)
    pair.train(2)
    options = {"lr": 0.01, "momentum": 0.5}
    pair.our_sgd = SGD(pair.ours.parameters(), reducer=pair.reducer, **options)
    pair.their_sgd = torch.optim.SGD(pair.theirs.parameters(), foreach=False, **options)
    pair.train(2)


# Refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"lr": -1.0}, {"momentum": -1.0}, {"weight_decay": -1.0}, {"nesterov": True}],
    ids=str,
)
def test_values_out_of_range_are_refused_as_by_torch(options):
    model = Net()
    reducer = Reducer(model, gradient_as_bucket_view=True)
    with pytest.raises(ValueError) as theirs:  # noqa: PT011  # compared below
        torch.optim.SGD(model.parameters(), **options)
    with pytest.raises(ValueError) as ours:  # noqa: PT011
        SGD(model.parameters(), reducer=reducer, **options)
    assert str(ours.value) == str(theirs.value)


def test_a_reducer_that_does_not_fit_is_refused():
    model = Net()
    with pytest.raises(ValueError, match="with gradient_as_bucket_view=True"):
        SGD(model.parameters(), reducer=Reducer(model))
    with pytest.raises(ValueError, match="none of params is one of the reducer's"):
        SGD(Net().parameters(), reducer=Reducer(model, gradient_as_bucket_view=True))


# Backward and step in one -----------------------------------------------------------------------


def train_in_one(pair: Pair, count: int) -> None:
    for x in inputs(count):
        pair.our_sgd.zero_grad()
        pair.our_sgd.backward_and_step(pair.ours(x))
        pair.their_sgd.zero_grad()
        pair.theirs(x).backward()
        pair.their_sgd.step()
        pair.check()


@each_option
def test_backward_and_step_is_both(options):
    train_in_one(Pair(**options), 4)


def test_backward_and_step_counts_as_a_step():
    pair = Pair(**MOMENTUM)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for _, o in pair.both]
    told: list[str] = []
    pair.our_sgd.register_step_pre_hook(lambda *_: told.append("pre"))
    pair.our_sgd.register_step_post_hook(lambda *_: told.append("post"))
    for _ in range(3):
        train_in_one(pair, 1)
        for scheduler in schedulers:
            scheduler.step()  # warns, here an error, unless it knows of a step
    assert told == ["pre", "post"] * 3


def test_backward_and_step_after_accumulation():
    pair = Pair(**MOMENTUM)
    for x in inputs(3):
        for _, optimizer in pair.both:
            optimizer.zero_grad()
        with pair.reducer.no_sync():
            pair.ours(x).backward()
        pair.our_sgd.backward_and_step(pair.ours(2 * x))
        pair.theirs(x).backward()
        pair.theirs(2 * x).backward()
        pair.their_sgd.step()
        pair.check()


def test_backward_and_step_that_averages_nothing_steps_nothing():
    pair = Pair(**MOMENTUM)
    train_in_one(pair, 2)
    before = copy.deepcopy(pair.ours)
    with (
        pair.reducer.no_sync(),
        pytest.raises(RuntimeError, match=r"nothing was averaged.*no_sync\(\)"),
    ):
        pair.our_sgd.backward_and_step(pair.ours(1.0))
    with pytest.raises(RuntimeError, match="nothing was averaged"):
        pair.our_sgd.backward_and_step(torch.ones((), requires_grad=True) * 2)
    pair.ours.order = (0, 1, 2, 3, 4)
    with pytest.raises(RuntimeError, match=r"no gradient .* for: (p5, p6|p6, p5)"):
        pair.our_sgd.backward_and_step(pair.ours(1.0))
    assert_same(pair.ours, before)


# On ranks ---------------------------------------------------------------------------------------


@pytest.fixture(params=["gloo-2", "gloo-3", "mpi-2", "mpi-3"])
def crew(ranks, request):
    backend, world_size = request.param.split("-")
    return ranks(backend, int(world_size))


def mlp() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 5)
    )


def batch(step: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randn(count, 6, generator=generator),
        torch.randint(5, (count,), generator=generator),
    )


def beside_torch(world, in_one):
    n = world.world_size
    ours = mlp()
    broadcast_parameters(ours)
    theirs = DistributedDataParallel(copy.deepcopy(ours), bucket_cap_mb=SEVERAL)
    whole = copy.deepcopy(ours).double()
    reducer = Reducer(ours, bucket_cap_mb=SEVERAL, gradient_as_bucket_view=True)
    options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3, "nesterov": True}
    our_sgd = SGD(ours.parameters(), reducer=reducer, **options)
    their_sgd = torch.optim.SGD(theirs.parameters(), foreach=False, **options)
    whole_sgd = torch.optim.SGD(whole.parameters(), **options)
    assert len(reducer.buckets) >= 3
    for step in range(8):
        x, y = batch(step, 4 * n)
        mine, target = x.chunk(n)[world.rank], y.chunk(n)[world.rank]
        for optimizer in (our_sgd, their_sgd, whole_sgd):
            optimizer.zero_grad()
        cross_entropy(theirs(mine), target).backward()
        loss = cross_entropy(ours(mine), target)
        if in_one:
            our_sgd.backward_and_step(loss)
        else:
            loss.backward()
            our_sgd.step()
        if step == 0:
            # torch's first step has one bucket, ours several: with three ranks, another order of
            # sums. From here on they are the same.
            for p, q in zip(theirs.parameters(), ours.parameters(), strict=True):
                p.grad.copy_(q.grad)
        their_sgd.step()
        cross_entropy(whole(x.double()), y).backward()
        whole_sgd.step()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(p, q), f"step {step}"
    for p, q in zip(ours.parameters(), whole.parameters(), strict=True):
        assert (p - q).abs().max() < 1e-5


@pytest.mark.parametrize("in_one", [False, True], ids=["step", "backward and step"])
def test_as_torch_bit_for_bit_on_ranks(crew, in_one):
    crew(beside_torch, in_one)


def steps_in_flight(world):
    """How many all-reduces are under way at the step of each bucket."""
    model = mlp()
    reducer = Reducer(model, bucket_cap_mb=SEVERAL, gradient_as_bucket_view=True)
    optimizer = SGD(model.parameters(), 0.1, 0.9, reducer=reducer)
    in_flight: list[int] = []
    original = sgd.update

    def record(*arguments: Any) -> None:
        in_flight.append(
            sum(bucket.state is not BucketState.FILLING for bucket in reducer.flat_buckets)
        )
        original(*arguments)

    sgd.update = record
    try:
        for step in range(2):
            in_flight.clear()
            x, y = batch(step, 4)
            optimizer.zero_grad()
            optimizer.backward_and_step(cross_entropy(model(x), y))
    finally:
        sgd.update = original
    return in_flight, len(reducer.buckets)


def test_a_bucket_is_stepped_while_later_ones_are_under_way(crew):
    for in_flight, buckets in crew(steps_in_flight):
        assert buckets >= 3
        assert list(dict.fromkeys(in_flight)) == list(reversed(range(buckets)))
