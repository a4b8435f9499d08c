"""python -m benchmarks.ladder: draws a step on each rung, from the naive loop to shared memory.

Examples:
    python -m benchmarks.ladder                        gloo, ResNet-18, two processes
    python -m benchmarks.ladder --model transformer --nproc 4

Each rung adds one idea to the last one:

    naive           one all-reduce for each gradient, after backward
    flat            all gradients in one buffer, one all-reduce
    buckets         buffers of about 25 MiB (the first: 1), still after backward
    overlapped      each bucket is sent as soon as it is full, during backward
    shared memory   the same in memory that the ranks of a machine share, without messages

For each rung, draws rank 0's part of the median step: what its main thread does, and when gradients
are in flight. "exposed" is the time in which the thread only waits for them. All rungs use
`gradient_as_bucket_view=True` and fused SGD. Rungs run one after another; to compare the times of
steps, use benchmarks.step_time, where contenders take turns.
"""

import argparse
import gc
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.harness.launch import add_common_options, run_on_ranks
from benchmarks.harness.report import make_parser, write
from benchmarks.timelines import record
from ddp_from_scratch import UsageError
from ddp_from_scratch.bench.results import text_table
from ddp_from_scratch.bench.workloads import WORKLOADS
from ddp_from_scratch.launch.rank_process import run_to_exit
from ddp_from_scratch.watch.record import StepTimes
from ddp_from_scratch.watch.render import Row, computed, draw_panels, legend, line, sent
from ddp_from_scratch.world.world import World

RUNGS: dict[str, dict[str, Any]] = {
    "naive": {"bucket_cap_mb": 0, "overlap": False, "shared_memory": False},
    "flat": {"bucket_cap_mb": float("inf"), "overlap": False, "shared_memory": False},
    "buckets": {"overlap": False, "shared_memory": False},
    "overlapped": {"shared_memory": False},
    "shared memory": {},
}
CAPTIONS = {
    "naive": "naive, an all-reduce for each gradient",
    "flat": "flat, one all-reduce after backward",
    "buckets": "buckets after backward",
    "overlapped": "overlapped, buckets during backward",
    "shared memory": "shared memory in place of messages",
}


def main() -> int:
    return run_on_ranks("benchmarks.ladder", parse(sys.argv[1:]), measure)


def parse(
    arguments: list[str], program: str = "benchmarks.ladder", about: str | None = __doc__
) -> argparse.Namespace:
    parser = make_parser(program, about)
    # Only gloo has rungs without shared memory.
    add_common_options(parser, ["resnet18"], ["gloo"])
    parser.add_argument("--steps", type=int, default=25, help="steps of each rung (default: 25)")
    options = parser.parse_args(arguments)
    if options.nproc < 2 or options.steps < 1:
        raise UsageError(
            f"--nproc must be 2 or more and --steps 1 or more, got {options.nproc}, {options.steps}"
        )
    return options


def measure(options: argparse.Namespace, world: World, model: str, title: str) -> None:
    steps = {}
    for rung, settings in RUNGS.items():
        found = record(WORKLOADS[model], world.device, {rung: settings}, options.steps)
        steps[rung] = found[rung].typical
        gc.collect()  # hooks make cycles of model and Reducer
    if world.rank == 0:
        report(options, model, title, steps)


def rows_of(step: StepTimes) -> list[Row]:
    """Returns rank 0's part of a step, with all its buckets in one row."""
    rank = step.ranks[0]
    ways = [bar for bucket in rank.buckets for bar in sent(bucket)]
    return [Row("main thread", computed(rank), is_thread=True), Row("gradients", ways)]


def report(
    options: argparse.Namespace, model: str, title: str, steps: Mapping[str, StepTimes]
) -> None:
    longest = max(step.length for step in steps.values())
    print(f"\n{title}: rank 0's part of a step, {longest:.0f} ms wide")
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for rung, step in steps.items():
        print(f"\n{CAPTIONS[rung]}")
        for row in rows_of(step):
            print(line(row, 12, longest, colour))
    print(f"\n{legend()}\n")
    rows = [
        [rung, *(f"{value:.1f}" for value in (first.communication, first.exposed, late))]
        for rung, step in steps.items()
        for first in step.ranks[:1]
        for late in [sum(bucket.exposed_for_a_rank for bucket in first.buckets)]
    ]
    heads = ["ms of rank 0", "communication", "exposed", "for a late rank"]
    print(text_table(heads, rows), flush=True)
    captions = [
        f"{CAPTIONS[rung]}: exposed {step.ranks[0].exposed:.1f} ms" for rung, step in steps.items()
    ]
    save("ladder", options, model, title, steps, captions)


def save(
    benchmark: str,
    options: argparse.Namespace,
    model: str,
    title: str,
    steps: Mapping[str, StepTimes],
    captions: Sequence[str],
) -> None:
    """Writes the steps, and draws rank 0's part of each in a panel of its own."""
    name = f"{benchmark}-{model}-gloo-{options.nproc}"
    settings = {"benchmark": benchmark, "model": model, "nproc": options.nproc}
    samples = {name: asdict(step) for name, step in steps.items()}
    write(name, title, samples, options.results, **settings)
    path = options.results / f"{name}.png"
    panels = dict(zip(captions, map(rows_of, steps.values()), strict=True))
    drawn = draw_panels(panels, path, title=f"{title}: rank 0's part of a step")
    print(f"drawn to {path}" if drawn else "not drawn: there is no matplotlib", flush=True)


if __name__ == "__main__":
    run_to_exit(main)
