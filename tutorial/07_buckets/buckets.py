"""Averages gradients in buckets during backward, as torch's DistributedDataParallel does.

python -m tutorial.07_buckets.buckets
"""

from math import inf
from time import perf_counter

import torch
import torch.distributed as dist

from tutorial import pictures
from tutorial.options import read_options
from tutorial.ranks import start

WIDTH, LAYERS, BATCH, STEPS = 512, 8, 128, 20
CAPS = 0, 1, 2, 4, inf  # MB


class Bucket:
    """One flat tensor for the gradients of several parameters."""

    def __init__(self, parameters):
        self.parameters = parameters
        self.flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
        views = self.flat.split([parameter.numel() for parameter in parameters])
        self.views = [view.view_as(p) for view, p in zip(views, parameters, strict=True)]
        self.missing = len(parameters)  # gradients that are not ready yet
        self.handle = None

    def pack(self):
        """Copies the gradients in, each divided by the world size: the sum will be the mean."""
        for view, parameter in zip(self.views, self.parameters, strict=True):
            torch.mul(parameter.grad, 1 / dist.get_world_size(), out=view)

    def launch(self):
        """Begins to sum the bucket over ranks."""
        self.handle = dist.all_reduce(self.flat, async_op=True)

    def unpack(self):
        """Waits for the sum, copies the means back, and makes the bucket ready for a new step."""
        self.handle.wait()
        for view, parameter in zip(self.views, self.parameters, strict=True):
            parameter.grad.copy_(view)
        self.missing, self.handle = len(self.parameters), None


def assign(parameters, cap):
    """Assigns parameters to buckets, in order; a bucket is closed when it has `cap` bytes."""
    buckets, members = [], []
    for parameter in parameters:
        members.append(parameter)
        if sum(member.nbytes for member in members) >= cap:
            buckets.append(Bucket(members))
            members = []
    return buckets + ([Bucket(members)] if members else [])


class DataParallel:
    """Replaces gradients by their means over ranks.

    A gradient passes five steps: ready, pack, launch, wait, unpack.
    """

    def __init__(self, model, cap_mb):
        parameters = list(model.parameters())
        for parameter in parameters:
            dist.broadcast(parameter.detach(), src=0)
        # Backward begins at the model's end: the last parameter is ready first.
        self.buckets = assign(parameters[::-1], cap_mb * 1024 * 1024)
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self.launched = 0
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self.on_ready)

    def on_ready(self, parameter):
        """Marks a gradient ready; launches full buckets, in the same order on all ranks."""
        self.bucket_of[parameter].missing -= 1
        while self.launched < len(self.buckets) and not self.buckets[self.launched].missing:
            self.buckets[self.launched].pack()
            self.buckets[self.launched].launch()
            self.launched += 1

    def finish(self):
        """Waits for all buckets."""
        for bucket in self.buckets:
            bucket.unpack()
        self.launched = 0


def make_model():
    """Returns the model of chapter 1, with different parameters on each rank."""
    torch.manual_seed(dist.get_rank())
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    return torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.ReLU())))


def train(model, module, finish):
    """Trains; returns the median step's ms with and without backward, and the parameters."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
    steps = []
    for _ in range(STEPS):
        x = torch.randn(BATCH, WIDTH)
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        dist.barrier()
        begin = perf_counter()
        loss.backward()
        backward = perf_counter()
        finish()
        steps.append((1000 * (perf_counter() - begin), 1000 * (perf_counter() - backward)))
        optimizer.step()
    together, exposed = sorted(steps)[STEPS // 2]
    parameters = torch.nn.utils.parameters_to_vector(module.parameters()).detach()
    return together, exposed, parameters


def run():
    """Returns for each cap the buckets, the ms, and whether torch's class gives the same bits."""
    results = []
    for cap in CAPS:
        model = make_model()
        ours = DataParallel(model, cap)
        together, exposed, parameters = train(model, model, ours.finish)
        theirs = make_model()
        limit = 1000 if cap == inf else cap or 1e-6  # some versions reject 0
        wrapped = torch.nn.parallel.DistributedDataParallel(theirs, bucket_cap_mb=limit)
        of_torch, _, expected = train(wrapped, theirs, lambda: None)
        results.append((len(ours.buckets), together, exposed, of_torch, parameters.equal(expected)))
    return results


def main():
    """Prints and draws a row for each cap."""
    options = read_options(__doc__, nproc=2)
    print(" cap, MB  buckets  exposed ms  with backward ms  torch's  same bits")
    bars = {}
    for cap, row in zip(CAPS, start(run, options.nproc)[0], strict=True):
        buckets, together, exposed, of_torch, same = row
        name = "all in 1" if cap == inf else f"{cap:g}"
        times = f"{exposed:11.1f} {together:17.1f} {of_torch:8.1f}"
        print(f"{name:>8} {buckets:>8} {times}  {same}")
        bars[name] = {"backward": together - exposed, "wait": exposed}
    pictures.bars(options.picture, {("backward, then wait, by the buckets' cap in MB", "ms"): bars})


if __name__ == "__main__":
    main()
