"""Solutions of chapter 14."""

import re


def rank_of(counts, node_rank, local_rank):
    """Returns the rank of the process with this local rank on this machine."""
    return sum(counts[:node_rank]) + local_rank


def place_of(counts, rank):
    """Returns a rank's machine number and local rank: the inverse of `rank_of`."""
    node_rank = 0
    while rank >= counts[node_rank]:
        rank -= counts[node_rank]
        node_rank += 1
    return node_rank, rank


def counts_of(text):
    """Returns the number of processes of each machine, from SLURM_STEP_TASKS_PER_NODE."""
    counts = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts
