"""Exercises of chapter 8: repair the six loops, and write two parts that are often forgotten.

python -m pytest tutorial/08_drift

In the six loops, delete the line that raises, and repair the rest. `watch(model)` measures the
distance between ranks: leave it the last line of a step. All ranks must end with what one process
computes from the whole batches, where there is such a process.
"""

from importlib import import_module

import torch
import torch.distributed as dist
from torch import nn

drift = import_module("tutorial.08_drift.drift")


def first_parameters(watch):
    """Begins with different parameters on each rank."""
    raise NotImplementedError("first_parameters: give all ranks the same parameters first")
    torch.manual_seed(dist.get_rank())
    model = drift.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(drift.STEPS):
        optimizer.zero_grad()
        drift.loss_of(model, drift.shard(step)).backward()
        drift.average(model)
        optimizer.step()
        watch(model)


def late_average(watch):
    """Averages the gradients after the optimizer has used them."""
    raise NotImplementedError("late_average: put the average in its place")
    torch.manual_seed(0)
    model = drift.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(drift.STEPS):
        optimizer.zero_grad()
        drift.loss_of(model, drift.shard(step)).backward()
        optimizer.step()
        drift.average(model)
        watch(model)


def own_rate(watch):
    """Lowers the learning rate when the loss no longer falls: each rank looks only at its own."""
    raise NotImplementedError("own_rate: let all ranks' schedules see the same number")
    torch.manual_seed(0)
    model = drift.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=4)
    for step in range(drift.STEPS):
        optimizer.zero_grad()
        loss = drift.loss_of(model, drift.shard(step))
        loss.backward()
        drift.average(model)
        optimizer.step()
        schedule.step(loss.item())
        watch(model)


def skipped_step(watch):
    """Skips a step whose gradient is unusually large: each rank looks only at its own."""
    raise NotImplementedError("skipped_step: make all ranks decide together")
    torch.manual_seed(0)
    model = drift.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(drift.STEPS):
        optimizer.zero_grad()
        drift.loss_of(model, drift.shard(step)).backward()
        usual = nn.utils.get_total_norm(p.grad for p in model.parameters()) < drift.LIMIT
        drift.average(model)
        if usual:
            optimizer.step()
        watch(model)


def own_branch(watch):
    """Sends each shard through one of two branches, and averages the gradients that exist."""
    raise NotImplementedError("own_branch: average the same tensors on all ranks; None is zeros")
    torch.manual_seed(0)
    model = nn.ModuleList([drift.make_model(), drift.make_model()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(drift.STEPS):
        x, y = drift.shard(step)
        branch = model[int(x.sum() > 0)]
        optimizer.zero_grad()
        drift.loss_of(branch, (x, y)).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        optimizer.step()
        watch(model)


def running_mean(watch):
    """Averages all gradients; batch norm also keeps a running mean of its inputs."""
    raise NotImplementedError("running_mean: share what batch norm remembers, too")
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(drift.FEATURES), drift.make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(drift.STEPS):
        optimizer.zero_grad()
        drift.loss_of(model, drift.shard(step)).backward()
        drift.average(model)
        optimizer.step()
        watch(model)


def shard_of_epoch(epoch, count):
    """Returns the numbers of the examples that this rank uses in an epoch, as a list.

    Shuffle the numbers 0 to count - 1 in a different order in each epoch: `torch.randperm(count,
    generator=...)`, with a generator whose seed is the epoch. All ranks must use the same order.
    Each takes every nproc-th number of the result, beginning at its own rank. Drop what is left
    over at the end, so that all ranks have the same number.
    """
    raise NotImplementedError("shard_of_epoch: shuffle with the epoch as the seed, take your part")


def save_and_load(model, file):
    """Saves rank 0's model, then loads the file on all ranks.

    One rank writes: several would corrupt the file. The others must not read an incomplete file.
    `dist.barrier()` is the collective that sends no data: it ends when all ranks have called it.
    """
    raise NotImplementedError("save_and_load: one rank saves, all meet, all load")
