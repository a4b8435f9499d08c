"""Exercises of chapter 9: read four reports, and write what keeps ranks from hanging.

python -m pytest tutorial/09_hang

The folder `reports` has reports from four other programs, with four ranks each.
"""


def late_by_py_spy():
    """Returns the rank that keeps the others waiting in reports/py_spy.txt."""
    raise NotImplementedError("late_by_py_spy: return the number of the rank")


def late_by_stall_after():
    """Returns the rank that keeps the others waiting in reports/stall_after.txt.

    That rank is not the one that reports.
    """
    raise NotImplementedError("late_by_stall_after: return the number of the rank")


def other_by_comparison():
    """Returns the rank that calls a different operation in reports/comparison.txt."""
    raise NotImplementedError("other_by_comparison: return the number of the rank")


def skipped_by_flight_recorder():
    """Returns the rank that has skipped a call in reports/flight_recorder.txt.

    The file is a table, made from the records of the four ranks.
    """
    raise NotImplementedError("skipped_by_flight_recorder: return the number of the rank")


def all_can(this_rank_can):
    """Returns True if `this_rank_can` is True on every rank: the same answer on all of them.

    With it, a loop ends on all ranks when the first has no batch left, and all ranks skip a step
    that one cannot take. With `dist.ReduceOp.MIN`, all-reduce gives the smallest, not the sum.
    """
    raise NotImplementedError("all_can: all-reduce a tensor of one number")


def train(batches, step):
    """Calls `step(batch)` for this rank's batches, as long as every rank has one.

    `batches` is a list whose length differs between ranks. `step` calls collectives. Use `all_can`.
    """
    raise NotImplementedError("train: ask all_can before each step, on every rank")
