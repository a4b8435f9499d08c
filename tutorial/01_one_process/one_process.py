"""Measures where a training step's time and memory go, in one process.

python -m tutorial.01_one_process.one_process
"""

from itertools import pairwise
from statistics import median
from time import perf_counter

import torch

from tutorial.options import read_options
from tutorial.show.one_process import show

WIDTH, LAYERS, STEPS = 512, 8, 15


def train(batch):
    """Trains with one batch size; returns the median ms of each phase and the MB of each kind."""
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.ReLU())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x = torch.randn(batch, WIDTH)
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    kept, times = {}, []

    def keep(tensor):  # called for each tensor that autograd keeps for backward
        if tensor.data_ptr() not in parameters:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    for _ in range(STEPS):
        kept.clear()
        optimizer.zero_grad()
        marks = [perf_counter()]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(x).square().mean()
        marks.append(perf_counter())
        loss.backward()
        marks.append(perf_counter())
        optimizer.step()
        marks.append(perf_counter())
        times.append([1e3 * (end - begin) for begin, end in pairwise(marks)])

    state = [value for values in optimizer.state.values() for value in values.values()]
    tensors = {
        "parameters": model.parameters(),
        "gradients": [parameter.grad for parameter in model.parameters()],
        "optimizer state": state,
    }
    memory = {name: sum(tensor.nbytes for tensor in held) for name, held in tensors.items()}
    memory["activations"] = sum(kept.values())
    phases = map(median, zip(*times, strict=True))
    return (
        dict(zip(("forward", "backward", "update"), phases, strict=True)),
        {name: size / 1e6 for name, size in memory.items()},
    )


def main():
    """Trains with three batch sizes, and shows what each needs."""
    options = read_options(__doc__)
    torch.set_num_threads(1)
    show({batch: train(batch) for batch in (32, 128, 512)}, options.picture)


if __name__ == "__main__":
    main()
