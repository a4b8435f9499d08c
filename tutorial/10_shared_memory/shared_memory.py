"""All-reduces in memory that all ranks share, without a message; beside gloo, and beside a copy.

python -m tutorial.10_shared_memory.shared_memory
"""

import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter, sleep

import torch
import torch.distributed as dist

from tutorial.options import read_options
from tutorial.ranks import start
from tutorial.show.shared_memory import show

SIZES = [4**k for k in range(4, 12)]  # numbers in a tensor: 1 kB to 16 MB
ROUNDS = 9


class SharedMemory:
    """A row of numbers for each rank, and one for the sum, in memory that all of them map.

    Each rank maps the same pages of a file: what one rank writes there, the others read.
    """

    def __init__(self, folder, size):
        self.rank, self.nproc = dist.get_rank(), dist.get_world_size()
        rows = self.nproc + 1
        numbers = torch.from_file(f"{folder}/{size}", shared=True, size=rows * size)
        self.rows, self.total = numbers.view(rows, size)[:-1], numbers.view(rows, size)[-1]
        flags = f"{folder}/{size}-flags"
        self.flags = torch.from_file(flags, shared=True, size=self.nproc, dtype=torch.int64)
        self.meetings = 0
        dist.barrier()  # all ranks have mapped the file, and its flags are 0

    def meet(self):
        """A barrier: waits until all ranks have called it as often as this one."""
        self.meetings += 1
        self.flags[self.rank] = self.meetings  # no other rank writes this one
        while self.flags.min() < self.meetings:
            sleep(0)  # a rank that is not here yet may need the core

    def all_reduce(self, tensor):
        """Replaces the tensor by the sum of all ranks' tensors."""
        self.rows[self.rank].copy_(tensor)
        self.meet()  # now all rows are there
        mine = slice(*chunk(self.rank, self.nproc, len(tensor)))
        torch.sum(self.rows[:, mine], 0, out=self.total[mine])
        self.meet()  # now the whole sum is there
        tensor.copy_(self.total)


def chunk(rank, nproc, size):
    """Returns the begin and end of the part that a rank adds up; all parts cover the whole."""
    return rank * size // nproc, (rank + 1) * size // nproc


def measure(folder):
    """Returns for each size the ms of gloo, of shared memory and of a copy, and `same_sum`."""
    results = []
    for size in SIZES:
        memory, tensor, other = SharedMemory(folder, size), torch.empty(size), torch.empty(size)
        ways = dist.all_reduce, memory.all_reduce, other.copy_
        row = [median(timed(way, tensor) for _ in range(ROUNDS)) for way in ways]
        results.append((*row, same_sum(memory, size)))
    return results


def timed(way, tensor):
    """Returns the ms of one call, on all ranks at once."""
    tensor.fill_(1.0)
    dist.barrier()
    begin = perf_counter()
    way(tensor)
    return 1000 * (perf_counter() - begin)


def same_sum(memory, size):
    """Returns True if both ways give the same numbers."""
    ours = torch.randn(size)
    theirs = ours.clone()
    memory.all_reduce(ours)
    dist.all_reduce(theirs)
    return torch.allclose(ours, theirs)


def main():
    """Starts the ranks, and shows the times by size."""
    options = read_options(__doc__, nproc=2)
    # On Linux, the files of this folder lie in memory only.
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        rows = start(measure, options.nproc, folder)[0]
    show(dict(zip(SIZES, rows, strict=True)), options.nproc, options.picture)


if __name__ == "__main__":
    main()
