"""Exercises of chapter 10: an all-reduce in place, where the tensors lie in shared memory already.

python -m pytest tutorial/10_shared_memory
"""


def chunk(rank, nproc, size):
    """Returns begin and end of the numbers that this rank adds up, of `size` numbers.

    All chunks together must be the whole, without gaps, and no two may differ by more than one
    number. The size need not be a multiple of the number of ranks.
    """
    raise NotImplementedError("chunk: return the begin and the end, two whole numbers")


def all_reduce_in_place(rows, rank, meet):
    """Replaces every rank's row by the sum of all rows.

    `rows` has the shape (ranks, numbers) and lies in memory that all ranks share; row r is rank r's
    tensor. So nothing need be copied in or out, and there is no row for the total: each rank writes
    the sum of its chunk into *every* row. `meet()` waits for all ranks. Where must it be called, so
    that no rank reads a number that another has replaced already, or returns too early?
    """
    raise NotImplementedError("all_reduce_in_place: meet, add up your chunk, write it, meet")
