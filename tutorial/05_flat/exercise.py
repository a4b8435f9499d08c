"""Exercises of chapter 5: predict which way to send gradients is faster.

All times are in seconds, sizes in bytes, bandwidths in bytes per second.

    python -m pytest tutorial/05_flat
"""


def one_by_one(sizes, latency, bandwidth):
    """Returns the time of an all-reduce for each gradient, one after another.

    `sizes` are the gradients' sizes. An all-reduce of b bytes takes latency + b / bandwidth.
    """
    raise NotImplementedError("one_by_one: add up the times of all all-reduces")


def in_one_piece(sizes, latency, bandwidth, copy_bandwidth):
    """Returns the time of one all-reduce of all gradients, in one flat tensor.

    Each byte is copied twice, into the tensor and out of it, at `copy_bandwidth`. Divisions are
    left out here: both ways have them.
    """
    raise NotImplementedError("in_one_piece: two copies of all bytes, and one all-reduce")


def break_even(count, latency, copy_bandwidth):
    """Returns the total bytes of `count` gradients at which both ways take equally long.

    With fewer bytes the flat tensor wins, with more it loses. Bandwidth is not needed. Why?
    """
    raise NotImplementedError("break_even: where two copies cost what count - 1 latencies do")
