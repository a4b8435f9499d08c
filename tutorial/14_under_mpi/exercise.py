"""Exercises of chapter 14: ranks on machines that differ.

python -m pytest tutorial/14_under_mpi
"""


def rank_of(counts, node_rank, local_rank):
    """Returns the rank of the process with this local rank on this machine.

    `counts` has the number of processes of each machine, as in [4, 2, 3].
    """
    raise NotImplementedError("rank_of: count the processes of the machines before, then add")


def place_of(counts, rank):
    """Returns a rank's machine number and local rank: the inverse of `rank_of`."""
    raise NotImplementedError("place_of: go through the machines until the rank is on one")


def counts_of(text):
    """Returns the number of processes of each machine, from SLURM_STEP_TASKS_PER_NODE.

    "4(x2),3" are three machines with 4, 4 and 3 processes; "2" is one machine with 2.
    """
    raise NotImplementedError("counts_of: split at commas; (x2) says twice")
