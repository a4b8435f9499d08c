"""Solutions of chapter 12."""

from importlib import import_module

import torch

chunk = import_module("tutorial.10_shared_memory.shared_memory").chunk


def make_momentum(rank, nproc, parameters):
    """Returns this rank's momentum: a zero for each parameter that this rank steps."""
    begin, end = chunk(rank, nproc, len(parameters))
    return torch.zeros(end - begin)


def step(parameters, rows, momentum, rank, rate, factor, meet):
    """Takes one step of SGD with momentum, on this rank's chunk, as `torch.optim.SGD` does."""
    meet()  # all gradients are there
    begin, end = chunk(rank, *rows.shape)
    momentum.mul_(factor).add_(rows[:, begin:end].sum(0) / len(rows))
    parameters[begin:end].sub_(momentum, alpha=rate)
    meet()  # all parameters are stepped, and nobody reads gradients any more
    rows[rank].zero_()
