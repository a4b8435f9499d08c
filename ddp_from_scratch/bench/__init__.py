"""Times training steps of any model, with this library and with torch's DistributedDataParallel.

`python -m ddp_from_scratch.bench --help` explains the program. From the bottom up:

    samples.py       computes ratios of timed steps with intervals; notices a busy machine
    workloads.py     models to train: built in, from torchvision, or the user's own
    contenders.py    rows of the table: implementations of data-parallel training
    timing.py        times interleaved steps; the slowest rank counts
    verdict.py       prints the table of ratios, and a sentence under it
    ways.py          starts ranks (interleaved, with memory kept, each alone) and runs their part
    main.py          the command line
"""
