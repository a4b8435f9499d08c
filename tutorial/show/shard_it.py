"""Prints and draws chapter 21: what a rank holds, undivided and sharded."""

from statistics import median

from tutorial import pictures


def show(results, count, path):
    """Shows `(ms of our steps, of torch's, bytes by kind, same bits)` of each rank.

    `count` is the number of the model's parameters.
    """
    times, of_torch, held, _ = results[0]
    undivided = {"shards": 4 * count, "their gradients": 4 * count, "state": 8 * count}
    rows = {"undivided": undivided | {"whole": 0}, "sharded": held}
    print("a rank holds   parameters  gradients    state  whole layers and gradients  together")
    for name, kinds in rows.items():
        numbers = [size / 1e6 for size in kinds.values()]
        print("{:<13} {:11.1f} {:10.1f} {:8.1f} {:27.1f}".format(name, *numbers), end=" ")
        print(f"{sum(numbers):9.1f}  MB")
    ours, theirs = median(times[1:]), median(of_torch[1:])  # the first step takes longer
    print(f"a step takes {ours:.1f} ms, with torch's fully_shard {theirs:.1f}")
    print(f"the same bits as fully_shard: {all(same for *_, same in results)}")
    names = ("parameters", "gradients", "state", "whole layers and gradients")
    panels = {
        name: dict(zip(names, (size / 1e6 for size in kinds.values()), strict=True))
        for name, kinds in rows.items()
    }
    pictures.bars(path, {("a rank holds, at most", "MB"): panels})
