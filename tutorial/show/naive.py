"""Prints and draws chapter 4: the phases of the median step, and whether parameters agree."""

from itertools import pairwise
from statistics import median

from tutorial import pictures


def show(names, results, alone, path):
    """Shows for each rank, and for one process, `(marks of each step, losses, parameters)`."""
    show_phases(names, [steps for steps, _, _ in results])
    (steps, losses, parameters), (_, _, others) = results[:2]
    alone_steps, _, expected = alone
    ms, alone_ms = (
        1000 * median(marks[-1] - marks[0] for marks in of_all) for of_all in (steps, alone_steps)
    )
    print(f"a step takes {ms:.1f} ms; in one process with the whole batch {alone_ms:.1f} ms")
    print(f"loss of rank 0: {losses[0]:.4f} in its first step, {losses[-1]:.4f} in its last")
    print(f"parameters of rank 0 and rank 1 differ by {(parameters - others).abs().max():.0e},")
    print(f"and from those of one process by {(parameters - expected).abs().max():.0e}")
    draw_middle(names, [steps for steps, _, _ in results], path)


def show_phases(names, by_rank):
    """Prints each rank's median phases, and the share of waiting."""
    times = []
    for rank, steps in enumerate(by_rank):
        spans = [[1000 * (end - begin) for begin, end in pairwise(marks)] for marks in steps]
        phases = dict(zip(names, map(median, zip(*spans, strict=True)), strict=True))
        times.append(phases)
        print(f"rank {rank}: " + ", ".join(f"{name} {ms:.1f}" for name, ms in phases.items()), "ms")
    share = sum(phases["wait"] / sum(phases.values()) for phases in times) / len(times)
    print(f"{100 * share:.0f} % of a step is waiting")


def draw_middle(names, by_rank, path):
    """Draws the step of median length, of all ranks."""
    steps = sorted(zip(*by_rank, strict=True), key=lambda ranks: ranks[0][-1] - ranks[0][0])
    step = steps[len(steps) // 2]
    begin = min(marks[0] for marks in step)
    rows = {}
    for rank, marks in enumerate(step):
        spans = pairwise(1000 * (mark - begin) for mark in marks)
        rows[f"rank {rank}"] = [(name, *s) for name, s in zip(names, spans, strict=True)]
    pictures.timelines(path, {"one step": rows})
