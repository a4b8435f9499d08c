"""Trains with one copy of the parameters for all ranks of a machine; beside one for each rank.

python -m tutorial.12_one_copy.one_copy
"""

import tempfile
from importlib import import_module
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from tutorial.memory import megabytes
from tutorial.options import read_options
from tutorial.ranks import start
from tutorial.show.one_copy import show

chapter_10 = import_module("tutorial.10_shared_memory.shared_memory")

WIDTH, LAYERS, BATCH, STEPS, RATE = 1024, 8, 32, 12, 0.3


class OwnCopies:
    """Every rank has its own parameters; gradients are summed in one flat tensor (chapter 5)."""

    def __init__(self, parameters, folder):
        self.parameters = torch.nn.utils.parameters_to_vector(parameters).detach()
        self.gradients = torch.zeros_like(self.parameters)
        move(parameters, self.parameters, self.gradients)

    def step(self):
        """Takes the mean of the gradients, and steps all parameters."""
        dist.all_reduce(self.gradients)
        self.gradients /= dist.get_world_size()
        self.parameters.sub_(self.gradients, alpha=RATE)
        self.gradients.zero_()


class OneCopy:
    """The parameters lie in shared memory, once. Each rank steps its chunk of them, for all ranks.

    In chapter 10's memory, row r holds rank r's gradients, and the last row the parameters.
    """

    def __init__(self, parameters, folder):
        initial = torch.nn.utils.parameters_to_vector(parameters).detach()
        self.memory = chapter_10.SharedMemory(folder, len(initial))
        self.mine = slice(*chapter_10.chunk(dist.get_rank(), dist.get_world_size(), len(initial)))
        if dist.get_rank() == 0:
            self.memory.total.copy_(initial)
        self.memory.meet()  # the others train the parameters of rank 0
        move(parameters, self.memory.total, self.memory.rows[self.memory.rank])

    def step(self):
        """Takes the mean of its chunk of the gradients, and steps its chunk of the parameters."""
        self.memory.meet()  # all gradients are there, and nobody uses the parameters any more
        gradients = self.memory.rows[:, self.mine].sum(0) / self.memory.nproc
        self.memory.total[self.mine].sub_(gradients, alpha=RATE)
        self.memory.meet()  # all parameters are stepped, and nobody reads gradients any more
        self.memory.rows[self.memory.rank].zero_()


def move(parameters, values, gradients):
    """Makes parameters and their gradients parts of two flat tensors."""
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, value, gradient in zip(
        parameters, values.split(sizes), gradients.split(sizes), strict=True
    ):
        parameter.data = value.view_as(parameter)
        parameter.grad = gradient.view_as(parameter)  # backward adds to it


def train(way, folder):
    """Returns the MB that training takes, the median ms of a step, and the parameters."""
    before = megabytes()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.ReLU())))
    engine = way(list(model.parameters()), folder)
    times = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(BATCH, WIDTH, generator=generator)
        dist.barrier()
        begin = perf_counter()
        (model(x) - 1).square().mean().backward()
        engine.step()
        times.append(1000 * (perf_counter() - begin))
    taken = megabytes() - before
    dist.barrier()  # keeps the memory shared until all ranks have measured
    return taken, median(times), torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def main():
    """Trains both ways, and shows memory and time of each."""
    options = read_options(__doc__, nproc=2)
    found = {}
    for name, way in (("own copies", OwnCopies), ("one copy", OneCopy)):
        place = "/dev/shm" if Path("/dev/shm").is_dir() else None
        with tempfile.TemporaryDirectory(dir=place) as folder:
            found[name] = start(train, options.nproc, way, folder)
    show(LAYERS * (WIDTH + 1) * WIDTH, found, options.picture)


if __name__ == "__main__":
    main()
