"""Times a training step of any model, this library's beside torch's DistributedDataParallel.

`python -m ddp_from_scratch.bench --help` is the program. From the bottom up:

    samples.py       arithmetic of timed steps: ratios with intervals; notices a busy machine
    workloads.py     models to train: built in, torchvision's, or the user's own
    prepare.py       makes a model ready for steps, with torch's classes or this library's
    contenders.py    ways to keep a model in step, the rows of the table
    timing.py        interleaved steps; the slowest rank counts
    verdict.py       the table of ratios, and the sentence under it
    job.py           the part of a rank: times contenders, and rank 0 writes them down
    ways.py          starts ranks: interleaved, with memory kept, or each contender alone
    main.py          the command line
"""
