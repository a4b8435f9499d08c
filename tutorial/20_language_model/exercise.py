"""Exercises of chapter 20: numbers that are compared between trainings, and a validation.

python -m pytest tutorial/20_language_model
"""


def bits_per_byte(loss):
    """Returns the bits that a byte costs with a model of this loss.

    The loss is the mean of -ln(chance of the byte that follows). A bit halves the chance.
    """
    raise NotImplementedError("bits_per_byte: from the natural logarithm to that of 2")


def efficiency(alone, together, nproc):
    """Returns which part of `nproc` times the speed of one process is reached.

    `alone` and `together` are the times of a step with the same whole batch. With half of the time
    on 2 ranks it is 1, and with the same time 0.5.
    """
    raise NotImplementedError("efficiency: the speedup, divided by the number of ranks")


def validate(loss_of, windows):
    """Returns the mean loss over all windows of all ranks: the same number on every rank.

    `windows` is a list of this rank's windows, and `loss_of(window)` a tensor with the loss of one.
    Ranks may have different numbers of windows, and a rank may have none. Call one all-reduce.
    """
    raise NotImplementedError("validate: all-reduce a tensor of two numbers, a sum and a count")
