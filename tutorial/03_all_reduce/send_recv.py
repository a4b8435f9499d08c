"""Sends tensors between ranks, and sums them by sending all of them to rank 0.

python -m tutorial.03_all_reduce.send_recv
"""

from time import perf_counter, sleep

import torch
import torch.distributed as dist

from tutorial.options import read_options
from tutorial.ranks import start
from tutorial.show.send_recv import show


def first_message():
    """Rank 0 sends three numbers to rank 1, 50 ms late; returns this rank's numbers and ms."""
    rank = dist.get_rank()
    numbers = torch.tensor([1, 2, 3]) if rank == 0 else torch.zeros(3, dtype=torch.int64)
    begin = perf_counter()
    if rank == 0:
        sleep(0.05)
        dist.send(numbers, 1)
    elif rank == 1:
        dist.recv(numbers, 0)
    return numbers.tolist(), 1e3 * (perf_counter() - begin)


def all_reduce(tensor):
    """Sums the tensor over all ranks, in place. Returns the bytes that this rank sent."""
    rank, nproc = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        dist.send(tensor, 0)
        dist.recv(tensor, 0)
        return tensor.nbytes
    received = torch.empty_like(tensor)
    for other in range(1, nproc):
        dist.recv(received, other)
        tensor += received
    for other in range(1, nproc):
        dist.send(tensor, other)
    return (nproc - 1) * tensor.nbytes


def run():
    """Runs on each rank."""
    message = first_message()
    tensor = torch.full((1_000_000,), dist.get_rank() + 1.0)
    dist.barrier()  # all ranks wait here for the last one, and then begin together
    begin = perf_counter()
    sent = all_reduce(tensor)
    return message, tensor[0].item(), sent / 1e6, 1e3 * (perf_counter() - begin)


def main():
    """Starts the ranks, and shows what they return."""
    options = read_options(__doc__, nproc=3)
    show(start(run, options.nproc), options.picture)


if __name__ == "__main__":
    main()
