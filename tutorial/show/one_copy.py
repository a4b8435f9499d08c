"""Prints and draws chapter 12: memory and time of both ways."""

from tutorial import pictures


def show(count, found, path):
    """Shows for a model of `count` parameters `{way: for each rank (MB, ms, parameters)}`."""
    nproc = len(next(iter(found.values())))
    print(f"the parameters have {4 * count / 1e6:.1f} MB; the machine's {nproc} ranks take")
    megabytes, milliseconds, models = {}, {}, []
    for name, results in found.items():
        taken, step = sum(row[0] for row in results), results[0][1]
        print(f"{name:<10} {taken:7.1f} MB; a step takes {step:6.1f} ms")
        megabytes[name], milliseconds[name] = {"memory": taken}, {"step": step}
        models += [parameters for _, _, parameters in results]
    same = all(parameters.allclose(models[0], atol=1e-6) for parameters in models)
    print(f"the same parameters on all ranks and both ways: {same}")
    panels = {("memory of the machine", "MB"): megabytes, ("a step", "ms"): milliseconds}
    pictures.bars(path, panels)
