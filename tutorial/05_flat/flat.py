"""Measures the latency and bandwidth of all-reduce, and sends gradients in one flat tensor.

python -m tutorial.05_flat.flat
"""

from functools import partial
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from tutorial.options import read_options
from tutorial.ranks import start
from tutorial.show.flat import draw, show_line, show_ways

SIZES = [4**power * 1000 for power in range(8)]  # bytes, to 16 MB
GRADIENTS = [(256, 256), (256,)] * 24


def milliseconds(functions):
    """Times each function; each time is the mean of a series of calls: `{function: calls}`.

    The functions take turns, so that a busy moment of the machine affects more than one of them.
    """
    times = {function: [] for function in functions}
    for _ in range(8):
        for function, calls in functions.items():
            dist.barrier()
            begin = perf_counter()
            for _ in range(calls):
                function()
            times[function].append(1000 * (perf_counter() - begin) / calls)
    return list(times.values())


def sync_each(gradients):
    """Replaces gradients by their means: one all-reduce for each."""
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


def sync_flat(gradients):
    """Replaces gradients by their means: copied into one flat tensor, one all-reduce, and back."""
    flat = copy_in(gradients)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    copy_back(flat, gradients)


def copy_in(gradients):
    """Returns a flat tensor of all gradients, one after the other."""
    return torch.cat([gradient.flatten() for gradient in gradients])


def copy_back(flat, gradients):
    """Copies each gradient's part of a flat tensor into it."""
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def divide(gradients):
    """Only the divisions of `sync_each`."""
    for gradient in gradients:
        gradient /= dist.get_world_size()


def run():
    """Times of an all-reduce of each size, of both ways to send gradients, and of their parts."""
    gradients = [torch.randn(shape) for shape in GRADIENTS]
    copies = [gradient.clone() for gradient in gradients]
    sync_each(gradients)
    sync_flat(copies)
    same = all(one.allclose(other) for one, other in zip(gradients, copies, strict=True))
    # Series of 48 calls, like the calls they predict: a short one may be lucky. Fewer if large.
    rows = {
        partial(dist.all_reduce, torch.ones(size // 4)): min(48, 64_000_000 // size)
        for size in SIZES
    }
    ways = [partial(way, copies) for way in (sync_each, sync_flat, divide)]
    ways.append(lambda: copy_back(copy_in(copies), copies))
    times = milliseconds(rows | dict.fromkeys(ways, 1))
    return times[: len(rows)], times[len(rows) :], same


def fit(sizes, times):
    """Latency (ms) and ms per byte of the line with the smallest squared relative errors."""
    sizes, times = (torch.tensor(v, dtype=torch.float64) for v in (sizes, times))
    columns = torch.stack([1 / times, sizes / times], dim=1)
    return torch.linalg.lstsq(columns, torch.ones_like(times)[:, None]).solution.flatten().tolist()


def main():
    """Shows the times, the fitted line, and what it predicts."""
    options = read_options(__doc__, nproc=2)
    by_size, ways, same = start(run, options.nproc)[0]
    latency, per_byte = fit(SIZES, [median(times) for times in by_size])
    total = sum(4 * torch.Size(shape).numel() for shape in GRADIENTS)
    each, flat, division, copies = map(median, ways)
    one_by_one = len(GRADIENTS) * latency + per_byte * total + division
    in_one_piece = latency + per_byte * total + division + copies
    show_line(SIZES, by_size, latency, per_byte)
    print(f"{len(GRADIENTS)} gradients, {total / 1e6:.1f} MB, the same means both ways: {same}")
    show_ways(total, (each, one_by_one), (flat, in_one_piece), division, copies)
    draw(SIZES, by_size, latency, per_byte, options.picture)


if __name__ == "__main__":
    main()
