"""Averages gradients in buckets during backward, as torch's DistributedDataParallel does.

python -m tutorial.07_buckets.buckets
"""

from concurrent.futures import ThreadPoolExecutor
from math import inf
from time import perf_counter, sleep

import torch
import torch.distributed as dist

from tutorial.options import read_options
from tutorial.ranks import start
from tutorial.show.buckets import show

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

    def launch(self, all_reduce):
        """Begins to sum the bucket over ranks."""
        self.handle = all_reduce(self.flat, async_op=True)

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

    def __init__(self, model, cap_mb, all_reduce=dist.all_reduce):
        parameters = list(model.parameters())
        for parameter in parameters:
            dist.broadcast(parameter.detach(), src=0)
        # Backward begins at the model's end: the last parameter is ready first.
        self.buckets = assign(parameters[::-1], cap_mb * 1024 * 1024)
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self.launched, self.all_reduce = 0, all_reduce
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self.on_ready)

    def on_ready(self, parameter):
        """Marks a gradient ready; launches full buckets, in the same order on all ranks."""
        self.bucket_of[parameter].missing -= 1
        while self.launched < len(self.buckets) and not self.buckets[self.launched].missing:
            self.buckets[self.launched].pack()
            self.buckets[self.launched].launch(self.all_reduce)
            self.launched += 1

    def finish(self):
        """Waits for all buckets."""
        for bucket in self.buckets:
            bucket.unpack()
        self.launched = 0


class SlowWire:
    """An assumed wire that takes no core: it holds each tensor for latency + bytes / bandwidth.

    One tensor at a time, in its own thread. It adds nothing up: this is for times alone.
    """

    def __init__(self, latency, bandwidth):
        self.latency, self.bandwidth = latency / 1e3, bandwidth * 1e9  # of ms, and of GB/s
        self.thread, self.in_flight = ThreadPoolExecutor(1), []

    def all_reduce(self, tensor, async_op):
        """Returns at once, like `dist.all_reduce`; the handle waits until the wire is through."""
        handle = torch.futures.Future()
        self.thread.submit(self.hold, tensor.nbytes, handle)
        return handle

    def hold(self, size, handle):
        """Sleeps for as long as the wire takes; a thread that sleeps needs no core."""
        begin = perf_counter()
        sleep(self.latency + size / self.bandwidth)
        self.in_flight.append((begin, perf_counter()))
        handle.set_result(None)


def make_model():
    """Returns the model of chapter 1, with different parameters on each rank."""
    torch.manual_seed(dist.get_rank())
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    return torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.ReLU())))


def train(model, module, finish):
    """Trains; returns when backward begins and ends and when `finish` ends, and the parameters."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
    steps = []
    for _ in range(STEPS):
        x = torch.randn(BATCH, WIDTH)
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        dist.barrier()
        marks = [perf_counter()]
        loss.backward()
        marks.append(perf_counter())
        finish()
        marks.append(perf_counter())
        steps.append(marks)
        optimizer.step()
    return steps, torch.nn.utils.parameters_to_vector(module.parameters()).detach()


def run(latency, bandwidth):
    """Returns for each cap the steps on the wire and on gloo, and torch's class beside it."""
    results = []
    for cap in CAPS:
        model, wire = make_model(), SlowWire(latency, bandwidth)
        on_wire, _ = train(model, model, DataParallel(model, cap, wire.all_reduce).finish)
        model = make_model()
        ours = DataParallel(model, cap)
        on_gloo, parameters = train(model, model, ours.finish)
        theirs = make_model()
        limit = 1000 if cap == inf else cap or 1e-6  # some versions reject 0
        wrapped = torch.nn.parallel.DistributedDataParallel(theirs, bucket_cap_mb=limit)
        of_torch, expected = train(wrapped, theirs, lambda: None)
        same = parameters.equal(expected)
        results.append((len(ours.buckets), on_wire, wire.in_flight, on_gloo, of_torch, same))
    return results


def main():
    """Starts the ranks, and shows a row for each cap."""
    options = read_options(
        __doc__,
        nproc=2,
        latency=(1.0, "ms that each message takes on the assumed wire"),
        bandwidth=(1.0, "GB/s of the assumed wire"),
    )
    rows = start(run, options.nproc, options.latency, options.bandwidth)[0]
    show(dict(zip(CAPS, rows, strict=True)), options.picture)


if __name__ == "__main__":
    main()
