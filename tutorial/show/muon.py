"""Prints and draws chapter 16: what each rank computes and keeps, with and without owners."""

from statistics import median

from tutorial import pictures


def show(found, path):
    """Shows `{way: for each rank (ms of each step's parts, MB kept, losses, parameters)}`."""
    print(f"{'':<27}  reduce  Newton-Schulz  broadcast  momentum")
    bars, models = {}, []
    for name, results in found.items():
        for rank, (steps, kept, _, parameters) in enumerate(results):
            parts = [*map(median, zip(*steps, strict=True))]
            row = "{:8.1f} {:14.1f} {:10.1f}".format(*parts)
            print(f"{name:<18} rank {rank:<3} {row}  ms {kept:6.2f} MB")
            kinds = dict(zip(("reduce", "update", "broadcast"), parts, strict=True))
            bars[f"{name}\nrank {rank}"] = kinds
            models.append(parameters)
    losses = next(iter(found.values()))[0][2]
    print(f"loss of rank 0: {losses[0]:.4f} in its first step, {losses[-1]:.4f} in its last")
    same = all(parameters.equal(models[0]) for parameters in models)
    print(f"the same parameters on all ranks and both ways, to the last bit: {same}")
    pictures.bars(path, {("after backward, by rank", "ms"): bars})
