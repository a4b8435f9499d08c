"""Prints and draws chapter 15: what a rank holds, and its step, both ways."""

from statistics import median

from tutorial import pictures


def show(found, path):
    """Shows `{way: for each rank (ms of each step's parts, bytes by kind, parameters)}`."""
    print("a rank holds   parameters  gradients    state  together")
    megabytes, milliseconds, models = {}, {}, []
    for name, results in found.items():
        held = {kind: size / 1e6 for kind, size in results[0][1].items()}
        row = "{:12.1f} {:10.1f} {:8.1f}".format(*held.values())
        print(f"{name:<13} {row} {sum(held.values()):9.1f}  MB")
        megabytes[name] = held
        models += [parameters for *_, parameters in results]
    print("a step takes       reduce     update   gather  together")
    for name, results in found.items():
        parts = [*map(median, zip(*results[0][0], strict=True))]
        print(f"{name:<13} {parts[0]:11.1f} {parts[1]:10.1f} {parts[2]:8.1f}", end=" ")
        print(f"{sum(parts):9.1f}  ms")
        milliseconds[name] = dict(zip(("reduce", "update", "gather"), parts, strict=True))
    same = all(parameters.equal(models[0]) for parameters in models)
    print(f"the same parameters on all ranks and both ways, to the last bit: {same}")
    pictures.bars(path, {("a rank holds", "MB"): megabytes, ("after backward", "ms"): milliseconds})
