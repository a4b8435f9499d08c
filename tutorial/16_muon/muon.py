"""Trains with Muon: each matrix has an owner, which alone computes its step and sends the result.

python -m tutorial.16_muon.muon
"""

from importlib import import_module
from itertools import pairwise
from time import perf_counter

import torch
import torch.distributed as dist

from tutorial.options import read_options
from tutorial.ranks import start
from tutorial.show.muon import show

WIDTHS, BATCH, STEPS = (384, 320, 256, 192, 128, 64), 64, 10
RATE, MOMENTUM = 0.1, 0.95


def newton_schulz(matrix):
    """Returns nearly the closest matrix whose singular values are all 1 (Jordan et al., 2024)."""
    x = matrix / matrix.norm()
    x = x.t() if x.shape[0] > x.shape[1] else x  # the products of the short side are cheaper
    for _ in range(5):
        square = x @ x.t()
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x if x.shape == matrix.shape else x.t()


def cost(matrix):
    """The multiplications of one round of `newton_schulz`, relative to other matrices."""
    short, long = sorted(matrix.shape)
    return short * short * (2 * long + short)


def by_turns(costs, nproc):
    """Returns each matrix's owner: rank 0, 1, ... and again, whatever the matrices cost."""
    return [number % nproc for number in range(len(costs))]


class Muon:
    """Steps matrices. Each has an owner; without owners, every rank steps all of them."""

    def __init__(self, matrices, owners=None):
        self.matrices, self.owners = matrices, owners
        rank = dist.get_rank()
        self.mine = [n for n in range(len(matrices)) if not owners or owners[n] == rank]
        self.momentum = {n: torch.zeros_like(matrices[n]) for n in self.mine}

    def reduce(self):
        """Sends gradients to the owner of their matrix, or to all ranks."""
        for number, matrix in enumerate(self.matrices):
            if self.owners:
                dist.reduce(matrix.grad, self.owners[number])
            else:
                dist.all_reduce(matrix.grad)

    @torch.no_grad()
    def step(self):
        """Steps this rank's matrices along the orthogonal matrix that is close to the momentum."""
        for number in self.mine:
            matrix, momentum = self.matrices[number], self.momentum[number]
            momentum.mul_(MOMENTUM).add_(matrix.grad / dist.get_world_size())
            matrix.sub_(newton_schulz(momentum), alpha=RATE)

    def broadcast(self):
        """Sends each stepped matrix from its owner to all others."""
        if self.owners:
            for matrix, owner in zip(self.matrices, self.owners, strict=True):
                dist.broadcast(matrix.detach(), owner)


def train(find_owners):
    """Returns the ms of each step's parts, the MB of momentum, the losses, and the parameters."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(m, n, bias=False) for m, n in pairwise(WIDTHS)]
    model = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.Tanh())))
    matrices = list(model.parameters())
    owners = find_owners and find_owners([*map(cost, matrices)], dist.get_world_size())
    muon, steps, losses = Muon(matrices, owners), [], []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(BATCH, WIDTHS[0], generator=generator)
        model.zero_grad()
        loss = (model(x) - x[:, : WIDTHS[-1]].sin()).square().mean()
        loss.backward()
        dist.barrier()
        marks = [perf_counter()]
        for part in (muon.reduce, muon.step, muon.broadcast):
            part()
            marks.append(perf_counter())
        steps.append([1000 * (end - begin) for begin, end in pairwise(marks)])
        losses.append(loss.item())
    kept = sum(momentum.nbytes for momentum in muon.momentum.values()) / 1e6
    return steps, kept, losses, torch.nn.utils.parameters_to_vector(matrices).detach()


def main():
    """Trains without and with owners, and shows what each rank computes, and the bits."""
    options = read_options(
        __doc__,
        nproc=2,
        owners=(["by-turns", "exercise", "solution"], "who decides which rank owns a matrix"),
    )
    find_owners = by_turns
    if options.owners != "by-turns":
        find_owners = import_module(f"tutorial.16_muon.{options.owners}").owners
    ways = {"everywhere": None, f"owners, {options.owners}": find_owners}
    found = {name: start(train, options.nproc, way) for name, way in ways.items()}
    show(found, options.picture)


if __name__ == "__main__":
    main()
