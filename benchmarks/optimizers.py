"""python -m benchmarks.optimizers: measures Muon's step, and the loss with SGD, AdamW and Muon.

Examples:
    python -m benchmarks.optimizers              gloo and mpi, a transformer, two processes
    python -m benchmarks.optimizers --nproc 4 --backend gloo
    python -m benchmarks.optimizers --quick      gloo alone, few steps

First it times `step()` with the same gradients on all ranks: `ddp.Muon`, which divides the matrices
of linear layers over the ranks, and torch.optim.Muon on every rank, both with fused AdamW for
all else and products of bfloat16, and the same bits. They take turns in each round. Each median has
a 95 % bootstrap interval; ratios are to torch's, round by round, of the slowest rank. With more
ranks than cores, the CPU time of a rank shows what a step takes if each rank has a core.

Then a small GPT (`examples/gpt.py`, which names the learning rates) learns Python's documentation
letter by letter, with each optimizer in turn. Draws the mean loss of all ranks by steps and by
seconds.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import ddp_from_scratch as ddp
from benchmarks.harness.launch import ON_CPU, add_common_options, parse_sweep, run_on_ranks
from benchmarks.harness.letters import batches, make_step
from benchmarks.harness.report import draw_curves, make_parser, write
from ddp_from_scratch.bench.contenders import Contender
from ddp_from_scratch.bench.results import Samples, median_interval, text_table
from ddp_from_scratch.bench.timing import check_equal, interleave, rounds_for, warm_up
from ddp_from_scratch.bench.workloads import WORKLOADS
from ddp_from_scratch.launch.rank_process import run_to_exit
from ddp_from_scratch.world.world import World

TORCHS, OURS = "torch.optim.Muon on every rank", "ddp.Muon"
OPTIMIZERS = ("sgd", "adamw", "muon")
MEAN_OF = 10  # steps


def main() -> int:
    return run_on_ranks("benchmarks.optimizers", parse(sys.argv[1:]), measure)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("benchmarks.optimizers", __doc__)
    add_common_options(parser, ["transformer"], ON_CPU)
    parser.add_argument("--steps", type=int, help="training steps (default: 300; 30 with --quick)")
    options = parse_sweep(parser, arguments, quick="gloo", full="the same model")
    if options.quick and options.backend == list(ON_CPU):
        options.backend = ["gloo"]
    if options.steps is None:
        options.steps = 30 if options.quick else 300
    if options.steps < MEAN_OF:
        raise ddp.UsageError(f"--steps must be {MEAN_OF} or more, got {options.steps}")
    return options


def measure(options: argparse.Namespace, world: World, model: str, title: str) -> None:
    compared = [contender(name, WORKLOADS[model].model) for name in (TORCHS, OURS)]
    rounds = rounds_for(options.seconds, options.rounds, world.device, title)
    warm_up(compared)
    check_equal(compared, tolerance=0.0)
    samples = interleave(compared, rounds, world.device)
    if world.rank == 0:
        report_steps(options, world, model, title, samples)
    if model == options.model[-1]:
        losses = train(world, options.steps)
        if world.rank == 0:
            report_losses(options, world, losses)


# The step ---------------------------------------------------------------------------------------


def contender(name: str, make: Callable[[], nn.Module]) -> Contender:
    """Makes a model with gradients, equal on all ranks; its step is the optimizer's alone."""
    torch.manual_seed(0)
    model = make()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    linear = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)} - tables
    matrices = [p for p in model.parameters() if id(p) in linear]
    others = [p for p in model.parameters() if id(p) not in linear]
    optimizers: list[torch.optim.Optimizer]
    if name == OURS:
        groups = [{"params": matrices}, {"params": others, "use_muon": False}]
        reducer = ddp.Reducer(model)
        optimizers = [ddp.Muon(groups, reducer=reducer, ns_dtype=torch.bfloat16)]
    else:
        optimizers = [torch.optim.Muon(matrices), torch.optim.AdamW(others, fused=True)]

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    return Contender(name, model, step, [p.detach().clone() for p in model.parameters()])


def report_steps(
    options: argparse.Namespace, world: World, model: str, title: str, samples: list[Samples]
) -> None:
    rivals = next(s for s in samples if s.name == TORCHS)
    rows = []
    for s in samples:
        cpu = np.array(s.cpu_milliseconds)
        medians = (median_interval(np.array(s.milliseconds)), median_interval(cpu))
        ratios = (s.ratio_to(rivals), median_interval(cpu / np.array(rivals.cpu_milliseconds)))
        cells = [
            f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
            for pair in zip(medians, ratios, strict=True)
            for digits, (middle, low, high) in zip((1, 2), pair, strict=True)
        ]
        rows.append([s.name, *cells])
    print(f"\n{title}, {len(rivals.milliseconds)} steps each", flush=True)
    heads = ["", "ms per step", "/ torch's", "CPU ms of a rank", "/ torch's"]
    print(text_table(heads, rows), flush=True)
    settings = {"benchmark": "optimizers", "backend": world.backend, "nproc": world.world_size}
    name = f"optimizers-{model}-{world.backend}-{world.world_size}"
    found = [asdict(s) for s in samples]
    write(name, title, found, options.results, model=model, **settings)


# The loss ---------------------------------------------------------------------------------------


def train(world: World, steps: int) -> dict[str, dict[str, list[float]]]:
    """Returns the loss of each step, the mean of all ranks, and its seconds, by optimizer."""
    trainers = {name: make_step(name, steps) for name in OPTIMIZERS}
    losses: dict[str, list[torch.Tensor]] = {name: [] for name in OPTIMIZERS}
    seconds: dict[str, list[float]] = {name: [] for name in OPTIMIZERS}
    draw = batches(torch.Generator().manual_seed(world.rank))
    for _ in range(steps):
        batch = draw()
        for name, step in trainers.items():
            dist.barrier()
            began = time.perf_counter()
            losses[name].append(step(batch))
            seconds[name].append(time.perf_counter() - began)
    found = {}
    for name in OPTIMIZERS:
        total = torch.stack(losses[name])
        dist.all_reduce(total)
        found[name] = {"loss": (total / world.world_size).tolist(), "seconds": seconds[name]}
    return found


def report_losses(
    options: argparse.Namespace, world: World, found: dict[str, dict[str, list[float]]]
) -> None:
    title = f"a GPT on letters; {world.backend}, {world.world_size} ranks"
    window = np.ones(MEAN_OF) / MEAN_OF
    by_steps: dict[str, Any] = {}
    by_seconds: dict[str, Any] = {}
    rows = []
    for name, of_one in found.items():
        means = np.convolve(of_one["loss"], window, "valid")
        passed = np.cumsum(of_one["seconds"])
        by_steps[name] = range(MEAN_OF, options.steps + 1), means
        by_seconds[name] = passed[MEAN_OF - 1 :], means
        rows.append([name, f"{means[-1]:.3f}", f"{passed[-1]:.1f}"])
    print(f"\n{title}, {options.steps} steps each")
    heads = ["", f"mean loss of the last {MEAN_OF} steps", "seconds"]
    print(text_table(heads, rows), flush=True)
    name = f"optimizers-loss-{world.backend}-{world.world_size}"
    settings = {"benchmark": "optimizers", "backend": world.backend, "nproc": world.world_size}
    write(name, title, found, options.results, **settings)
    panels = {"steps": by_steps, "seconds": by_seconds}
    draw_curves(name, title, f"loss, mean of {MEAN_OF} steps", panels, options.results)


if __name__ == "__main__":
    run_to_exit(main)
