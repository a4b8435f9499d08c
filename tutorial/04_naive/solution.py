"""Solutions of chapter 4."""

import torch.distributed as dist


def broadcast_model(model):
    """Gives all ranks rank 0's parameters and buffers, in place."""
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)


def train_step(model, optimizer, loss_of, x):
    """Trains for one step with this rank's shard, as one process would with the whole batch."""
    optimizer.zero_grad()
    loss_of(model(x)).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()  # all_reduce gives the sum, not the mean
    optimizer.step()
