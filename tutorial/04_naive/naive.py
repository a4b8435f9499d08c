"""Trains on several ranks with the textbook's loop, and shows how long they wait.

python -m tutorial.04_naive.naive
"""

from itertools import pairwise
from statistics import median
from time import perf_counter, sleep

import torch
import torch.distributed as dist

from tutorial import pictures
from tutorial.options import read_options
from tutorial.ranks import start

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
    """Starts the ranks, prints the median of each phase, and draws the median step."""
    options = read_options(
        __doc__, nproc=2, late=(0.0, "ms by which rank 1 begins each step too late")
    )
    results = start(train, options.nproc, options.late)
    times = []
    for rank, (steps, _, _) in enumerate(results):
        spans = [[1000 * (end - begin) for begin, end in pairwise(marks)] for marks in steps]
        phases = dict(zip(PHASES, map(median, zip(*spans, strict=True)), strict=True))
        times.append(phases)
        print(f"rank {rank}: " + ", ".join(f"{name} {ms:.1f}" for name, ms in phases.items()), "ms")
    share = sum(phases["wait"] / sum(phases.values()) for phases in times) / len(times)
    print(f"{100 * share:.0f} % of a step is waiting")

    (_, losses, parameters), (_, _, others) = results[:2]
    ((alone_steps, _, alone),) = start(train, 1, 0)  # one rank: its shard is the whole batch
    ms, alone_ms = (
        1000 * median(marks[-1] - marks[0] for marks in steps)
        for steps in (results[0][0], alone_steps)
    )
    print(f"a step takes {ms:.1f} ms; in one process with the whole batch {alone_ms:.1f} ms")
    print(f"loss of rank 0: {losses[0]:.4f} in its first step, {losses[-1]:.4f} in its last")
    print(f"parameters of rank 0 and rank 1 differ by {(parameters - others).abs().max():.0e},")
    print(f"and from those of one process by {(parameters - alone).abs().max():.0e}")

    steps = zip(*(steps for steps, _, _ in results), strict=True)
    step = sorted(steps, key=lambda ranks: ranks[0][-1] - ranks[0][0])[STEPS // 2]
    begin = min(marks[0] for marks in step)
    rows = {}
    for rank, marks in enumerate(step):
        spans = pairwise(1000 * (mark - begin) for mark in marks)
        rows[f"rank {rank}"] = [(name, *s) for name, s in zip(PHASES, spans, strict=True)]
    pictures.timelines(options.picture, {"one step": rows})


if __name__ == "__main__":
    main()
