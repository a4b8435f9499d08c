"""torch.distributed's "node" backend: shared memory within a machine, gloo for everything else.

Importing this module registers the backend:

    import ddp_from_scratch.node
    torch.distributed.init_process_group("node")      # under torchrun, say

A Reducer on a gloo group opens such a group beside it (`shared_memory_beside`). The mpi backend is
made of the same parts, with MPI in place of gloo. An all-reduce passes these files, from the top
down:

    shared_memory_group.py  torch's call: numbered, given a handle; work.py has both
    worker.py               the group's thread runs it while the caller continues
    barrier.py              the ranks meet: asleep until all have come, and compared
    all_reduce.py           chooses the way: eager, in place, staged, or messages alone
    staging.py              passes a tensor through shared memory, a piece at a time
    windows.py              keeps tensors that live in shared memory
    reduction.py            folds several tensors into one
    communicator.py         declares the messages that a backend sends for it
    store_communicator.py   sends them through torch's store and gloo
    shared_memory.py        maps the memory;  semaphore.py  puts a rank to sleep in it
"""

from ddp_from_scratch.node.process_group import ProcessGroupNode, register, shared_memory_beside
from ddp_from_scratch.node.shared_memory_group import SharedMemoryGroup

__all__ = ["ProcessGroupNode", "SharedMemoryGroup", "shared_memory_beside"]

register()
