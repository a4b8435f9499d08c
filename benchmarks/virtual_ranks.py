"""python -m benchmarks.virtual_ranks: measures what the same bits on any number of ranks cost.

Examples:
    python -m benchmarks.virtual_ranks             gloo and mpi, MLP and ResNet-18, two processes
    python -m benchmarks.virtual_ranks --nproc 4 --model mlp64
    python -m benchmarks.virtual_ranks --quick     one model

A step on the same global batch, in the same rounds: an ordinary Reducer, on gloo also one without
shared memory, and Reducers with as many virtual ranks as ranks, twice and eight times as many. With
twice as many, also with `recheck_every` 1, 10 and 100. Each median has a 95 % bootstrap interval;
ratios are to the ordinary Reducer, round by round. More virtual ranks take more and smaller
kernels, and more sums. A recheck computes one virtual rank more, on one rank. Where it is in one of
many steps, the median does not show it, but the mean does: give it a few hundred `--rounds`.
"""

import argparse
import sys
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from benchmarks.harness.launch import add_common_options, parse_sweep, run_on_ranks
from benchmarks.harness.report import make_parser, write
from ddp_from_scratch import Reducer, UsageError, broadcast_parameters
from ddp_from_scratch.bench.contenders import (
    OPTIMIZERS,
    Contender,
    ContenderSpec,
    contenders,
    reducer,
)
from ddp_from_scratch.bench.results import Samples, median_interval, text_table
from ddp_from_scratch.bench.timing import check_ranks, interleave, rounds_for, warm_up
from ddp_from_scratch.bench.workloads import WORKLOADS, Workload
from ddp_from_scratch.common.group import gather_objects
from ddp_from_scratch.common.numbers import is_power_of_two
from ddp_from_scratch.launch.rank_process import run_to_exit
from ddp_from_scratch.world.world import World

TIMES = (1, 2, 8)
RECHECKED = 2  # so many times as many virtual ranks as ranks, with each of these `recheck_every`
EVERY = (1, 10, 100)
ORDINARY = "Reducer"
# Rank 0's buffers, as with virtual ranks.
SETTINGS: dict[str, Any] = {"gradient_as_bucket_view": True, "sync_buffers": True}


def main() -> int:
    options = parse(sys.argv[1:])
    return run_on_ranks("benchmarks.virtual_ranks", options, measure)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("benchmarks.virtual_ranks", __doc__)
    add_common_options(parser)
    options = parse_sweep(parser, arguments, quick="mlp", full="the same models")
    if not is_power_of_two(options.nproc):
        raise UsageError(f"--nproc must be a power of two, got {options.nproc}")
    return options


def measure(options: argparse.Namespace, world: World, model: str, title: str) -> None:
    compared = make_contenders(WORKLOADS[model], world)
    rounds = rounds_for(options.seconds, options.rounds, world.device, title)
    warm_up(compared)
    samples = interleave(compared, rounds, world.device)
    check_ranks(compared)
    if world.rank == 0:
        report(options, world, model, title, samples)


def make_contenders(workload: Workload, world: World) -> list[Contender]:
    """Makes the ordinary contenders, and one per number of virtual ranks, with the same batch."""
    batch = [tensor.to(world.device) for tensor in workload.batch()]
    if len(batch[0]) % max(TIMES):
        raise UsageError(f"--model: a batch of {len(batch[0])} is not one of 8 virtual ranks")
    specs = [ContenderSpec(ORDINARY, reducer(**SETTINGS))]
    if world.backend == "gloo":
        plain = reducer(shared_memory=False, **SETTINGS)
        specs.append(ContenderSpec(f"{ORDINARY}, no shared memory", plain))
    shared = replace(workload, batch=lambda: batch)
    found = contenders(shared, world.device, specs, keep_start=False)
    # Of all ranks, since a recheck repeats another rank's part.
    everyones = gather_objects([tensor.cpu() for tensor in batch], None)
    batches = [[tensor.to(world.device) for tensor in each] for each in everyones]
    kinds = [(times, None) for times in TIMES] + [(RECHECKED, every) for every in EVERY]
    return [*found, *(_on_virtual_ranks(*kind, workload, world, batches) for kind in kinds)]


def _on_virtual_ranks(
    times: int,
    recheck_every: int | None,
    workload: Workload,
    world: World,
    batches: list[list[torch.Tensor]],
) -> Contender:
    torch.manual_seed(0)
    model, count = workload.model().to(world.device), times * world.world_size
    broadcast_parameters(model)
    averaging = Reducer(model, virtual_ranks=count, recheck_every=recheck_every, **SETTINGS)
    optimizer = OPTIMIZERS["sgd"].fused(model)
    # By virtual rank: the neighbours of a rank divide its batch.
    parts = [
        part
        for batch in batches
        for part in zip(*(tensor.chunk(times) for tensor in batch), strict=True)
    ]

    def compute(virtual_rank: int) -> None:
        workload.loss(model, parts[virtual_rank]).backward()

    def step() -> None:
        averaging.run_virtual_ranks(compute)
        optimizer.step()

    checked = "" if recheck_every is None else f", recheck_every={recheck_every}"
    return Contender(f"{count} virtual ranks{checked}", model, step)


def report(
    options: argparse.Namespace, world: World, model: str, title: str, samples: list[Samples]
) -> None:
    ordinary = next(s for s in samples if s.name == ORDINARY)
    rows = []
    for s in samples:
        middle, low, high = median_interval(np.array(s.milliseconds))
        ratio = "{:.2f} ({:.2f} to {:.2f})".format(*s.ratio_to(ordinary))
        mean = f"{np.mean(s.milliseconds):.1f}"
        rows.append([s.name, f"{middle:.1f} ({low:.1f} to {high:.1f})", mean, ratio])
    print(f"\n{title}, {len(ordinary.milliseconds)} steps each", flush=True)
    print(text_table(["", "ms per step", "mean", f"/ {ORDINARY}"], rows), flush=True)
    settings = {"benchmark": "virtual_ranks", "model": model}
    settings |= {"backend": world.backend, "nproc": world.world_size}
    name = f"virtual-ranks-{model}-{world.backend}-{world.world_size}"
    write(name, title, [asdict(s) for s in samples], options.results, **settings)


if __name__ == "__main__":
    run_to_exit(main)
