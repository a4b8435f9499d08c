"""Exercises of chapter 13: error feedback, which sends later what was not sent; a wire to buy.

python -m pytest tutorial/13_slow_wire
python -m tutorial.13_slow_wire.slow_wire --keep exercise
"""


def bytes_of_low_rank(rows, columns, rank):
    """Returns the bytes that PowerSGD sends for a gradient of this shape, in numbers of 4 bytes."""
    raise NotImplementedError("bytes_of_low_rank: it sends a matrix p and a matrix q")


def keep_error(average):
    """Returns a function that averages as `average` does, but loses nothing.

    `average(gradient, state)` returns the mean over ranks and the bytes that it sent. The mean
    lacks what was not sent. Your function has the same arguments and results. It keeps one
    tensor in `state`, a dict that lasts from step to step: what the gradients contained and
    the means did not. Give `average` the sum of the gradient and that; `average` may change the
    tensor that it gets.
    """
    raise NotImplementedError("keep_error: define a function inside, and return it")


def bandwidth_that_hides(size, backward, latency, ranks, count):
    """Returns the least bandwidth at which overlap exposes only the last of `count` buckets.

    `size` is that of all gradients, and `count` 2 or more. All is in seconds and bytes. Returns
    `math.inf` if the messages alone take as long as backward, or longer.
    """
    raise NotImplementedError("bandwidth_that_hides: all of the wire's time is that of backward")
