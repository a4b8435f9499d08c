"""Compares the gradient of a batch with the mean of the gradients of its shards.

python -m tutorial.02_same_gradient.same_gradient
"""

import torch
from torch import nn

from tutorial.options import read_options
from tutorial.show.same_gradient import show

FEATURES, HIDDEN = 32, 64
EQUAL, UNEQUAL = [16, 16, 16, 16], [40, 8, 8, 8]


def gradient(model, x, y):
    """The gradient of the mean loss over the examples (x, y), as one long vector."""
    loss = nn.functional.mse_loss(model(x), y)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([part.flatten() for part in gradients])


def distance(model, x, y, sizes, weights=(1 / 4, 1 / 4, 1 / 4, 1 / 4)):
    """How far the sum of the shards' weighted gradients is from the batch's gradient.

    0 means the same vector; 1 means a distance as long as the batch's gradient.
    """
    of_batch = gradient(model, x, y)
    shards = zip(weights, x.split(sizes), y.split(sizes), strict=True)
    of_shards = sum(weight * gradient(model, *shard) for weight, *shard in shards)
    return ((of_shards - of_batch).norm() / of_batch.norm()).item()


def main():
    """Shows the distance for several ways to split a batch of 64 examples in four."""
    options = read_options(__doc__)
    torch.manual_seed(0)
    x, y = torch.randn(64, FEATURES), torch.randn(64, 1)
    model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
    norm = nn.BatchNorm1d(HIDDEN)
    normalised = nn.Sequential(nn.Linear(FEATURES, HIDDEN), norm, nn.ReLU(), nn.Linear(HIDDEN, 1))
    by_size = [size / 64 for size in UNEQUAL]
    found = {
        "equal shards": distance(model, x, y, EQUAL),
        "equal shards, float64": distance(model.double(), x.double(), y.double(), EQUAL),
        "unequal shards": distance(model.float(), x, y, UNEQUAL),
        "unequal, weighted": distance(model, x, y, UNEQUAL, by_size),
        "equal, batch norm": distance(normalised, x, y, EQUAL),
    }
    show(found, options.picture)


if __name__ == "__main__":
    main()
