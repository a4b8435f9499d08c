"""Process groups over shared memory, the common part of the backends node and mpi.

An all-reduce goes through these files from top to bottom:

    process_group.py  checks torch's call, numbers it and makes its work handle
    work.py           runs operations on the group's thread while the caller continues
    barrier.py        each rank sleeps until all have arrived, then compares operations
    all_reduce.py     chooses an algorithm: eager, in place, staged, or messages
    stage.py          passes tensors through shared memory, a piece at a time
    reduction.py      folds several tensors into one
    shared_memory.py  maps the memory and its semaphores
    transport.py      sends messages over torch's store and gloo

The other collectives have `exchange.py` in place of `all_reduce.py`, and choose in the same way.

`traits.py` tells the code above what a group can do.

`calls.py` and `call_watch.py` find ranks that are in different collectives of gloo. `mpi_group.py`
sends the messages over MPI, and imports it; `mpi_start.py` starts it.
`ddp_from_scratch.node` and `ddp_from_scratch.mpi` register the backends.
"""
