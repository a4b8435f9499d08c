"""All-reduces in a ring, from send and recv, chunk by chunk.

python -m tutorial.03_all_reduce.ring
"""

from time import perf_counter

import torch
import torch.distributed as dist

from tutorial.options import read_options
from tutorial.ranks import start
from tutorial.show.ring import show


def ring_all_reduce(tensor, after_step=lambda: None):
    """Sums the tensor over all ranks, in place. Returns the bytes that this rank sent."""
    rank, nproc = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % nproc, (rank - 1) % nproc
    chunks = tensor.tensor_split(nproc)  # views: what is written to them is in the tensor
    sent = 0
    for step in range(2 * (nproc - 1)):
        outgoing, chunk = chunks[(rank - step) % nproc], chunks[(rank - step - 1) % nproc]
        received = torch.empty_like(chunk)
        # Not send: every rank would wait until its neighbour receives, and none would.
        sending = dist.isend(outgoing, right)
        dist.recv(received, left)
        sending.wait()
        if step < nproc - 1:
            chunk += received  # reduce-scatter: it grows into a sum on its way round
        else:
            chunk.copy_(received)  # all-gather: the sums go round once more
        sent += outgoing.nbytes
        after_step()
    return sent


def run():
    """Returns the chunks after each step, the MB sent, and the ms of this ring and of torch."""
    rank, nproc = dist.get_rank(), dist.get_world_size()
    small = torch.full((nproc,), 10**rank)  # so a sum's digits show whose numbers are in it
    steps = [small.tolist()]
    ring_all_reduce(small, lambda: steps.append(small.tolist()))
    large, times = torch.ones(1_000_000), []
    for all_reduce in (ring_all_reduce, dist.all_reduce):
        all_reduce(large.clone())  # the first call is slower
        dist.barrier()
        begin = perf_counter()
        sent = all_reduce(large.clone())
        times.append(1e3 * (perf_counter() - begin))
        if all_reduce is ring_all_reduce:
            megabytes = sent / 1e6
    return steps, megabytes, times


def main():
    """Starts the ranks, and shows each step of the ring, and its times."""
    options = read_options(__doc__, nproc=3)
    show(start(run, options.nproc), options.picture)


if __name__ == "__main__":
    main()
