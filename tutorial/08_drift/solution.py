"""Solutions of chapter 8."""

from importlib import import_module

import torch
import torch.distributed as dist
from torch import nn

drift = import_module("tutorial.08_drift.drift")


def first_parameters(watch):
    """Begins with different parameters on each rank."""
    torch.manual_seed(dist.get_rank())
    model = drift.make_model()
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(drift.STEPS):
        optimizer.zero_grad()
        drift.loss_of(model, drift.shard(step)).backward()
        drift.average(model)
        optimizer.step()
        watch(model)


def late_average(watch):
    """Averages the gradients after the optimizer has used them."""
    torch.manual_seed(0)
    model = drift.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(drift.STEPS):
        optimizer.zero_grad()
        drift.loss_of(model, drift.shard(step)).backward()
        drift.average(model)
        optimizer.step()
        watch(model)


def own_rate(watch):
    """Lowers the learning rate when the loss no longer falls: each rank looks only at its own."""
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
        of_all = loss.detach().clone()
        dist.all_reduce(of_all)
        schedule.step(of_all.item() / dist.get_world_size())
        watch(model)


def skipped_step(watch):
    """Skips a step whose gradient is unusually large: each rank looks only at its own."""
    torch.manual_seed(0)
    model = drift.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(drift.STEPS):
        optimizer.zero_grad()
        drift.loss_of(model, drift.shard(step)).backward()
        drift.average(model)
        usual = nn.utils.get_total_norm(p.grad for p in model.parameters()) < drift.LIMIT
        if usual:
            optimizer.step()
        watch(model)


def own_branch(watch):
    """Sends each shard through one of two branches, and averages the gradients that exist."""
    torch.manual_seed(0)
    model = nn.ModuleList([drift.make_model(), drift.make_model()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(drift.STEPS):
        x, y = drift.shard(step)
        branch = model[int(x.sum() > 0)]
        optimizer.zero_grad()
        drift.loss_of(branch, (x, y)).backward()
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        drift.average(model)
        optimizer.step()
        watch(model)


def running_mean(watch):
    """Averages all gradients; batch norm also keeps a running mean of its inputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(drift.FEATURES), drift.make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(drift.STEPS):
        optimizer.zero_grad()
        drift.loss_of(model, drift.shard(step)).backward()
        drift.average(model)
        optimizer.step()
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)
        watch(model)


def shard_of_epoch(epoch, count):
    """Returns the numbers of the examples that this rank uses in an epoch, as a list."""
    numbers = torch.randperm(count, generator=torch.Generator().manual_seed(epoch)).tolist()
    nproc = dist.get_world_size()
    return numbers[: count // nproc * nproc][dist.get_rank() :: nproc]


def save_and_load(model, file):
    """Saves rank 0's model, then loads the file on all ranks."""
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), file)
    dist.barrier()
    model.load_state_dict(torch.load(file))
