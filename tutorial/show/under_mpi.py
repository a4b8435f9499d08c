"""Prints and draws chapter 14: each rank's place and phases."""

from itertools import pairwise
from statistics import median

from tutorial import pictures


def show(names, ranks, path):
    """Shows for each rank `(its place, marks of each step, parameters)`."""
    places, by_rank, parameters = zip(*ranks, strict=True)
    for (launcher, rank, nproc, local_rank, _), steps in zip(places, by_rank, strict=True):
        spans = [[1000 * (end - begin) for begin, end in pairwise(marks)] for marks in steps]
        times = zip(names, map(median, zip(*spans, strict=True)), strict=True)
        print(f"rank {rank} of {nproc}, by {launcher}: number {local_rank} on its machine")
        print("    " + ", ".join(f"{name} {ms:.1f}" for name, ms in times), "ms")
    print(f"machines: {len({place[-1] for place in places})}")
    same = all(its.equal(parameters[0]) for its in parameters)
    print(f"parameters are {'the same' if same else 'NOT the same'} on all ranks")
    lengths = [marks[-1] - marks[0] for marks in by_rank[0]]
    middle = sorted(range(len(lengths)), key=lengths.__getitem__)[len(lengths) // 2]
    rows = {}
    for rank, steps in enumerate(by_rank):
        step = steps[middle]
        # Clocks of two machines differ, so each rank's step begins at its own 0.
        spans = pairwise(1000 * (mark - step[0]) for mark in step)
        rows[f"rank {rank}"] = [(name, *s) for name, s in zip(names, spans, strict=True)]
    pictures.timelines(path, {"the step of median length": rows})
