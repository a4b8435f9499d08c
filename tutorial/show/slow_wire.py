"""Prints and draws chapter 13: the loss over time, by what is sent."""

from tutorial import pictures


def show(found, nproc, mbit, path):
    """Shows `{way: (bytes and seconds of a step, loss after each step)}` on a wire of `mbit`."""
    least = min(len(losses) for _, _, losses in found.values())
    same, end = f"loss after {least} steps", "after 2 s"
    print(f"            kB a step  ms a step  steps  {same}  {end}")
    curves = {}
    for name, (size, step, losses) in found.items():
        row = f"{name:<10} {size / 1000:10.1f} {1000 * step:10.1f} {len(losses):6}"
        print(f"{row}  {losses[least - 1]:{len(same)}.3f}  {losses[-1]:{len(end)}.3f}")
        curves[name] = [step * (i + 1) for i in range(len(losses))], losses
    title = f"loss over time, {nproc} ranks at {mbit:g} Mbit/s"
    pictures.lines(path, title, "seconds", "loss", {}, curves, log=False)
