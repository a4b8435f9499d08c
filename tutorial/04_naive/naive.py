"""Trains on several ranks with the textbook's loop, and shows how long they wait.

python -m tutorial.04_naive.naive
"""

from time import perf_counter, sleep

import torch
import torch.distributed as dist

from tutorial.options import read_options
from tutorial.ranks import start
from tutorial.show.naive import show

WIDTH, LAYERS, BATCH, STEPS = 512, 8, 120, 15
PHASES = "forward", "backward", "wait", "update"


def sync_gradients(model):
    """Replaces every gradient by its mean over all ranks."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def train(late):
    """Returns the start and end of each phase of each step, the losses and the parameters."""
    rank, nproc = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same parameters on all ranks
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.ReLU())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    steps, losses = [], []
    for step in range(STEPS):
        batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        x = batch.tensor_split(nproc)[rank]  # this rank's shard
        dist.barrier()
        marks = [perf_counter()]
        if rank == 1:
            sleep(late / 1000)
        loss = (model(x) - 1).square().mean()
        marks.append(perf_counter())
        optimizer.zero_grad()
        loss.backward()
        marks.append(perf_counter())
        sync_gradients(model)
        marks.append(perf_counter())
        optimizer.step()
        marks.append(perf_counter())
        steps.append(marks)
        losses.append(loss.item())
    return steps, losses, torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def main():
    """Trains on the ranks, then in one process with the whole batch, and shows both."""
    options = read_options(
        __doc__, nproc=2, late=(0.0, "ms by which rank 1 begins each step too late")
    )
    results = start(train, options.nproc, options.late)
    alone = start(train, 1, 0)  # one rank: its shard is the whole batch
    show(PHASES, results, *alone, options.picture)


if __name__ == "__main__":
    main()
