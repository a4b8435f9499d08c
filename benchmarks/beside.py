"""python -m benchmarks.beside: draws a step on torch's DDP above the same step on a Reducer.

Examples:
    python -m benchmarks.beside                        gloo, ResNet-18, two processes
    python -m benchmarks.beside --model transformer --nproc 4

Both have gradients as bucket views and torch's fused SGD, and take turns in the same processes. The
picture shows rank 0's part of the median step of each on one axis: what its main thread does, and
when gradients are in flight. To compare the times of steps, use benchmarks.step_time.
"""

import argparse
import sys
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.launch import run_on_ranks
from benchmarks.ladder import parse, save
from ddp_from_scratch import Reducer
from ddp_from_scratch.bench.contenders import (
    TORCH_BEST,
    ContenderSpec,
    Group,
    Optimizers,
    Training,
    contenders,
    reducer,
)
from ddp_from_scratch.bench.workloads import WORKLOADS
from ddp_from_scratch.launch.rank_process import run_to_exit
from ddp_from_scratch.watch.record import BucketTimes, RankTimes, Span, StepTimes, step_times
from ddp_from_scratch.watch.timeline import SKIP, Timeline
from ddp_from_scratch.world.world import World

TORCHS, OURS = "torch's DistributedDataParallel", "ddp_from_scratch.Reducer"


class TorchRecorder:
    """Takes the times of torch's DDP that a Timeline takes of a Reducer."""

    def __init__(self, wrapped: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        self.steps: list[RankTimes] = []
        self._at: dict[str, float] = {}
        self._launched: dict[int, float] = {}  # by bucket
        self._landed: dict[int, float] = {}
        wrapped.register_comm_hook(None, self._send)
        wrapped.register_forward_pre_hook(lambda *_: self._note("forward"))
        wrapped.register_forward_hook(self._on_forwarded)
        optimizer.register_step_pre_hook(lambda *_: self._note("step"))
        optimizer.register_step_post_hook(lambda *_: self._end_step())

    def _note(self, event: str) -> None:
        self._at[event] = time.perf_counter() * 1e3

    def _on_forwarded(self, module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        self._note("forwarded")
        output.register_hook(lambda _: self._note("backward"))

    def _send(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        # As torch's default hook, which is C++ and takes no time.
        self._launched[bucket.index()] = time.perf_counter() * 1e3
        tensor = bucket.buffer().div_(dist.get_world_size())
        work = dist.all_reduce(tensor, async_op=True)
        return work.get_future().then(partial(self._on_landed, bucket.index()))

    def _on_landed(self, index: int, future: torch.futures.Future[Any]) -> torch.Tensor:
        self._landed[index] = time.perf_counter() * 1e3
        tensor: torch.Tensor = future.value()[0]
        return tensor

    def _end_step(self) -> None:
        self._note("stepped")
        at, buckets = self._at, []
        launched = over = max(self._launched.values())  # the last gradient launches a bucket
        for index, begin in sorted(self._launched.items()):
            end = self._landed[index]
            waited = Span(launched, max(launched, end))  # for one bucket after another
            launched = waited.end
            # With views nothing is copied, and DDP has packed before it calls the hook.
            pack, unpack = Span(begin, begin), Span(end, end)
            buckets.append(BucketTimes(index, pack, Span(begin, end), waited, unpack))
        forward = Span(at["forward"], at["forwarded"])
        backward, update = Span(at["backward"], over), Span(at["step"], at["stepped"])
        spans = (forward,), (backward,), (), tuple(buckets), update
        self.steps.append(RankTimes(dist.get_rank(), *spans, forward.begin, update.end))


def main() -> int:
    return run_on_ranks(
        "benchmarks.beside", parse(sys.argv[1:], "benchmarks.beside", __doc__), measure
    )


def measure(options: argparse.Namespace, world: World, model: str, title: str) -> None:
    made: list[Reducer] = []
    recorders: list[TorchRecorder] = []

    def torchs(model: nn.Module, group: Group, optimizers: Optimizers) -> Training:
        wrapped = DistributedDataParallel(model, process_group=group, **TORCH_BEST)
        optimizer = optimizers.fused(model)
        recorders.append(TorchRecorder(wrapped, optimizer))

        def update(loss: torch.Tensor) -> None:
            loss.backward()
            optimizer.step()

        return Training(wrapped, optimizer.zero_grad, update)

    ours = reducer(made=made, gradient_as_bucket_view=True)
    specs = [ContenderSpec(TORCHS, torchs), ContenderSpec(OURS, ours)]
    compared = contenders(WORKLOADS[model], world.device, specs, keep_start=False)
    timeline = Timeline(made[0], None, steps=options.steps)
    for _ in range(SKIP + options.steps + 1):
        for contender in compared:
            dist.barrier()  # all ranks begin a step together
            contender.step()
    timeline.close()
    made[0].remove()
    gathered: list[list[RankTimes]] = [[] for _ in range(world.world_size)]
    dist.all_gather_object(gathered, recorders[0].steps[SKIP:-1])
    steps = [
        step_times(number, (), ranks) for number, ranks in enumerate(zip(*gathered, strict=True))
    ]
    middle = sorted(steps, key=lambda step: step.length)[len(steps) // 2]
    assert timeline.record is not None, "fewer steps were taken"
    if world.rank == 0:
        report(options, model, title, {TORCHS: middle, OURS: timeline.record.typical})


def report(
    options: argparse.Namespace, model: str, title: str, steps: Mapping[str, StepTimes]
) -> None:
    captions = [
        f"{name}: {step.length:.1f} ms, waits {step.ranks[0].exposed:.1f} ms"
        for name, step in steps.items()
    ]
    print("\n".join(captions), flush=True)
    save("beside", options, model, title, steps, captions)


if __name__ == "__main__":
    run_to_exit(main)
