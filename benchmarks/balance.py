"""python -m benchmarks.balance: measures steps of ranks that are not equally fast.

Examples:
    python -m benchmarks.balance                   rank 1 is 1, 1.5, 2.2 and 4 times slower
    python -m benchmarks.balance --slower 3 --virtual-ranks 32
    python -m benchmarks.balance --quick           3 seconds for each factor

A busy loop makes rank 1 slower: after each virtual rank it computes on until the factor is
reached. Three Reducers take turns: with equal parts, with `balance=True`, and with the deal that is
ideal for that factor from the first step on. Their first ten steps, in which the times become
known, do not count. Each median has a 95 % bootstrap interval; ratios are to the ideal deal, round
by round.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.harness.launch import add_common_options, parse_sweep, run_on_ranks
from benchmarks.harness.report import Bar, draw_bars, make_parser, write
from ddp_from_scratch import Reducer, UsageError, broadcast_parameters
from ddp_from_scratch.bench.contenders import OPTIMIZERS, Contender
from ddp_from_scratch.bench.results import Samples, median_interval, text_table
from ddp_from_scratch.bench.timing import check_ranks, interleave, rounds_for
from ddp_from_scratch.bench.workloads import WORKLOADS, Workload
from ddp_from_scratch.common.numbers import is_power_of_two
from ddp_from_scratch.launch.rank_process import run_to_exit
from ddp_from_scratch.virtual_ranks.balance import Balance
from ddp_from_scratch.virtual_ranks.deal import counts_by_speed
from ddp_from_scratch.world.world import World

SETTLING = 10
EQUAL, BALANCED, IDEAL = "equal parts", "balance=True", "the ideal deal"


def main() -> int:
    options = parse(sys.argv[1:])
    return run_on_ranks("benchmarks.balance", options, measure)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("benchmarks.balance", __doc__)
    add_common_options(parser, models=("layers500",), backends=("gloo", "mpi"))
    text = "how many times slower rank 1 is (default: 1 1.5 2.2 4)"
    factors = [1.0, 1.5, 2.2, 4.0]
    parser.add_argument("--slower", type=float, nargs="+", default=factors, metavar="X", help=text)
    parser.add_argument("--virtual-ranks", type=int, default=16, help="default: 16")
    options = parse_sweep(parser, arguments, quick="the same", full="the same")
    if not is_power_of_two(options.virtual_ranks) or options.virtual_ranks < options.nproc:
        raise UsageError(
            f"--virtual-ranks must be a power of two, and at least the number of ranks, "
            f"{options.nproc}, got {options.virtual_ranks}"
        )
    if options.nproc < 2:
        raise UsageError(f"--nproc must be 2 or more, since rank 1 is slow, got {options.nproc}")
    if wrong := [factor for factor in options.slower if not 1 <= factor <= 100]:
        raise UsageError(f"--slower must be 1 to 100, got {wrong[0]:g}")
    return options


def measure(options: argparse.Namespace, world: World, model: str, title: str) -> None:
    found: dict[float, list[Samples]] = {}
    for factor in options.slower:
        compared = make_contenders(WORKLOADS[model], world, options.virtual_ranks, factor)
        for _ in range(SETTLING):
            for contender in compared:
                contender.step()
        rounds = rounds_for(options.seconds, options.rounds, world.device, title)
        found[factor] = interleave(compared, rounds, world.device)
        check_ranks(compared)
    if world.rank == 0:
        report(options, world, model, title, found)


def make_contenders(
    workload: Workload, world: World, virtual_ranks: int, factor: float
) -> list[Contender]:
    batch = [tensor.to(world.device) for tensor in workload.batch()]
    slow = factor if world.rank == 1 else 1.0
    found = []
    for name in (EQUAL, BALANCED, IDEAL):
        torch.manual_seed(0)
        model = workload.model().to(world.device)
        broadcast_parameters(model)
        averaging = Reducer(model, virtual_ranks=virtual_ranks, balance=name != EQUAL)
        dealer = averaging.core.observer(Balance)
        if name == IDEAL and dealer is not None:
            seconds = [factor if rank == 1 else 1.0 for rank in range(world.world_size)]
            dealer.counts = counts_by_speed(virtual_ranks, seconds)
            dealer.learn = lambda seconds: None  # type: ignore[method-assign]
        found.append(Contender(name, model, _step(workload, model, averaging, batch, slow)))
    return found


def _step(
    workload: Workload, model: Any, averaging: Reducer, batch: Sequence[torch.Tensor], slow: float
) -> Any:
    optimizer = OPTIMIZERS["sgd"].fused(model)

    def compute(_virtual_rank: int) -> None:
        began = time.perf_counter()
        loss = workload.loss(model, batch)
        forward = time.perf_counter() - began
        # Before backward, which in the last virtual rank waits for the other ranks.
        while time.perf_counter() - began < forward * (1 + (slow - 1) * whole):
            pass
        loss.backward()

    def step() -> None:
        averaging.run_virtual_ranks(compute)
        optimizer.step()

    # Forward and backward, in forward passes. Both are slower while the other ranks compute.
    ratios = []
    for _ in range(9):
        began = time.perf_counter()
        with averaging.no_sync():
            loss = workload.loss(model, batch)
            forward = time.perf_counter() - began
            loss.backward()
        ratios.append((time.perf_counter() - began) / forward)
    model.zero_grad()
    whole = median(ratios)
    return step


def report(
    options: argparse.Namespace,
    world: World,
    model: str,
    title: str,
    found: dict[float, list[Samples]],
) -> None:
    rows, panels = [], {}
    for factor, samples in found.items():
        ideal = samples[-1]
        head = f"rank 1 is {factor:g} times slower" if factor > 1 else "equal ranks"
        for each in samples:
            middle, low, high = median_interval(np.array(each.milliseconds))
            ratio = "{:.2f} ({:.2f} to {:.2f})".format(*each.ratio_to(ideal))
            rows.append([head, each.name, f"{middle:.1f} ({low:.1f} to {high:.1f})", ratio])
            head = ""
        panels[rows[-3][0]] = [Bar(each.name, each.quartiles, "ours") for each in samples]
    print(f"\n{title}, {options.virtual_ranks} virtual ranks", flush=True)
    print(text_table(["", "deal", "ms per step", f"/ {IDEAL}"], rows), flush=True)
    name = f"balance-{model}-{world.backend}-{world.world_size}"
    settings = {"benchmark": "balance", "model": model, "virtual_ranks": options.virtual_ranks}
    settings |= {"backend": world.backend, "nproc": world.world_size}
    lines = [asdict(s) | {"slower": factor} for factor, of in found.items() for s in of]
    write(name, title, lines, options.results, **settings)
    draw_bars(name, title, "ms per step; shorter is faster", panels, options.results)


if __name__ == "__main__":
    run_to_exit(main)
