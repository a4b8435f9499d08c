"""Computes gradients straight into their bucket, and counts the page faults that this saves.

python -m tutorial.11_born_in_bucket.born_in_bucket
"""

import resource
from statistics import median
from time import perf_counter

import torch
from torch.nn.functional import linear

from tutorial.options import read_options
from tutorial.show.born_in_bucket import show

WIDTH, LAYERS, BATCH, STEPS = 1024, 8, 32, 20


class IntoBucket(torch.autograd.Function):
    """x @ weight.T + bias. Backward computes the weight's gradient into a view of the bucket."""

    @staticmethod
    def forward(ctx, x, weight, bias, view):
        """Like `torch.nn.functional.linear`; saves what backward needs."""
        ctx.save_for_backward(x, weight)
        ctx.view = view
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        """The gradients of x, weight, bias and view."""
        x, weight = ctx.saved_tensors
        torch.mm(gradient.t(), x, out=ctx.view)
        # Another tensor on the same memory. Autograd keeps it as `.grad` without a copy, because
        # nothing else holds it.
        born = ctx.view.view_as(ctx.view)
        return gradient @ weight, born, gradient.sum(0), None


def make_parameters():
    """Returns weights and biases, and a bucket with a view for each weight."""
    torch.manual_seed(0)
    weights = [(torch.randn(WIDTH, WIDTH) / WIDTH**0.5).requires_grad_() for _ in range(LAYERS)]
    biases = [torch.zeros(WIDTH, requires_grad=True) for _ in range(LAYERS)]
    bucket = torch.zeros(LAYERS * WIDTH * WIDTH)
    return weights, biases, bucket.view(LAYERS, WIDTH, WIDTH)


def usual(x, weights, biases, views):
    """Returns the loss; gradients are born wherever the allocator finds memory."""
    for weight, bias in zip(weights, biases, strict=True):
        x = linear(x, weight, bias).relu()
    return (x - 1).square().mean()


def into_bucket(x, weights, biases, views):
    """Returns the loss; the weights' gradients are born in their bucket."""
    for weight, bias, view in zip(weights, biases, views, strict=True):
        x = IntoBucket.apply(x, weight, bias, view).relu()
    return (x - 1).square().mean()


def pack(weights, views):
    """Copies gradients that lie elsewhere into the bucket; then `.grad` can be freed."""
    for weight, view in zip(weights, views, strict=True):
        if weight.grad.data_ptr() != view.data_ptr():
            view.copy_(weight.grad)


def measure(loss_of):
    """Returns the median ms of backward and packing, a step's page faults, and the last bucket."""
    weights, biases, views = make_parameters()
    steps = []
    for step in range(STEPS):
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = loss_of(x, weights, biases, views)
        faults, begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, perf_counter()
        loss.backward()
        middle = perf_counter()
        pack(weights, views)
        end = perf_counter()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        steps.append((1000 * (middle - begin), 1000 * (end - middle), faults))
        for parameter in weights + biases:
            parameter.grad = None  # as optimizer.zero_grad() does
    return *map(median, zip(*steps, strict=True)), views


def main():
    """Measures both ways, and shows them."""
    options = read_options(__doc__)
    torch.set_num_threads(1)
    ways = {"usual": usual, "into the bucket": into_bucket}
    show({name: measure(loss_of) for name, loss_of in ways.items()}, options.picture)


if __name__ == "__main__":
    main()
