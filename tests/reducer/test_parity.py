"""Twenty steps beside one process on the whole batch, and beside torch's DistributedDataParallel.

Every rank trains the library's model and the one to compare with side by side, on equal data.
"""

import copy
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

from ddp_from_scratch import Reducer, broadcast_parameters
from tests.support.tiers import slow

STEPS = 20
BATCH = 4  # per rank
CLASSES = 5


class MLP(nn.Sequential):
    def __init__(self):
        super().__init__(
            *(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES))
        )

    @staticmethod
    def draw(count: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(count, 6, generator=generator, dtype=torch.float64)


class CNN(nn.Sequential):
    def __init__(self):
        super().__init__(
            *(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
            *(nn.Conv2d(4, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)),
        )

    @staticmethod
    def draw(count: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(count, 2, 9, 9, generator=generator, dtype=torch.float64)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.positions = nn.Parameter(torch.randn(6, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.tokens(x) + self.positions).mean(1))

    @staticmethod
    def draw(count: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(11, (count, 6), generator=generator)


MODELS = {"mlp": MLP, "cnn": CNN, "transformer": Transformer}
each_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(
    params=["gloo-3", "mpi-2", *map(slow, ("gloo-2", "gloo-4", "mpi-3", "mpi-4"))],
)
def crew(ranks, request):
    backend, world_size = request.param.split("-")
    return ranks(backend, int(world_size))


def build(world, name: str, dtype: torch.dtype) -> nn.Module:
    """The model of rank 0, on every rank."""
    torch.manual_seed(world.rank)
    model = MODELS[name]().to(dtype)
    broadcast_parameters(model)
    return model


def batches(model: nn.Module, count: int, dtype: torch.dtype) -> Iterator[tuple]:
    """Whole batches of `count` samples, the same ones on every rank."""
    generator = torch.Generator().manual_seed(5)
    while True:
        x = model.draw(count, generator)
        yield (
            x.to(dtype) if x.is_floating_point() else x,
            torch.randint(CLASSES, (count,), generator=generator),
        )


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def values(model: nn.Module) -> torch.Tensor:
    return parameters_to_vector(model.parameters()).detach()


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def bits(model: nn.Module) -> bytes:
    return values(model).numpy().tobytes()


def assert_one_model(models: list[bytes]) -> None:
    for rank, theirs in enumerate(models):
        assert models[0] == theirs, f"rank {rank} has drifted from rank 0"


def beside_one_process(world, name):
    n, dtype = world.world_size, torch.float64
    ours = build(world, name, dtype)
    whole = copy.deepcopy(ours)
    start = values(ours)
    Reducer(ours, bucket_cap_mb=1e-3)
    our_sgd, whole_sgd = sgd(ours), sgd(whole)
    data = batches(ours, n * BATCH, dtype)
    for _ in range(STEPS):
        x, y = next(data)
        our_sgd.zero_grad()
        cross_entropy(ours(x.chunk(n)[world.rank]), y.chunk(n)[world.rank]).backward()
        our_sgd.step()

        whole_sgd.zero_grad()
        if name == "cnn":
            shards = zip(x.chunk(n), y.chunk(n), strict=True)
            (sum(cross_entropy(whole(xs), ys) for xs, ys in shards) / n).backward()
        else:
            cross_entropy(whole(x), y).backward()
        whole_sgd.step()
    assert (values(ours) - values(whole)).abs().max() < 1e-12
    assert (values(ours) - start).abs().max() > 1e-2, "nothing was learned"
    return bits(ours)


@each_model
def test_as_one_process_on_the_whole_batch(crew, name):
    """In float64, within 1e-12.

    Batch norm's statistics are each rank's own, so for the CNN the one process computes the loss
    of each rank's shard by itself and averages the losses.
    """
    assert_one_model(crew(beside_one_process, name))


def beside_torch(world, name, cap, accumulate, settle, options):
    n, dtype = world.world_size, torch.float32
    ours = build(world, name, dtype)
    model = copy.deepcopy(ours)
    # gloo takes the sum of three or more numbers in another order than shared memory.
    reducer = Reducer(ours, bucket_cap_mb=cap, shared_memory=n == 2, **options)
    assert cap is None or len(reducer.buckets) >= 3
    theirs = DistributedDataParallel(model, bucket_cap_mb=cap, **options)
    our_sgd, their_sgd = sgd(ours), sgd(model)
    data = batches(ours, n * BATCH, dtype)

    def step() -> None:
        our_sgd.zero_grad()
        their_sgd.zero_grad()
        for part in range(accumulate):
            x, y = (t.chunk(n)[world.rank] for t in next(data))
            last = part == accumulate - 1
            with nullcontext() if last else reducer.no_sync():
                cross_entropy(ours(x), y).backward()
            with nullcontext() if last else theirs.no_sync():
                cross_entropy(theirs(x), y).backward()

    if settle:  # both lay their buckets out anew after this backward pass
        step()
    for _ in range(STEPS):
        step()
        if settle:
            assert torch.equal(gradients(ours), gradients(model))
        our_sgd.step()
        their_sgd.step()
        if settle:
            assert torch.equal(values(ours), values(model))
    torch.testing.assert_close(values(ours), values(model), rtol=1e-4, atol=1e-5)
    return bits(ours)


SEVERAL = 1.5e-4  # MiB: at least three buckets
each_cap = pytest.mark.parametrize("cap", [None, SEVERAL], ids=["default cap", "several buckets"])


@each_model
@each_cap
def test_as_torch_bit_for_bit(crew, name, cap):
    """Every gradient and parameter, from the second step on.

    The first step differs: torch begins with one bucket for all and the sum of three or more
    numbers depends on where in the buffer they lie.
    """
    assert_one_model(crew(beside_torch, name, cap, 1, True, {}))


@each_model
def test_as_torch_bit_for_bit_with_gradients_as_bucket_views(crew, name):
    options = {"gradient_as_bucket_view": True}
    assert_one_model(crew(beside_torch, name, SEVERAL, 1, True, options))


@each_model
def test_as_torch_bit_for_bit_when_accumulating(crew, name):
    assert_one_model(crew(beside_torch, name, SEVERAL, 2, True, {}))


@each_model
def test_as_torch_to_rounding_from_the_first_step(crew, name):
    assert_one_model(crew(beside_torch, name, SEVERAL, 1, False, {}))
