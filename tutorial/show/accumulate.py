"""Prints and draws chapter 17: what each way of accumulating sends, and how long it takes."""

from statistics import median

from tutorial import pictures


def show(found, path):
    """Shows `{way: (ms of each step, bytes of each all-reduce of a step, parameters)}`."""
    print(f"{'':<10} all-reduces  MB a step  ms a step  distance from one batch")
    _, _, expected = next(iter(found.values()))
    megabytes, milliseconds = {}, {}
    for name, (times, sent, parameters) in found.items():
        size, far = sum(sent) / 1e6, (parameters - expected).abs().max()
        print(f"{name:<10} {len(sent):>11} {size:10.1f} {median(times):10.1f}  {far:.0e}")
        megabytes[name], milliseconds[name] = {"": size}, {"": median(times)}
    pictures.bars(path, {("sent in a step", "MB"): megabytes, ("a step", "ms"): milliseconds})
