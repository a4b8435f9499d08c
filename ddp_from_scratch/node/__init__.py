"""Shared memory for the ranks of one machine, whatever backend carries their messages.

An all-reduce passes these files, from the top down:

    all_reduce.py         chooses the way: eager, in place, staged, or messages alone
    staging.py            passes a tensor through shared memory, a piece at a time
    windows.py            keeps tensors that live in shared memory
    barrier.py            waits for the other ranks, and compares their calls
    reduction.py          folds several tensors into one
    communicator.py       declares the messages that a backend sends for it
    shared_memory.py      maps the memory;  semaphore.py  puts a rank to sleep in it
"""
