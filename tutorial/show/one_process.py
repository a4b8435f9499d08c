"""Prints and draws chapter 1: time and memory of a step, by batch size."""

from tutorial import pictures


def show(measured, path):
    """Shows `{batch: (ms by phase, MB by kind)}`."""
    print(f"{'batch':<16}" + "".join(f"{batch:>10}" for batch in measured))
    for unit, kind in (("ms", 0), ("MB", 1)):
        for name in next(iter(measured.values()))[kind]:
            values = "".join(f"{result[kind][name]:10.1f}" for result in measured.values())
            print(f"{name:<16}{values}  {unit}")
    times = {f"batch {batch}": result[0] for batch, result in measured.items()}
    memory = {f"batch {batch}": result[1] for batch, result in measured.items()}
    pictures.bars(path, {("time of a step", "ms"): times, ("memory", "MB"): memory})
