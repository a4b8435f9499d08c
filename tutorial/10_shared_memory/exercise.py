"""Exercises of chapter 10: an all-reduce in place, for tensors that lie in shared memory already.

python -m pytest tutorial/10_shared_memory
"""


def chunk(rank, nproc, size):
    """Returns the begin and end of the part of `size` numbers that this rank adds up.

    All chunks together must cover the whole, without gaps. No two may differ by more than one
    number. The size need not be a multiple of the number of ranks.
    """
    raise NotImplementedError("chunk: return the begin and the end, two whole numbers")


def all_reduce_in_place(rows, rank, meet):
    """Replaces every rank's row by the sum of all rows.

    `rows` has the shape (ranks, numbers) and lies in memory that all ranks share. Row r is rank r's
    tensor. So there are no copies in or out, and there is no row for the total: each rank writes
    the sum of its chunk into *every* row. `meet()` waits for all ranks. Where must you call it, so
    that no rank reads a number that another has already replaced, or returns too early?
    """
    raise NotImplementedError("all_reduce_in_place: meet, add up your chunk, write it, meet")
