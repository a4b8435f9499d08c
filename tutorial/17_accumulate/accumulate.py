"""Adds up the gradients of several small batches before a step, with and without sending each.

python -m tutorial.17_accumulate.accumulate
"""

from contextlib import contextmanager, nullcontext
from importlib import import_module
from time import perf_counter

import torch
import torch.distributed as dist

from tutorial.options import read_options
from tutorial.ranks import start
from tutorial.show.accumulate import show

buckets = import_module("tutorial.07_buckets.buckets")

BATCH, PARTS, STEPS, CAP = 128, 4, 12, 2  # examples of a rank, batches they are cut into, MB


class Accumulating(buckets.DataParallel):
    """Chapter 7's class with a switch: while it is off, gradients add up and nothing is sent."""

    def __init__(self, model, cap_mb):
        self.sync, self.sent = True, []
        super().__init__(model, cap_mb, self.count)

    def count(self, tensor, async_op):
        """Notes the bytes of an all-reduce, and launches it."""
        self.sent.append(tensor.nbytes)
        return dist.all_reduce(tensor, async_op=async_op)

    @contextmanager
    def no_sync(self):
        """In this context `backward()` adds to `.grad`, and the ranks' gradients differ."""
        self.sync = False
        try:
            yield
        finally:
            self.sync = True

    def on_ready(self, parameter):
        """Does what chapter 7 does, unless the switch is off."""
        if self.sync:
            super().on_ready(parameter)


def one_batch(model, parallel, x):
    """Computes the gradient in one backward pass."""
    (model(x) - 1).square().mean().backward()
    parallel.finish()


def every_pass(model, parallel, x):
    """Computes it in parts, and averages after each: the mean so far is in `.grad` already."""
    for part in x.chunk(PARTS):
        ((model(part) - 1).square().mean() / PARTS).backward()
        parallel.finish()


def last_pass(model, parallel, x):
    """Computes it in parts, and averages the sum once, in the last backward pass."""
    for number, part in enumerate(x.chunk(PARTS)):
        with nullcontext() if number == PARTS - 1 else parallel.no_sync():
            ((model(part) - 1).square().mean() / PARTS).backward()
    parallel.finish()


def train(way):
    """Returns the ms of each step, the bytes of each all-reduce of a step, and the parameters."""
    model = buckets.make_model()
    parallel = Accumulating(model, CAP)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    times = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(BATCH, buckets.WIDTH, generator=generator)
        optimizer.zero_grad()
        parallel.sent.clear()
        dist.barrier()
        begin = perf_counter()
        way(model, parallel, x)
        times.append(1000 * (perf_counter() - begin))
        optimizer.step()
    vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    return times, parallel.sent, vector


def main():
    """Trains in the three ways, and shows what each sends, and how far the results are apart."""
    options = read_options(__doc__, nproc=2)
    ways = one_batch, every_pass, last_pass
    show({way.__name__: start(train, options.nproc, way)[0] for way in ways}, options.picture)


if __name__ == "__main__":
    main()
