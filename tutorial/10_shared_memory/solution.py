"""Solutions of chapter 10."""


def chunk(rank, nproc, size):
    """Returns begin and end of the numbers that this rank adds up."""
    return rank * size // nproc, (rank + 1) * size // nproc


def all_reduce_in_place(rows, rank, meet):
    """Replaces every rank's row by the sum of all rows."""
    meet()  # now every rank has written its row
    begin, end = chunk(rank, *rows.shape)
    # A new tensor: the sum is complete before the first number is replaced. No other rank reads or
    # writes this chunk, so there is no barrier between reading and writing.
    rows[:, begin:end] = rows[:, begin:end].sum(0)
    meet()  # now every rank has written its chunk
