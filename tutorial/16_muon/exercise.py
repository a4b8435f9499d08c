"""Exercises of chapter 16: owners such that all ranks compute for about as long.

python -m pytest tutorial/16_muon
python -m tutorial.16_muon.muon --owners exercise
"""


def longest(costs, owners):
    """Returns the sum of the costs of the matrices of the rank that has the most to compute.

    `costs[n]` is the cost of matrix n, and `owners[n]` the rank that owns it. All ranks wait for
    that rank, so a step takes as long as it does.
    """
    raise NotImplementedError("longest: add up the costs of each owner; the largest sum")


def owners(costs, nproc):
    """Returns each matrix's owner: a list of ranks, in the order of the matrices.

    Go through the matrices, the largest cost first. Give each to the rank that has the least to
    compute so far; of several, to the lowest. Of matrices that cost the same, the first comes
    first. So every rank finds the same owners without a message.
    """
    raise NotImplementedError("owners: sort by cost, and keep what each rank has so far")
