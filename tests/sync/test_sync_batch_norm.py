"""Synchronised batch norm beside torch's batch norm of the whole batch in one process."""

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_from_scratch import DistributedDataParallel, SyncBatchNorm, convert_sync_batchnorm
from ddp_from_scratch.sync import sync_batch_norm
from tests.support.terms import recorded
from tests.support.tiers import slow

CHANNELS = 3


@contextmanager
def collectives() -> Iterator[Callable[[], tuple[int, int]]]:
    own = "all_gather_single", sync_batch_norm
    with recorded(*own) as gathered, recorded("all_reduce") as summed:
        yield lambda: (len(gathered), len(summed))


close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


def as_one_process(world, shape, sizes, options, channels_last):
    torch.manual_seed(0)
    theirs = nn.modules.batchnorm._BatchNorm(CHANNELS, **options, dtype=torch.float64)
    theirs._check_input_dim = lambda input: None
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    ours = SyncBatchNorm(CHANNELS, **options, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    for _ in range(3):
        whole = 3 + 2 * torch.randn(sum(sizes), CHANNELS, *shape, dtype=torch.float64)
        factor = torch.randn_like(whole)
        mine = whole.split(sizes)[world.rank].clone()
        if channels_last:
            mine = mine.contiguous(memory_format=torch.channels_last)
        mine.requires_grad_()
        whole.requires_grad_()
        ours.zero_grad()
        theirs.zero_grad()
        with collectives() as called:
            y = ours(mine)
            assert called() == (1, 0)
            (y.square() * factor.split(sizes)[world.rank]).sum().backward()
            assert called() == (1, 1)
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
    with collectives() as called, torch.no_grad():
        close(ours.eval()(mine), theirs.eval()(mine))
        assert called() == (0, 0)
    return [buffer.numpy().tobytes() for buffer in ours.buffers()]


UNEQUAL = [1, 5, 2]
LAYERS: dict[str, tuple[Any, ...]] = {
    "1d of sequences, one empty": ((5,), [3, 0, 2], {}, False),
    "2d, first empty": ((4, 3), [0, 2, 1], {}, False),
    "no affine": ((4, 3), UNEQUAL, {"affine": False}, False),
    "no statistics": ((4, 3), UNEQUAL, {"track_running_stats": False}, False),
    "cumulative": ((4, 3), UNEQUAL, {"momentum": None}, False),
    "eps and momentum": ((4, 3), UNEQUAL, {"eps": 0.1, "momentum": 0.4}, False),
    "channels last": ((4, 3), UNEQUAL, {}, True),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_is_that_of_one_process(ranks, layer):
    first, *others = ranks("gloo", 3)(as_one_process, *LAYERS[layer])
    assert others == [first] * len(others)  # statistics have the same bits on every rank


def floats_of_16_bits(world):
    for dtype in (torch.bfloat16, torch.float16):
        for kept in (torch.float32, dtype):
            torch.manual_seed(0)
            whole = (50 + 2 * torch.randn(6 * world.world_size, CHANNELS, 8, 8)).to(dtype)
            mine = whole.chunk(world.world_size)[world.rank].clone().requires_grad_()
            ours = SyncBatchNorm(CHANNELS, dtype=kept)
            y = ours(mine)
            y.float().square().sum().backward()
            assert y.dtype == mine.grad.dtype == dtype
            assert ours.weight.grad.dtype == ours.running_var.dtype == ours.weight.dtype
            exact = nn.BatchNorm2d(CHANNELS)(whole.float()).chunk(world.world_size)[world.rank]
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(y.float(), exact, rtol=eps, atol=eps)
            variance, mean = torch.var_mean(whole.float(), (0, 2, 3))
            near = {"rtol": eps if kept == dtype else 1e-5, "atol": 0.0}
            torch.testing.assert_close(ours.running_mean.float(), 0.1 * mean, **near)
            torch.testing.assert_close(ours.running_var.float(), 0.9 + 0.1 * variance, **near)


def no_batch_anywhere_and_one_value(world):
    layer = SyncBatchNorm(CHANNELS)
    x = torch.zeros(0, CHANNELS, 2, 2, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == x.shape
    assert layer.num_batches_tracked == 1
    assert (layer.running_mean.tolist(), layer.running_var.tolist()) == ([0] * 3, [1] * 3)
    assert layer.weight.grad.tolist() == layer.bias.grad.tolist() == [0] * 3
    with pytest.raises(ValueError, match=r"more than 1 value per channel.*\[\d, 3\]"):
        layer(torch.zeros(int(world.rank == 1), CHANNELS))
    layer(torch.zeros(1, CHANNELS))  # one on each rank is enough
    with pytest.raises(RuntimeError, match="running_mean should contain 4 elements not 3"):
        layer(torch.zeros(2, CHANNELS + 1))


def no_gradient_of_the_input_and_no_second_one(world):
    layer = SyncBatchNorm(CHANNELS)
    with collectives() as called:
        layer(torch.randn(3, CHANNELS)).square().sum().backward()
    assert called() == (1, 0)
    assert layer.weight.grad is not None
    x = torch.randn(4, CHANNELS, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def group_of_some_ranks(world):
    groups = [dist.new_group([0]), dist.new_group(list(range(1, world.world_size)))]
    mine = groups[int(world.rank > 0)]
    layer = copy.deepcopy(convert_sync_batchnorm(nn.BatchNorm1d(1, momentum=1.0), mine))
    assert layer.process_group is mine
    layer(torch.tensor([[float(world.rank)], [float(world.rank + 1)]]))
    others = range(1, world.world_size) if world.rank else [0]
    assert layer.running_mean.item() == sum(others) / len(others) + 0.5
    with pytest.raises(ValueError, match="not a member"):
        SyncBatchNorm(1, process_group=groups[int(world.rank == 0)])(torch.zeros(2, 1))


def a_rank_out_of_data_is_told(world):
    model = convert_sync_batchnorm(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    wrapped = DistributedDataParallel(model)

    def train():
        with wrapped.join():
            for _ in range(2 + world.rank):
                wrapped(torch.randn(2, 3)).sum().backward()

    with pytest.raises(RuntimeError, match="a rank has run out of data"):
        train()


@pytest.mark.parametrize(
    "program",
    [
        *(floats_of_16_bits, no_batch_anywhere_and_one_value, group_of_some_ranks),
        no_gradient_of_the_input_and_no_second_one,
        a_rank_out_of_data_is_told,
    ],
)
@pytest.mark.parametrize("crew", ["gloo-3", slow("mpi-2")], indirect=True)
def test_synchronised(crew, program):
    crew(program)


def test_every_batch_norm_is_converted_in_place():
    shared, untouched = nn.BatchNorm1d(3), nn.ModuleList([nn.InstanceNorm1d(3), nn.LayerNorm(3)])
    inner = nn.Sequential(nn.Linear(3, 3), shared, nn.BatchNorm2d(3, affine=False))
    other = nn.Sequential(nn.BatchNorm3d(3, momentum=None), nn.SyncBatchNorm(3)).eval()
    model = nn.ModuleList([shared, inner, other, untouched])
    parameters, modes = list(map(id, model.parameters())), [m.training for m in model.modules()]
    assert convert_sync_batchnorm(model) is model
    found = [name for name, layer in model.named_modules() if isinstance(layer, SyncBatchNorm)]
    assert found == ["0", "1.2", "2.0", "2.1"]
    assert inner[1] is model[0]
    assert other[0].momentum is None
    assert list(map(id, model.parameters())) == parameters
    assert [module.training for module in model.modules()] == modes
    lazy = nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d(eps=0.5))
    with pytest.raises(ValueError, match="1 is lazy and has no shape yet"):
        convert_sync_batchnorm(lazy)
    lazy(torch.randn(3, 2))
    converted = convert_sync_batchnorm(lazy[1])  # one by itself is replaced
    assert (type(converted), converted.num_features, converted.eps) == (SyncBatchNorm, 2, 0.5)


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}])
def test_state_and_results_without_a_group_are_torchs(options):
    ours, theirs = SyncBatchNorm(3, **options), nn.BatchNorm2d(3, **options)
    for x in torch.randn(3, 4, 3, 2, 2):
        assert torch.equal(ours(x), theirs(x))
    theirs(torch.randn(4, 3, 2, 2))
    ours.load_state_dict(theirs.state_dict())
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    ours = pickle.loads(pickle.dumps(ours))
    assert torch.equal(ours.eval()(x), theirs.eval()(x))
