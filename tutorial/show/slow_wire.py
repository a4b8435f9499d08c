"""Prints and draws chapter 13: the loss over time, by what is sent."""

from tutorial import pictures


def show(found, nproc, mbit, path):
    """Shows `{way: (ms of computing, bytes of a step, loss of each step)}` on a wire of `mbit`."""
    print("            kB a step  ms a step  loss at the end  after 2 s")
    curves = {}
    for name, (computing, size, losses) in found.items():
        step = computing + size * 8 / (1000 * mbit)  # the wire's time is added
        after = losses[min(len(losses), max(1, int(2000 / step))) - 1]
        print(f"{name:<10} {size / 1000:10.1f} {step:10.1f} {losses[-1]:16.3f} {after:11.3f}")
        curves[name] = [step * (i + 1) / 1000 for i in range(len(losses))], losses
    title = f"loss over time, {nproc} ranks at {mbit:g} Mbit/s"
    pictures.lines(path, title, "seconds", "loss", {}, curves, log=False)
