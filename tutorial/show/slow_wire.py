"""Prints and draws chapter 13: the loss over time, by what is sent."""

from tutorial import pictures


def show(found, nproc, mbit, path):
    """Shows `{way: (bytes of a step, seconds and loss after each step)}` on a wire of `mbit`."""
    least = min(len(times) for _, times, _ in found.values())
    end = f"after {max(times[-1] for _, times, _ in found.values()):.1f} s"
    same = f"loss after {least} steps"
    print(f"            kB a step  ms a step  steps  {same}  {end}")
    curves = {}
    for name, (size, times, losses) in found.items():
        step = 1000 * times[-1] / len(times)
        row = f"{name:<10} {size / 1000:10.1f} {step:10.1f} {len(times):6}"
        print(f"{row}  {losses[least - 1]:{len(same)}.3f}  {losses[-1]:{len(end)}.3f}")
        curves[name] = times, losses
    title = f"loss over time, {nproc} ranks at {mbit:g} Mbit/s"
    pictures.lines(path, title, "seconds", "loss", {}, curves, log=False)
