"""Times training steps of any model, with this library and with torch's DistributedDataParallel.

`python -m ddp_from_scratch.bench --help` explains the program. From the bottom up:

    results.py       ratios of timed steps with intervals, the table, a sentence under it, files
    workloads.py     models to train: built in, from torchvision, or the user's own
    contenders.py    rows of the table: implementations of data-parallel training
    timing.py        starts ranks (interleaved, with memory kept, each alone), which time steps
    __main__.py      the command line
"""
