import pytest
import torch

SIZES = [[4, 4], [1, 2, 3], [1, 7], [5, 0, 1]]


def gradient(parameter, x, factor=1.0):
    """The gradient of factor * mean((x @ parameter) ** 2); without examples the loss is 0."""
    parameter = parameter.clone().requires_grad_()
    loss = (x @ parameter).square().sum() / max(1, len(x))
    (factor * loss).backward()
    return parameter.grad


def ratio(vector, expected):
    """How many times as long as `expected` the vector is, if both have the same direction."""
    times = vector.norm() / expected.norm()
    if torch.allclose(vector, times * expected):
        return f"but {times:.3g} times as long"
    return "nor a multiple of it: the shards' weights are not in proportion to their sizes"


@pytest.fixture
def batch():
    torch.manual_seed(0)
    return torch.randn(3, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_weighted_mean(exercise, batch, sizes):
    parameter, x = batch[0], batch[1][: sum(sizes)]
    gradients = [gradient(parameter, shard) for shard in x.split(sizes)]
    found, batchs = exercise.weighted_mean(gradients, sizes), gradient(parameter, x)
    assert torch.allclose(found, batchs), f"not the batch's gradient, {ratio(found, batchs)}"


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_loss_factor(exercise, batch, sizes):
    parameter, x = batch[0], batch[1][: sum(sizes)]
    factors = [exercise.loss_factor(size, sizes) for size in sizes]
    shards = zip(x.split(sizes), factors, strict=True)
    gradients = [gradient(parameter, shard, factor) for shard, factor in shards]
    mean, batchs = sum(gradients) / len(sizes), gradient(parameter, x)
    said = f"with factors {factors}, the plain mean is not the batch's gradient"
    assert torch.allclose(mean, batchs), f"{said}, {ratio(mean, batchs)}"
