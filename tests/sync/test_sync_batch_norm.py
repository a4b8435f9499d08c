"""Synchronised batch norm beside torch's batch norm of the whole batch in one process."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_from_scratch import (
    SyncBatchNorm,
    convert_sync_batchnorm,
)
from ddp_from_scratch.sync import sync_batch_norm

CHANNELS = 3


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
