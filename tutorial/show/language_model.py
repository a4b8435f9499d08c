"""Prints and draws chapter 20: speed and loss of each way to train, and what a model writes."""

from math import log
from statistics import median

import torch

from tutorial import pictures


def show(found, size, path):
    """Shows `{way: (seconds of each step, losses, state)}` for steps of `size` bytes."""
    print(f"{'':<8} ms a step  kB/s  first loss  last loss  bits a byte")
    for name, (times, losses, _) in found.items():
        step, last = median(times), losses[-1]
        row = f"{1000 * step:9.1f} {size / step / 1000:5.0f} {losses[0]:11.4f} {last:10.4f}"
        print(f"{name:<8} {row} {last / log(2):12.2f}")
    alone, *others = (
        torch.cat([tensor.flatten() for tensor in state.values()]) for *_, state in found.values()
    )
    same = all(other.equal(others[0]) for other in others)
    print(f"the same parameters in all ways on ranks, to the last bit: {same}")
    print(f"from those of one process they differ by up to {(alone - others[0]).abs().max():.0e}")
    curves = {
        name: ([sum(times[: n + 1]) for n in range(len(times))], losses)
        for name, (times, losses, _) in found.items()
    }
    pictures.lines(path, "loss over time", "seconds", "loss", {}, curves, log=False)


@torch.no_grad()
def write(model, count, context):
    """Returns a text of so many bytes, which the model writes after the sign of a heading."""
    text, generator = torch.tensor([[ord("#")]]), torch.Generator().manual_seed(0)
    for _ in range(count):
        chances = (model(text[:, -context:])[:, -1] / 0.7).softmax(-1)
        text = torch.cat([text, torch.multinomial(chances, 1, generator=generator)], 1)
    return bytes(text[0].tolist()).decode(errors="replace")
