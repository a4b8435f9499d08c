"""Computes the time of a step by the number of ranks, with and without overlap; starts no ranks.

python -m tutorial.13_slow_wire.scaling
"""

from tutorial.options import read_options
from tutorial.show.scaling import show


def all_reduce(size, ranks, latency, bandwidth):
    """Seconds of a ring: 2(n-1) steps, in each of which a message has 1/n of the bytes."""
    return 2 * (ranks - 1) * (latency + size / ranks / bandwidth)


def in_turn(backward, bucket, count):
    """Seconds of backward and then of `count` all-reduces, each of which takes `bucket`."""
    return backward + count * bucket


def overlapped(backward, bucket, count):
    """The same, but each all-reduce begins when its bucket is full and the wire is free.

    Buckets are full at even intervals. Either the last one finds the wire free, or the wire has
    been busy since the first one.
    """
    return max(backward + bucket, backward / count + count * bucket)


def steps(mb, backward, latency, gbit, ranks, buckets):
    """Yields ranks, and in ms the time on the wire and both ways, for 1, 2, 4, ... ranks."""
    for n in sorted({2**power for power in range(ranks.bit_length())} | {ranks}):
        bucket = 1e3 * all_reduce(1e6 * mb / buckets, n, 1e-6 * latency, 1e9 / 8 * gbit)
        yield (
            n,
            buckets * bucket,
            in_turn(backward, bucket, buckets),
            overlapped(backward, bucket, buckets),
        )


def main():
    """Reads the numbers of a model and a network, and shows a row for each number of ranks."""
    options = read_options(
        __doc__,
        mb=(100.0, "MB of gradients"),
        backward=(120.0, "ms of backward"),
        latency=(20.0, "microseconds that a message takes, however short"),
        gbit=(25.0, "Gbit/s of each rank's wire"),
        ranks=(512, "the most ranks"),
        buckets=(4, "number of buckets, of equal size"),
    )
    numbers = {name: value for name, value in vars(options).items() if name != "picture"}
    show(list(steps(**numbers)), options.backward, options.picture)


if __name__ == "__main__":
    main()
