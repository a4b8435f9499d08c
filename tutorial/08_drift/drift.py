"""Six training loops that go wrong without an error, and how far each takes the ranks apart.

python -m tutorial.08_drift.drift
"""

import torch
import torch.distributed as dist
from torch import nn

import ddp_from_scratch as ddp
from tutorial.options import read_options
from tutorial.ranks import start
from tutorial.show.drift import show

STEPS, BATCH, FEATURES, LIMIT = 40, 64, 8, 0.6


def first_parameters(watch):
    """Begins with different parameters on each rank."""
    torch.manual_seed(dist.get_rank())
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, shard(step)).backward()
        average(model)
        optimizer.step()
        watch(model)


def late_average(watch):
    """Averages the gradients after the optimizer has used them."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, shard(step)).backward()
        optimizer.step()
        average(model)
        watch(model)


def own_rate(watch):
    """Lowers the learning rate when the loss no longer falls: each rank looks only at its own."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=4)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, shard(step))
        loss.backward()
        average(model)
        optimizer.step()
        schedule.step(loss.item())
        watch(model)


def skipped_step(watch):
    """Skips a step whose gradient is unusually large: each rank looks only at its own."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, shard(step)).backward()
        usual = nn.utils.get_total_norm(p.grad for p in model.parameters()) < LIMIT
        average(model)
        if usual:
            optimizer.step()
        watch(model)


def own_branch(watch):
    """Sends each shard through one of two branches, and averages the gradients that exist."""
    torch.manual_seed(0)
    model = nn.ModuleList([make_model(), make_model()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = shard(step)
        branch = model[int(x.sum() > 0)]
        optimizer.zero_grad()
        loss_of(branch, (x, y)).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        optimizer.step()
        watch(model)


def running_mean(watch):
    """Averages all gradients; batch norm also keeps a running mean of its inputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(FEATURES), make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, shard(step)).backward()
        average(model)
        optimizer.step()
        watch(model)


PROGRAMS = first_parameters, late_average, own_rate, skipped_step, own_branch, running_mean


def make_model():
    """Returns a small model, whose parameters depend on the seed."""
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))


def shard(step):
    """This rank's part of a step's batch."""
    batch = torch.randn(BATCH, FEATURES, generator=torch.Generator().manual_seed(step))
    x = batch.tensor_split(dist.get_world_size())[dist.get_rank()]
    return x, x.sum(1, keepdim=True).sin()


def loss_of(model, examples):
    """The mean loss over these examples."""
    x, y = examples
    return nn.functional.mse_loss(model(x), y)


def average(model):
    """Replaces every gradient by its mean over all ranks, as in chapter 4."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


class Distances:
    """The largest distance of any number in a model from rank 0's, after each step."""

    def __init__(self):
        self.after, self.model = [], None

    def __call__(self, model):
        """Measures the distance. All ranks call it."""
        state = [tensor.detach().flatten().float() for tensor in model.state_dict().values()]
        mine = torch.cat(state)
        of_rank_0 = mine.clone()
        dist.broadcast(of_rank_0, src=0)
        distance = (mine - of_rank_0).abs().max()
        dist.all_reduce(distance, dist.ReduceOp.MAX)
        self.after.append(distance.item())
        self.model = model


def run(name):
    """Runs one of the programs; returns the distances, and what the library's check says."""
    distances = Distances()
    globals()[name](distances)
    try:
        ddp.check_sync(distances.model)
    except RuntimeError as error:
        return distances.after, str(error)
    return distances.after, "no difference"


def main():
    """Runs the six programs, and shows how far the ranks of each are apart."""
    options = read_options(__doc__, nproc=2)
    show({p.__name__: start(run, options.nproc, p.__name__)[0] for p in PROGRAMS}, options.picture)


if __name__ == "__main__":
    main()
