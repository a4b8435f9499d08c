"""Prints and draws chapter 5: all-reduces by size, the fitted line, and both ways to send."""

from statistics import median

from tutorial import pictures


def show_line(sizes, by_size, latency, per_byte):
    """Prints for each size the times of an all-reduce, and the line's."""
    print(f"{'':<12}    least   median  on the line")
    for size, times in zip(sizes, by_size, strict=True):
        row = min(times), median(times), latency + per_byte * size
        print(f"{size / 1000:>9,.0f} kB " + "{:8.3f} {:8.3f} {:12.3f}  ms".format(*row))
    print(f"latency {latency:.3f} ms, bandwidth {1e-6 / per_byte:.2f} GB/s")


def show_ways(total, each, flat, division, copies):
    """Prints the times of both ways, each `(measured, predicted)`, and of their parts."""
    print(f"to divide them {division:.1f} ms, to copy them twice {copies:.1f} ms", end="")
    print(f" (copy bandwidth {2e-6 * total / copies:.1f} GB/s)")
    print("one by one   {:6.1f} ms, predicted {:6.1f}".format(*each))
    print("in one piece {:6.1f} ms, predicted {:6.1f}".format(*flat))


def draw(sizes, by_size, latency, per_byte, path):
    """Draws the times by size, and the line."""
    kilobytes = [size / 1000 for size in sizes]
    line = [latency + per_byte * size for size in sizes]
    label = f"{latency:.2f} ms +\nbytes / ({1e-6 / per_byte:.1f} GB/s)"
    measured = {
        "median": (kilobytes, [median(times) for times in by_size]),
        "least": (kilobytes, [min(times) for times in by_size]),
    }
    pictures.lines(path, "an all-reduce", "kB", "ms", measured, {label: (kilobytes, line)})
