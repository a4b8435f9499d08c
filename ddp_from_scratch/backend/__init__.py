"""Process groups whose ranks share a machine's memory: what the backends node and mpi are made of.

An all-reduce passes these files, from the top down:

    process_group.py  torch's call: checked, numbered, given a handle
    work.py           the handle, and the group's thread, which runs it while the caller continues
    barrier.py        the ranks meet: each sleeps until all are there, and compares operations
    all_reduce.py     chooses the way: eager, in place, staged, or messages alone
    stage.py          passes a tensor through shared memory, a piece at a time
    reduction.py      folds several tensors into one
    shared_memory.py  maps the memory, and puts a rank to sleep in it
    transport.py      the messages that a backend sends for it, by torch's store and gloo

MPI sends them in mpi_transport.py. `ddp_from_scratch.node` and `ddp_from_scratch.mpi` register the
backends. No file here imports MPI, but for those that begin with its name.
"""
