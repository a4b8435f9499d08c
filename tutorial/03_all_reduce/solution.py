"""Solutions of chapter 3."""

import torch
import torch.distributed as dist


def tree_broadcast(tensor, root):
    """Copies rank `root`'s tensor into every other rank's `tensor`, in place."""
    nproc = dist.get_world_size()
    place = (dist.get_rank() - root) % nproc
    distance = 1
    while distance < nproc:
        if place < distance and place + distance < nproc:
            dist.send(tensor, (place + distance + root) % nproc)
        elif distance <= place < 2 * distance:
            dist.recv(tensor, (place - distance + root) % nproc)
        distance *= 2


def reduce_scatter(tensor):
    """Returns chunk number `rank` of the sum over all ranks."""
    rank, nproc = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(nproc)
    for step in range(1, nproc):
        outgoing, chunk = chunks[(rank - step) % nproc], chunks[(rank - step - 1) % nproc]
        received = torch.empty_like(chunk)
        sending = dist.isend(outgoing, (rank + 1) % nproc)
        dist.recv(received, (rank - 1) % nproc)
        sending.wait()
        chunk += received
    return chunks[rank]
