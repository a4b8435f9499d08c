"""Sends tensors between ranks, and sums them by sending all of them to rank 0.

python -m tutorial.03_all_reduce.send_recv
"""

from time import perf_counter, sleep

import torch
import torch.distributed as dist

from tutorial import pictures
from tutorial.options import read_options
from tutorial.ranks import start


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
    """Starts the ranks; prints and draws what they return."""
    options = read_options(__doc__, nproc=3)
    results = start(run, options.nproc)
    (sent, _), (received, waited) = results[0][0], results[1][0]
    print(f"rank 0 sends {sent}")
    print(f"rank 1 receives {received} after {waited:.0f} ms")
    print("the sum of a million numbers of each rank, through rank 0")
    for rank, (_, total, megabytes, ms) in enumerate(results):
        print(f"rank {rank} has {total:.0f}, sent {megabytes:4.1f} MB, ready after {ms:5.1f} ms")
    bars = {f"rank {rank}": {"": megabytes} for rank, (_, _, megabytes, _) in enumerate(results)}
    pictures.bars(options.picture, {("sent in an all-reduce through rank 0", "MB"): bars})


if __name__ == "__main__":
    main()
