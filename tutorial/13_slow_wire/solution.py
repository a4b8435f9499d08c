"""Solutions of chapter 13."""

from math import inf


def bytes_of_low_rank(rows, columns, rank):
    """Returns the bytes that PowerSGD sends for a gradient of this shape, in numbers of 4 bytes."""
    return 4 * rank * (rows + columns)


def keep_error(average):
    """Returns a function that averages as `average` does, but loses nothing."""
    return lambda gradient, state: _average_all(average, gradient, state)


def _average_all(average, gradient, state):
    whole = gradient + state.get("error", 0)
    mean, size = average(whole.clone(), state)
    state["error"] = whole - mean
    return mean, size


def bandwidth_that_hides(size, backward, latency, ranks, count):
    """Returns the least bandwidth at which overlap exposes only the last of `count` buckets."""
    # backward + bucket = backward / count + count * bucket, so count * bucket = backward.
    left = backward - count * 2 * (ranks - 1) * latency
    return 2 * (ranks - 1) / ranks * size / left if left > 0 else inf
