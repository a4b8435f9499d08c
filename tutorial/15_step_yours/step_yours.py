"""Divides the optimizer: each rank steps its own share of the parameters, with its state (ZeRO-1).

python -m tutorial.15_step_yours.step_yours
"""

from importlib import import_module
from itertools import pairwise
from time import perf_counter

import torch
import torch.distributed as dist

from tutorial.options import read_options
from tutorial.ranks import start
from tutorial.show.step_yours import show

move = import_module("tutorial.12_one_copy.one_copy").move

WIDTH, LAYERS, BATCH, STEPS, RATE = 512, 8, 64, 12, 1e-3


class Everything:
    """Every rank steps all parameters, and has Adam's two numbers for each of them."""

    def __init__(self, parameters, gradients):
        self.gradients = gradients
        parameters.grad = gradients
        self.adam = torch.optim.Adam([parameters], lr=RATE, fused=True)

    def reduce(self):
        """Replaces all gradients by their means: an all-reduce."""
        dist.all_reduce(self.gradients)
        self.gradients /= dist.get_world_size()

    def gather(self):
        """Nothing to send: every rank has stepped every parameter."""


class OwnShare:
    """Every rank steps its share of the parameters, and has Adam's numbers for that alone."""

    def __init__(self, parameters, gradients):
        rank, nproc = dist.get_rank(), dist.get_world_size()
        self.parameters, self.gradients = parameters, gradients
        self.mine = parameters.chunk(nproc)[rank]  # a view: Adam writes into `parameters`
        self.mine.grad = gradients.chunk(nproc)[rank]
        self.adam = torch.optim.Adam([self.mine], lr=RATE, fused=True)

    def reduce(self):
        """Replaces this rank's share of the gradients by their means: a reduce-scatter."""
        dist.reduce_scatter_tensor(self.mine.grad, self.gradients)
        self.mine.grad /= dist.get_world_size()

    def gather(self):
        """Collects the shares that the other ranks have stepped: an all-gather."""
        dist.all_gather_into_tensor(self.parameters, self.mine)


def train(way):
    """Returns the marks of each step, the bytes of each kind, and the parameters."""
    rank, nproc = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.ReLU())))
    flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    parameters = torch.nn.functional.pad(flat, (0, -len(flat) % nproc))  # equal shares
    gradients = torch.zeros_like(parameters)
    sizes = len(flat), len(parameters) - len(flat)
    move(list(model.parameters()), parameters.split(sizes)[0], gradients.split(sizes)[0])
    engine, steps = way(parameters, gradients), []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        gradients.zero_()
        loss = (model(torch.randn(BATCH, WIDTH, generator=generator)) - 1).square().mean()
        loss.backward()
        dist.barrier()
        marks = [perf_counter()]
        for part in (engine.reduce, engine.adam.step, engine.gather):
            part()
            marks.append(perf_counter())
        steps.append([1000 * (end - begin) for begin, end in pairwise(marks)])
    state = sum(s.nbytes for of_one in engine.adam.state.values() for s in of_one.values())
    held = {"parameters": parameters.nbytes, "gradients": gradients.nbytes, "state": state}
    return steps, held, parameters


def main():
    """Trains both ways, and shows what a rank holds, how long its steps take, and the bits."""
    options = read_options(__doc__, nproc=2)
    ways = {"everything": Everything, "own share": OwnShare}
    found = {name: start(train, options.nproc, way) for name, way in ways.items()}
    show(found, options.picture)


if __name__ == "__main__":
    main()
