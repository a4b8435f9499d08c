"""python -m benchmarks.virtual_ranks: measures what the same bits on any number of ranks cost.

Examples:
    python -m benchmarks.virtual_ranks                   gloo and mpi, MLP and ResNet-18, two
    processes python -m benchmarks.virtual_ranks --nproc 4 --model mlp64 python -m
    benchmarks.virtual_ranks --quick           one model

A step on the same global batch, in the same rounds: an ordinary Reducer, on gloo also one without
shared memory, and Reducers with as many virtual ranks as ranks, twice and eight times as many. Each
median has a 95 % bootstrap interval; ratios are to the ordinary Reducer, round by round. More
virtual ranks take more and smaller kernels, and adding up.
"""

import argparse
import gc
import sys
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.harness import make_parser
from benchmarks.harness.launch import Duration, add_common_options, backend_of_job
from ddp_from_scratch import Reducer, UsageError, broadcast_parameters, check_sync, process_group
from ddp_from_scratch.bench.contenders import Contender
from ddp_from_scratch.bench.machine import write
from ddp_from_scratch.bench.samples import Samples, median_interval
from ddp_from_scratch.bench.timing import interleave, rounds_for, warm_up
from ddp_from_scratch.bench.verdict import text_table
from ddp_from_scratch.bench.ways import check_memory, start
from ddp_from_scratch.bench.workloads import WORKLOADS, Workload
from ddp_from_scratch.launch import environment
from ddp_from_scratch.launch.rank_process import run_to_exit
from ddp_from_scratch.world import World

# Models whose batches divide by 8.
MODELS = ("mlp", "resnet18")
DURATION = Duration(usual=12.0, full=60.0)
TIMES = (1, 2, 8)
ORDINARY = "Reducer"


def main() -> int:
    options = parse(sys.argv[1:])
    if environment.launcher() != "none":
        measure(options)
        return 0
    for backend in options.backend:
        for model in options.model:
            check_memory(WORKLOADS[model], 2 + len(TIMES), options.nproc)
        if code := start("benchmarks.virtual_ranks", backend, options.nproc, *sys.argv[1:]):
            return code
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("benchmarks.virtual_ranks", __doc__)
    add_common_options(parser, MODELS)
    parser.add_argument("--nproc", type=int, default=2, help="ranks (default: 2)")
    DURATION.add_options(parser, quick="mlp", full="the same models")
    options = parser.parse_args(arguments)
    if options.quick and options.model == list(MODELS):
        options.model = ["mlp"]
    DURATION.settle(options)
    if options.nproc < 1 or options.nproc & (options.nproc - 1):
        raise UsageError(f"--nproc must be a power of two, got {options.nproc}")
    return options


def measure(options: argparse.Namespace) -> None:
    """Times every model on this rank. Rank 0 prints and writes."""
    backend = backend_of_job(options)
    torch.set_num_threads(1)
    with process_group(backend) as world:
        for model in options.model:
            workload = WORKLOADS[model]
            torch.manual_seed(world.rank)
            compared = contenders(workload, world)
            title = f"{workload.name}; {backend}, {world.world_size} ranks"
            rounds = rounds_for(options.seconds, options.rounds, world.device, title)
            warm_up(compared)
            samples = interleave(compared, rounds, world.device)
            for contender in compared:
                check_sync(contender.model)
            if world.rank == 0:
                report(options, world, model, title, samples)
            compared.clear()
            gc.collect()  # hooks make cycles of model and Reducer


def contenders(workload: Workload, world: World) -> list[Contender]:
    """Makes the ordinary contenders, and one per number of virtual ranks, with the same batch."""
    batch = [tensor.to(world.device) for tensor in workload.batch()]
    if len(batch[0]) % max(TIMES):
        raise UsageError(f"--model: a batch of {len(batch[0])} is not one of 8 virtual ranks")
    found = [_ordinary(ORDINARY, workload, world, batch)]
    if world.backend == "gloo":
        name = f"{ORDINARY}, no shared memory"
        found.append(_ordinary(name, workload, world, batch, shared_memory=False))
    return [*found, *(_on_virtual_ranks(times, workload, world, batch) for times in TIMES)]


def _made(
    workload: Workload, world: World, **settings: Any
) -> tuple[nn.Module, Reducer, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = workload.model().to(world.device)
    broadcast_parameters(model)
    # Bucket views and rank 0's buffers, as with virtual ranks.
    reducer = Reducer(model, gradient_as_bucket_view=True, broadcast_buffers=True, **settings)
    return model, reducer, torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, fused=True)


def _ordinary(
    name: str, workload: Workload, world: World, batch: list[torch.Tensor], **settings: Any
) -> Contender:
    model, _, optimizer = _made(workload, world, **settings)

    def step() -> None:
        optimizer.zero_grad()
        workload.loss(model, batch).backward()
        optimizer.step()

    return Contender(name, model, step)


def _on_virtual_ranks(
    times: int, workload: Workload, world: World, batch: list[torch.Tensor]
) -> Contender:
    model, reducer, optimizer = _made(workload, world, virtual_ranks=times * world.world_size)
    parts = list(zip(*(tensor.chunk(times) for tensor in batch), strict=True))

    def step() -> None:
        for part, virtual_rank in zip(parts, reducer.virtual_rank_range, strict=True):
            with reducer.virtual_rank(virtual_rank):
                workload.loss(model, part).backward()
        optimizer.step()

    return Contender(f"{times * world.world_size} virtual ranks", model, step)


def report(
    options: argparse.Namespace, world: World, model: str, title: str, samples: list[Samples]
) -> None:
    ordinary = next(s for s in samples if s.name == ORDINARY)
    rows = []
    for s in samples:
        middle, low, high = median_interval(np.array(s.milliseconds))
        ratio = "{:.2f} ({:.2f} to {:.2f})".format(*s.ratio_to(ordinary))
        rows.append([s.name, f"{middle:.1f} ({low:.1f} to {high:.1f})", ratio])
    print(f"\n{title}, {len(ordinary.milliseconds)} steps each", flush=True)
    print(text_table(["", "ms per step", f"/ {ORDINARY}"], rows), flush=True)
    settings = {
        "benchmark": "virtual_ranks",
        "model": model,
        "backend": world.backend,
        "nproc": world.world_size,
    }
    file = f"virtual-ranks-{model}-{world.backend}-{world.world_size}"
    write(file, title, [asdict(s) for s in samples], settings=settings, folder=options.results)


if __name__ == "__main__":
    run_to_exit(main)
