"""Exercises of chapter 4: two mistakes of the textbook's loop that raise no error.

python -m pytest tutorial/04_naive
"""

import torch.distributed as dist


def broadcast_model(model):
    """Gives all ranks rank 0's parameters and buffers, in place.

    A program without a seed begins with different parameters on each rank, so the mean of the
    gradients belongs to none of them. A model keeps buffers beside its parameters, such as
    batch norm's running mean. You need `dist.broadcast(tensor, src=0)`. Autograd must not
    record it, so send `parameter.detach()`, which is the same memory.
    """
    raise NotImplementedError("broadcast_model: broadcast every parameter and every buffer")


def train_step(model, optimizer, loss_of, x):
    """Trains for one step with this rank's shard `x`, as one process would with the whole batch.

    The loss falls and all ranks agree. But they do not take the step that one process would take.
    Find the mistake, repair it, and delete the line below.
    """
    raise NotImplementedError("train_step: repair the lines below, then delete this one")
    optimizer.zero_grad()
    loss_of(model(x)).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
