"""Solutions of chapter 5."""


def one_by_one(sizes, latency, bandwidth):
    """Returns the time of an all-reduce for each gradient, one after another."""
    return sum(latency + size / bandwidth for size in sizes)


def in_one_piece(sizes, latency, bandwidth, copy_bandwidth):
    """Returns the time of one all-reduce of all gradients, in one flat tensor."""
    return latency + sum(sizes) / bandwidth + 2 * sum(sizes) / copy_bandwidth


def break_even(count, latency, copy_bandwidth):
    """Returns the total bytes of `count` gradients at which both ways take equally long."""
    # Both ways send all bytes once, so the bandwidth cancels out.
    return (count - 1) * latency * copy_bandwidth / 2
