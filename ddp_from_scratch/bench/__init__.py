"""Times a training step of any model, this library's beside torch's DistributedDataParallel.

`python -m ddp_from_scratch.bench --help` is the program. From the bottom up:

    samples.py       arithmetic of timed steps: ratios with intervals; notices a busy machine
    workloads.py     models to train: built in, torchvision's, or the user's own
    contenders.py    ways to keep a model in step, torch's and this library's: rows of the table
    timing.py        interleaved steps; the slowest rank counts
    verdict.py       the table of ratios, and the sentence under it
    ways.py          the part of a rank; starts ranks: interleaved, with memory kept, each alone
    main.py          the command line
"""
