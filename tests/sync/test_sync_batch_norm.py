"""Synchronised batch norm beside torch's batch norm of the whole batch in one process."""

import copy
import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from ddp_from_scratch import (
    DistributedDataParallel,
    Reducer,
    SyncBatchNorm,
    broadcast_parameters,
    convert_sync_batchnorm,
    join,
)
from ddp_from_scratch.checks.module_snapshot import ModuleSnapshot
from ddp_from_scratch.sync import sync_batch_norm

CHANNELS = 3


@pytest.fixture(params=["gloo-2", "gloo-3", "mpi-2", "mpi-3"])
def crew(ranks, request):
    backend, world_size = request.param.split("-")
    return ranks(backend, int(world_size))


# Arithmetic -------------------------------------------------------------------------------------


def test_moments_by_hand():
    """Channel 0 holds 1, 3 on one rank and 8 on the other; channel 1 is 5 everywhere."""
    one = sync_batch_norm._pack_moments(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
    other = sync_batch_norm._pack_moments(torch.tensor([[8.0, 5.0]]))
    none = sync_batch_norm._pack_moments(torch.zeros(0, 2))
    assert one.tolist() == [2, 5, 2, 0, 2, 0]
    assert other.tolist() == [8, 5, 0, 0, 1, 0]
    assert none.tolist() == [0] * 6
    moments = sync_batch_norm._merge_moments(torch.stack([one, none, other]), 2)
    assert moments.count.tolist() == [3]
    assert moments.mean.tolist() == [4, 5]
    assert moments.variance.tolist() == [26 / 3, 0]


def test_moments_of_nothing_are_finite():
    none = sync_batch_norm._pack_moments(torch.zeros(0, 2, 4, 4))
    moments = sync_batch_norm._merge_moments(torch.stack([none, none]), 2)
    assert moments.count.tolist() == [1]
    assert moments.mean.tolist() == moments.variance.tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_are_of_full_precision(dtype):
    """Far from zero and close together, where the difference of squares has no digit left."""
    torch.manual_seed(0)
    x = (1000 + 8 * torch.randn(64, 2, 40)).to(dtype)
    packed = [sync_batch_norm._pack_moments(part) for part in x.split([10, 54])]
    moments = sync_batch_norm._merge_moments(torch.stack(packed), 2)
    variance, mean = torch.var_mean(x.double(), (0, 2), correction=0)
    torch.testing.assert_close(moments.mean, mean, rtol=1e-6, atol=0)
    torch.testing.assert_close(moments.variance, variance, rtol=1e-5, atol=0)


# Conversion -------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.BatchNorm1d(3)
        self.inner = nn.Sequential(nn.Linear(3, 3), self.shared, nn.BatchNorm2d(3, affine=False))
        self.other = nn.Sequential(nn.BatchNorm3d(3, momentum=None), nn.SyncBatchNorm(3))
        self.untouched = nn.ModuleList([nn.InstanceNorm1d(3, affine=True), nn.LayerNorm(3)])


def test_every_batch_norm_is_converted_in_place():
    model = Model()
    model.other.eval()
    parameters, state = list(model.parameters()), model.state_dict()
    modes = [module.training for module in model.modules()]
    assert convert_sync_batchnorm(model) is model
    found = [name for name, layer in model.named_modules() if isinstance(layer, SyncBatchNorm)]
    assert found == ["shared", "inner.2", "other.0", "other.1"]
    assert model.inner[1] is model.shared
    assert model.other[0].momentum is None
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    assert [module.training for module in model.modules()] == modes
    assert model.state_dict().keys() == state.keys()
    assert model.state_dict()._metadata == state._metadata
    assert [type(layer) for layer in model.untouched] == [nn.InstanceNorm1d, nn.LayerNorm]


def test_a_batch_norm_by_itself_is_replaced():
    layer = nn.BatchNorm2d(4, eps=0.5)
    told: list[int] = []
    layer.register_forward_hook(lambda *_: told.append(1))
    converted = convert_sync_batchnorm(layer)
    assert isinstance(converted, SyncBatchNorm)
    assert (converted.num_features, converted.eps) == (4, 0.5)
    converted(torch.randn(2, 4, 3, 3))
    assert told == [1]


@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"track_running_stats": False}], ids=str
)
def test_state_is_that_of_torch(options):
    ours, theirs = SyncBatchNorm(3, **options), nn.BatchNorm2d(3, **options)
    theirs(torch.randn(4, 3, 2, 2))
    file = io.BytesIO()
    torch.save(theirs.state_dict(), file)
    file.seek(0)
    ours.load_state_dict(torch.load(file, weights_only=True))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    x = torch.randn(4, 3, 2, 2)
    assert torch.equal(ours.eval()(x), theirs.eval()(x))
    theirs.load_state_dict(ours.state_dict())


def test_old_state_without_a_count_of_batches_is_loaded():
    state = nn.BatchNorm2d(3).state_dict()
    del state["num_batches_tracked"]
    state._metadata[""]["version"] = 1
    SyncBatchNorm(3).load_state_dict(state)


def test_a_lazy_layer_is_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match="1 is lazy and has no shape yet"):
        convert_sync_batchnorm(model)
    model(torch.randn(3, 2))
    assert isinstance(convert_sync_batchnorm(model)[1], SyncBatchNorm)


def test_without_a_process_group_it_is_torchs():
    torch.manual_seed(0)
    ours, theirs = SyncBatchNorm(3), nn.BatchNorm2d(3)
    for _ in range(3):
        x = torch.randn(4, 3, 2, 2)
        assert torch.equal(ours(x), theirs(x))
    assert torch.equal(ours.running_var, theirs.running_var)
    pickle.loads(pickle.dumps(ours))


@pytest.mark.parametrize("shape", [(3,), (4, 0, 2), (1, 3), (2, 5, 2)], ids=str)
def test_errors_are_those_of_torch(shape):
    x = torch.zeros(shape)
    with pytest.raises((ValueError, RuntimeError)) as theirs:
        (nn.SyncBatchNorm if 0 in shape or len(shape) == 1 else nn.BatchNorm1d)(3)(x)
    with pytest.raises(type(theirs.value)) as ours:
        SyncBatchNorm(3)(x)
    assert str(ours.value) == str(theirs.value)


# As one process ---------------------------------------------------------------------------------


@contextmanager
def collectives() -> Iterator[list[str]]:
    """The names of the collectives that are called."""
    called: list[str] = []
    originals = {
        name: getattr(dist, name)
        for name in ("all_gather_into_tensor", "all_gather", "all_reduce", "broadcast")
    }

    def recorder(name: str) -> Any:
        def record(*arguments: Any, **options: Any) -> Any:
            called.append(name)
            return originals[name](*arguments, **options)

        return record

    for name in originals:
        setattr(dist, name, recorder(name))
    try:
        yield called
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


SHAPES: dict[str, tuple[int, ...]] = {
    "1d": (),
    "1d of sequences": (5,),
    "2d": (4, 3),
    "3d": (2, 3, 2),
}
LAYERS: dict[str, dict[str, Any]] = {
    "default": {},
    "no affine": {"affine": False},
    "no statistics": {"track_running_stats": False},
    "cumulative": {"momentum": None},
    "eps and momentum": {"eps": 0.1, "momentum": 0.4},
}
SIZES = {"equal": [4, 4, 4], "unequal": [1, 5, 2], "one empty": [3, 0, 2], "first empty": [0, 2, 1]}


def as_one_process(world, shape, options, sizes, channels_last=False):
    """Three steps, each with one collective in forward and one in backward."""
    sizes = sizes[: world.world_size]
    torch.manual_seed(0)
    theirs = nn.modules.batchnorm._BatchNorm(CHANNELS, **options, dtype=torch.float64)
    theirs._check_input_dim = lambda input: None
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    ours = SyncBatchNorm(CHANNELS, **options, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for _ in range(3):
        whole = 3 + 2 * torch.randn(sum(sizes), CHANNELS, *shape, dtype=torch.float64)
        factor = torch.randn_like(whole)
        mine = whole.split(sizes)[world.rank].clone()
        if channels_last:
            mine = mine.contiguous(memory_format=formats[mine.dim()])
        mine.requires_grad_()
        whole.requires_grad_()
        for layer in (ours, theirs):
            layer.zero_grad()

        with collectives() as called:
            y = ours(mine)
            assert called == ["all_gather_into_tensor"]
            (y.square() * factor.split(sizes)[world.rank]).sum().backward()
            assert called == ["all_gather_into_tensor", "all_reduce"]
        expected = theirs(whole)
        (expected.square() * factor).sum().backward()

        close(y, expected.split(sizes)[world.rank])
        close(mine.grad, whole.grad.split(sizes)[world.rank])
        if channels_last:
            assert y.stride() == mine.stride() == mine.grad.stride()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            dist.all_reduce(p.grad)
            close(p.grad, q.grad)
        for p, q in zip(ours.buffers(), theirs.buffers(), strict=True):
            close(p, q)
    buffers = [buffer.numpy().tobytes() for buffer in ours.buffers()]

    with collectives() as called, torch.no_grad():
        close(ours.eval()(mine), theirs.eval()(mine))
        assert called == []
    return buffers


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def assert_one(results: list[Any]) -> None:
    """Statistics have the same bits on every rank."""
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_as_one_process_for_every_shape(crew, shape, sizes):
    assert_one(crew(as_one_process, shape, {}, sizes))


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS.keys())
def test_as_one_process_for_every_layer(crew, options):
    assert_one(crew(as_one_process, (4, 3), options, SIZES["unequal"]))


@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 2)], ids=str)
def test_channels_last_is_kept(crew, shape):
    assert_one(crew(as_one_process, shape, {}, [2, 5, 3], True))


# Other dtypes and programs ----------------------------------------------------------------------


def of_16_bits(world, dtype, keep_float32):
    torch.manual_seed(0)
    whole = (50 + 2 * torch.randn(6 * world.world_size, CHANNELS, 8, 8)).to(dtype)
    mine = whole.chunk(world.world_size)[world.rank].clone().requires_grad_()
    ours = SyncBatchNorm(CHANNELS, dtype=torch.float32 if keep_float32 else dtype)
    y = ours(mine)
    y.float().square().sum().backward()
    assert y.dtype == mine.grad.dtype == dtype
    assert ours.weight.grad.dtype == ours.running_var.dtype == ours.weight.dtype
    exact = nn.BatchNorm2d(CHANNELS)(whole.float()).chunk(world.world_size)[world.rank]
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y.float(), exact, rtol=eps, atol=eps)
    variance, mean = torch.var_mean(whole.float(), (0, 2, 3))
    tolerance = 1e-5 if keep_float32 else eps
    torch.testing.assert_close(ours.running_mean.float(), 0.1 * mean, rtol=tolerance, atol=0.0)
    torch.testing.assert_close(
        ours.running_var.float(), 0.9 + 0.1 * variance, rtol=tolerance, atol=0.0
    )


@pytest.mark.parametrize("keep_float32", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_floats(crew, dtype, keep_float32):
    crew(of_16_bits, dtype, keep_float32)


def nobody_has_a_batch(world):
    layer = SyncBatchNorm(CHANNELS)
    x = torch.zeros(0, CHANNELS, 2, 2, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == x.shape
    assert layer.num_batches_tracked == 1
    assert layer.running_mean.tolist() == [0] * CHANNELS
    assert layer.running_var.tolist() == [1] * CHANNELS
    assert layer.weight.grad.tolist() == layer.bias.grad.tolist() == [0] * CHANNELS


def test_nobody_has_a_batch(crew):
    crew(nobody_has_a_batch)


def one_value(world):
    layer = SyncBatchNorm(CHANNELS)
    x = torch.zeros(int(world.rank == 1), CHANNELS)
    with pytest.raises(ValueError, match=r"more than 1 value per channel.*\[\d, 3\]"):
        layer(x)
    layer(torch.zeros(1, CHANNELS))  # one on each rank is enough
    with pytest.raises(RuntimeError, match="running_mean should contain 4 elements not 3"):
        layer(torch.zeros(2, CHANNELS + 1))


def test_one_value_over_all_ranks_is_refused_on_every_rank(crew):
    crew(one_value)


def input_without_gradient(world):
    layer = SyncBatchNorm(CHANNELS)
    with collectives() as called:
        layer(torch.randn(3, CHANNELS)).square().sum().backward()
    assert layer.weight.grad is not None
    return called


def test_backward_sends_nothing_where_the_input_needs_no_gradient(crew):
    for called in crew(input_without_gradient):
        assert called == ["all_gather_into_tensor"]


def second_derivative(world):
    layer = SyncBatchNorm(CHANNELS)
    x = torch.randn(4, CHANNELS, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_a_second_derivative_is_refused(crew):
    crew(second_derivative)


def in_a_group_of_its_own(world):
    groups = [dist.new_group([0]), dist.new_group(list(range(1, world.world_size)))]
    mine = groups[int(world.rank > 0)]
    layer = convert_sync_batchnorm(nn.BatchNorm1d(1, momentum=1.0), mine)
    layer = copy.deepcopy(layer)
    assert layer.process_group is mine
    layer(torch.tensor([[float(world.rank)], [float(world.rank + 1)]]))
    stranger = SyncBatchNorm(1, process_group=groups[int(world.rank == 0)])
    with pytest.raises(ValueError, match="not a member"):
        stranger(torch.zeros(2, 1))
    stranger.eval()(torch.zeros(2, 1))
    return layer.running_mean.item()


def test_a_group_of_some_ranks(crew):
    means = crew(in_a_group_of_its_own)
    assert means[0] == 0.5
    others = range(1, len(means))
    assert means[1:] == [sum(others) / len(others) + 0.5] * len(others)


class CNN(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
            *(nn.Conv2d(4, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)),
        )


def training(world, own_group, how):
    """A CNN trained with the Reducer beside one process on the whole batch."""
    n = world.world_size
    torch.manual_seed(world.rank)
    ours = CNN().double()
    broadcast_parameters(ours)
    whole = copy.deepcopy(ours)
    group = dist.new_group(list(range(n))) if own_group else None
    convert_sync_batchnorm(ours, group)
    Reducer(ours, bucket_cap_mb=5e-4)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, 0.9) for m in (ours, whole)]
    generator = torch.Generator().manual_seed(5)
    for _ in range(10):
        x = torch.randn(4 * n, 2, 9, 9, generator=generator, dtype=torch.float64)
        y = torch.randint(5, (4 * n,), generator=generator)
        for optimizer in optimizers:
            optimizer.zero_grad()
        mine = x.chunk(n)[world.rank]
        output = ours(mine) if how is None else checkpoint(ours, mine, use_reentrant=False)
        cross_entropy(output, y.chunk(n)[world.rank]).backward()
        cross_entropy(whole(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
    for (name, p), q in zip(ours.named_parameters(), whole.parameters(), strict=True):
        assert (p - q).abs().max() < 1e-11, name
    if how is None:  # recomputing a forward counts its batch again, as in torch
        for (name, p), q in zip(ours.named_buffers(), whole.buffers(), strict=True):
            assert (p - q).abs().max() < 1e-11, name
    return [tensor.detach().numpy().tobytes() for tensor in ours.state_dict().values()]


@pytest.mark.parametrize("own_group", [False, True], ids=["one group", "a group of its own"])
def test_training_is_that_of_one_process(crew, own_group):
    assert_one(crew(training, own_group, None))


def converted_later(world):
    """The Reducer does not take a layer that was replaced for a changed model."""
    model = CNN()
    broadcast_parameters(model)
    Reducer(model)
    convert_sync_batchnorm(model)
    model(torch.randn(2, 2, 9, 9)).square().sum().backward()
    model(torch.randn(2, 2, 9, 9))


def test_what_is_there_for_one_call_is_no_new_layer():
    """Its number may be that of a parameter which replaces another later."""
    model = CNN()
    snapshot = ModuleSnapshot(model)
    seen, weight = snapshot.communicating, model[0].weight
    model[0]._parameters["weight"] = weight.detach() * 2  # as torch.func.functional_call does
    assert snapshot.difference(model) is None
    assert snapshot.communicating is seen
    model[0]._parameters["weight"] = weight
    convert_sync_batchnorm(model)
    assert snapshot.difference(model) is None
    assert [type(layer) for layer in snapshot.communicating] == [SyncBatchNorm, SyncBatchNorm]


def test_conversion_after_the_reducer_is_made(crew):
    crew(converted_later)


class Branching(nn.Module):
    """A batch norm, and a branch below it that only some ranks take.

    The branch is in the first bucket, as the last to be registered, but its gradient comes last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False)
        self.branch = nn.Linear(4, 4, bias=False)

    def before(self, x: torch.Tensor, takes: bool) -> torch.Tensor:
        return self.branch(x) if takes else x

    def forward(self, x: torch.Tensor, takes: bool) -> torch.Tensor:
        return self.head(self.norm(self.before(x, takes)))


def branching(world, own_group, options):
    n = world.world_size
    torch.manual_seed(0)
    ours = Branching().double()
    whole = copy.deepcopy(ours)
    convert_sync_batchnorm(ours, dist.new_group(list(range(n))) if own_group else None)
    reducer = Reducer(ours, bucket_cap_mb=0, **options)
    for step in range(4):
        x = torch.randn(n, 3, 4, dtype=torch.float64)
        static = "static_graph" in options
        takes = [(rank + (0 if static else step)) % 2 == 0 for rank in range(n)]
        ours.zero_grad()
        whole.zero_grad()
        ours(x[world.rank], takes[world.rank]).square().mean().backward()
        both = torch.cat([whole.before(part, take) for part, take in zip(x, takes, strict=True)])
        whole.head(whole.norm(both)).square().mean().backward()
        for (name, p), q in zip(ours.named_parameters(), whole.parameters(), strict=True):
            assert (p.grad - q.grad).abs().max() < 1e-12, (step, name)
    reducer.remove()


@pytest.mark.parametrize("options", ["find_unused_parameters", "static_graph"])
@pytest.mark.parametrize("own_group", [False, True], ids=["one group", "a group of its own"])
def test_a_branch_that_only_some_ranks_take(crew, own_group, options):
    crew(branching, own_group, {options: True})


def below_one_rank_alone(world):
    """Layers learn below the norm on rank 0 alone; on the others nothing learns at all."""
    n = world.world_size
    torch.manual_seed(0)
    branch = nn.Linear(4, 4, bias=False).double()
    plain, norm = copy.deepcopy(branch), nn.BatchNorm1d(4, affine=False).double()
    model = nn.Sequential(branch, convert_sync_batchnorm(copy.deepcopy(norm)))
    reducer = Reducer(model, find_unused_parameters=True)
    for _ in range(3):
        x, weights = torch.randn(2, n, 3, 4, dtype=torch.float64)
        model.zero_grad()
        plain.zero_grad()
        # Through forward, for the Reducer to see the graph: the branch is skipped by a flag.
        model[0].forward = partial(_apply_if, branch, world.rank == 0)
        (model(x[world.rank]) * weights[world.rank]).sum().backward()
        both = torch.cat([plain(x[0]), *x[1:]])
        (norm(both) * weights.flatten(0, 1)).sum().backward()
        assert (branch.weight.grad - plain.weight.grad / n).abs().max() < 1e-12
    reducer.remove()


def _apply_if(layer, applies, x):
    return nn.functional.linear(x, layer.weight) if applies else x


def test_layers_that_learn_on_one_rank_alone(crew):
    crew(below_one_rank_alone)


def unequal_weights(world):
    """Refused on every rank, and right with weighted losses; equal weights are right."""
    n = world.world_size
    sizes = range(2, 2 + n)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    broadcast_parameters(model)
    whole = copy.deepcopy(model)
    reducer = Reducer(convert_sync_batchnorm(model))
    x = torch.randn(sum(sizes), 3, generator=torch.Generator().manual_seed(0)).double()
    mine = x.split(list(sizes))[world.rank]
    with pytest.raises(RuntimeError, match="weights of ranks differ"):
        reducer.weight(len(mine))
    for equal in (5, 0.1):
        reducer.weight(equal)
    total = torch.tensor(float(len(mine)))
    dist.all_reduce(total)
    loss = model(mine).square().mean() * len(mine) * n / total
    loss.backward()
    whole(x).square().mean().backward()
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        assert (p.grad - q.grad).abs().max() < 1e-12
    model.eval()
    reducer.weight(len(mine))  # moments are not taken over ranks
    reducer.remove()


def test_unequal_weights_are_refused(crew):
    crew(unequal_weights)


def out_of_data(world, wrapped, accumulates):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    convert_sync_batchnorm(model)
    called = DistributedDataParallel(model) if wrapped else model
    reducer = called.reducer if wrapped else Reducer(model)
    context = called.join() if wrapped else join(reducer)

    def train() -> None:
        with context:
            for _ in range(2 + world.rank):
                with reducer.no_sync() if accumulates else nullcontext():
                    called(torch.randn(2, 3)).sum().backward()

    with pytest.raises(RuntimeError, match="a rank has run out of data"):
        train()
    reducer.remove()


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_rank_that_runs_out_of_data_is_told(crew, wrapped, accumulates):
    crew(out_of_data, wrapped, accumulates)


def test_training_with_activation_checkpointing(crew):
    assert_one(crew(training, False, "checkpoint"))


# On a GPU ---------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_arithmetic_on_a_gpu_is_torchs(dtype):
    """Two ranks' halves, merged in this process."""
    torch.manual_seed(0)
    x = torch.randn(8, CHANNELS, 5, 5, device="cuda", dtype=dtype)
    packed = [sync_batch_norm._pack_moments(part) for part in x.split([3, 5])]
    moments = sync_batch_norm._merge_moments(torch.stack(packed), CHANNELS)
    ours = sync_batch_norm._Normalize.apply(x, None, None, None, moments, 1e-5, None)
    theirs = nn.functional.batch_norm(x, None, None, training=True)
    torch.testing.assert_close(ours, theirs)
