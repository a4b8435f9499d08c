"""Sends each gradient as soon as backward has computed it, and shows what that hides.

python -m tutorial.06_overlap.overlap
"""

from time import perf_counter

import torch
import torch.distributed as dist

from tutorial.options import read_options
from tutorial.ranks import start
from tutorial.show.overlap import show

WIDTH, LAYERS, BATCH, STEPS = 512, 8, 128, 15


class Overlap:
    """Averages a model's gradients over ranks while backward still runs."""

    def __init__(self, model):
        self.handles, self.in_flight = [], []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.launch)

    def launch(self, parameter):
        """Begins to sum a gradient; autograd calls it as soon as `parameter.grad` is complete."""
        begin = perf_counter()
        handle = dist.all_reduce(parameter.grad, async_op=True)  # does not wait
        self.handles.append((parameter, handle))
        # Only for the picture: records when the sum is complete.
        handle.get_future().then(lambda _: self.in_flight.append((begin, perf_counter())))

    def wait(self):
        """Waits for all sums that were launched; then every gradient is the mean."""
        for parameter, handle in self.handles:
            handle.wait()
            parameter.grad /= dist.get_world_size()
        self.handles.clear()


def sync_gradients(model):
    """Replaces every gradient by its mean over all ranks, as in chapter 4."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def train(overlapped):
    """Trains; returns the spans of a step of median length, in ms, and the parameters."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.ReLU())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    overlap = Overlap(model) if overlapped else None
    torch.manual_seed(dist.get_rank())  # different examples on each rank
    steps = []
    for _ in range(STEPS):
        x = torch.randn(BATCH, WIDTH)
        optimizer.zero_grad()
        dist.barrier()
        marks = [perf_counter()]
        loss = (model(x) - 1).square().mean()
        marks.append(perf_counter())
        loss.backward()
        marks.append(perf_counter())
        overlap.wait() if overlap else sync_gradients(model)
        marks.append(perf_counter())
        optimizer.step()
        spans = list(zip(("forward", "backward", "wait"), marks, marks[1:], strict=False))
        if overlap:
            spans += [("in flight", *times) for times in overlap.in_flight]
            overlap.in_flight.clear()
        steps.append([(what, *(1000 * (t - marks[0]) for t in span)) for what, *span in spans])
    steps.sort(key=lambda spans: spans[2][2])
    return steps[STEPS // 2], torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def first_sum():
    """Launches two sums, on rank 1 in the opposite order; returns the result of `one`."""
    one, hundred = torch.tensor(1.0), torch.tensor(100.0)
    order = [hundred, one] if dist.get_rank() == 1 else [one, hundred]
    for handle in [dist.all_reduce(tensor, async_op=True) for tensor in order]:
        handle.wait()
    return one.item()


def run():
    """Runs on each rank."""
    return train(overlapped=False), train(overlapped=True), first_sum()


def main():
    """Starts the ranks, and shows what a rank waits with and without overlap."""
    options = read_options(__doc__, nproc=2)
    show(start(run, options.nproc)[0], options.nproc, options.picture)


if __name__ == "__main__":
    main()
