"""Measures the latency and bandwidth of all-reduce, and sends gradients in one flat tensor.

python -m tutorial.05_flat.flat
"""

import math
from functools import partial
from time import perf_counter

import torch
import torch.distributed as dist

from tutorial import pictures
from tutorial.options import read_options
from tutorial.ranks import start

SIZES = [4**power * 1000 for power in range(8)]  # bytes, to 16 MB
GRADIENTS = [(256, 256), (256,)] * 24


def milliseconds(functions, calls=5):
    """The time of a call of each function: the least of 12 rows of calls, as noise only adds.

    The functions take turns, so that a busy moment of the machine does not hit one of them alone.
    """
    least = [math.inf] * len(functions)
    for _ in range(12):
        for index, function in enumerate(functions):
            dist.barrier()
            begin = perf_counter()
            for _ in range(calls):
                function()
            least[index] = min(least[index], 1000 * (perf_counter() - begin) / calls)
    return least


def sync_each(gradients):
    """Replaces gradients by their means: one all-reduce for each."""
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


def sync_flat(gradients):
    """Replaces gradients by their means: copied into one flat tensor, one all-reduce, and back."""
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, mean in zip(
        gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True
    ):
        gradient.copy_(mean.view_as(gradient))


def run():
    """The ms of an all-reduce of each size, and of the two ways to send the gradients."""
    tensors = [torch.ones(size // 4) for size in SIZES]
    by_size = milliseconds([partial(dist.all_reduce, tensor) for tensor in tensors])
    gradients = [torch.randn(shape) for shape in GRADIENTS]
    copies = [gradient.clone() for gradient in gradients]
    sync_each(gradients)
    sync_flat(copies)
    same = all(one.allclose(other) for one, other in zip(gradients, copies, strict=True))
    return by_size, same, *milliseconds([partial(sync, copies) for sync in (sync_each, sync_flat)])


def fit(sizes, times):
    """Latency (ms) and ms per byte of the line that misses the times by the smallest shares."""
    sizes, times = (torch.tensor(v, dtype=torch.float64) for v in (sizes, times))
    columns = torch.stack([1 / times, sizes / times], dim=1)
    return torch.linalg.lstsq(columns, torch.ones_like(times)[:, None]).solution.flatten().tolist()


def main():
    """Prints times, the fitted line, and what it predicts; draws the first two."""
    options = read_options(__doc__, nproc=2)
    by_size, same, each, flat = start(run, options.nproc)[0]
    latency, per_byte = fit(SIZES, by_size)
    line = [latency + per_byte * size for size in SIZES]
    for size, measured, on_line in zip(SIZES, by_size, line, strict=True):
        print(f"{size / 1000:>8,.0f} kB {measured:8.3f} ms, on the line {on_line:8.3f}")
    print(f"latency {latency:.3f} ms, bandwidth {1e-6 / per_byte:.2f} GB/s")
    total = sum(4 * torch.Size(shape).numel() for shape in GRADIENTS)
    count = len(GRADIENTS)
    print(f"{count} gradients, {total / 1e6:.1f} MB, the same means both ways: {same}")
    print(f"one by one   {each:6.1f} ms, on the line {count * latency + per_byte * total:6.1f}")
    print(f"in one piece {flat:6.1f} ms, on the line {latency + per_byte * total:6.1f}")
    kilobytes = [size / 1000 for size in SIZES]
    label = f"{latency:.2f} ms + bytes / ({1e-6 / per_byte:.1f} GB/s)"
    pictures.lines(
        options.picture,
        "an all-reduce",
        "kB",
        "ms",
        {"measured": (kilobytes, by_size)},
        {label: (kilobytes, line)},
    )


if __name__ == "__main__":
    main()
