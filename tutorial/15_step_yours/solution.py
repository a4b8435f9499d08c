"""Solutions of chapter 15."""

import torch.distributed as dist


def predict_memory(count, nproc):
    """Predicts the bytes that a rank holds with Adam, if it steps its own share."""
    return {"parameters": 4 * count, "gradients": 4 * count, "state": 8 * count // nproc + 4}


def step(parameters, gradients, optimizer, limit):
    """Takes a step of this rank's share, with gradients clipped to the length `limit`."""
    rank, nproc = dist.get_rank(), dist.get_world_size()
    mine, gradient = parameters.chunk(nproc)[rank], gradients.chunk(nproc)[rank]
    dist.reduce_scatter_tensor(gradient, gradients)
    gradient /= nproc
    squares = gradient.square().sum()
    dist.all_reduce(squares)  # a number, and not the gradients
    length = squares.sqrt()
    if length > limit:
        gradient *= limit / length
    optimizer.step()
    dist.all_gather_into_tensor(parameters, mine)
