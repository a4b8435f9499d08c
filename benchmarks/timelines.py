"""python -m benchmarks.timelines: draws a step on gloo, on mpi and between two hosts.

Examples:
    sudo python -m benchmarks.timelines              ResNet-18, two ranks, everywhere
    python -m benchmarks.timelines --place gloo mpi  without root

For each place, draws the median step of two ranks with the default buckets, and names exposed
buckets and late ranks. A second Reducer with smaller buckets (--cap) takes turns with the first;
the medians of both are below. Two hosts need root, `ip` and `tc`: they are network namespaces with
a wire of 1 Gbit/s between them (harness/network.py).

Text, picture and the times of all steps go to benchmarks/results, or to the folder of --results.
"""

import argparse
import sys
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import network
from benchmarks.harness.report import make_parser, write
from ddp_from_scratch import Reducer, UsageError, process_group
from ddp_from_scratch.bench.contenders import ContenderSpec, contenders, reducer
from ddp_from_scratch.bench.results import text_table
from ddp_from_scratch.bench.timing import start
from ddp_from_scratch.bench.workloads import WORKLOADS, Workload
from ddp_from_scratch.launch import environment
from ddp_from_scratch.launch.rank_process import run_to_exit
from ddp_from_scratch.watch.record import Record
from ddp_from_scratch.watch.render import as_text, draw
from ddp_from_scratch.watch.timeline import SKIP, Timeline

GLOO, MPI, TWO_HOSTS = PLACES = ("gloo", "mpi", "two-hosts")
GBIT = 1.0


def main() -> int:
    options = parse(sys.argv[1:])
    if environment.launcher() != "none":
        measure(options)
        return 0
    for place in options.place:
        # The last of several equal options counts.
        arguments = [*sys.argv[1:], "--place", place]
        if place == TWO_HOSTS:
            network.check_available([GLOO])
            rank = [sys.executable, "-m", "benchmarks.timelines", *arguments]
            with network.stoppable(), network.two_hosts(GBIT) as hosts:
                code = network.run_ranks(hosts, 1, GLOO, rank)
        else:
            code = start("benchmarks.timelines", place, 2, *arguments)
        if code:
            return code
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("benchmarks.timelines", __doc__)
    parser.add_argument(
        "--place", nargs="+", choices=PLACES, default=list(PLACES), help="default: all"
    )
    parser.add_argument("--model", choices=WORKLOADS, default="resnet18", metavar="M")
    parser.add_argument("--steps", type=int, default=25, help="steps of each Reducer (default: 25)")
    parser.add_argument(
        "--cap",
        type=float,
        default=4.0,
        metavar="MB",
        help="cap of the smaller buckets (default: 4)",
    )
    # `start` passes these to the ranks of every benchmark.
    parser.add_argument("--backend", help=argparse.SUPPRESS)
    parser.add_argument("--nproc", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.cap < 0:
        raise UsageError(
            f"--steps must be 1 or more and --cap 0 or more, got {options.steps}, {options.cap:g}"
        )
    return options


def measure(options: argparse.Namespace) -> None:
    (place,) = options.place
    torch.set_num_threads(1)
    with process_group(MPI if place == MPI else GLOO) as world:
        torch.manual_seed(world.rank)
        small = {"bucket_cap_mb": options.cap}
        settings = {"default buckets": {}, f"buckets of {options.cap:g} MiB": small}
        records = record(WORKLOADS[options.model], world.device, settings, options.steps)
        if world.rank == 0:
            report(options, f"timeline-{options.model}-{place}", records)


def record(
    workload: Workload, device: torch.device, settings: Mapping[str, dict[str, Any]], count: int
) -> dict[str, Record]:
    """Records a Reducer with each of these settings; they take turns. Collective."""
    made: list[Reducer] = []
    views = {"made": made, "gradient_as_bucket_view": True}
    specs = [ContenderSpec(name, reducer(**own, **views)) for name, own in settings.items()]
    compared = contenders(workload, device, specs, keep_start=False)
    timelines = [Timeline(averaging, None, steps=count) for averaging in made]
    for _ in range(SKIP + count + 1):
        for contender in compared:
            dist.barrier()  # all ranks begin a step together
            contender.step()
    found = {}
    for name, timeline, averaging in zip(settings, timelines, made, strict=True):
        timeline.close()
        averaging.remove()
        assert timeline.record is not None, "fewer steps were taken"
        found[name] = timeline.record
    return found


def report(options: argparse.Namespace, name: str, records: dict[str, Record]) -> None:
    first = next(iter(records.values()))
    step = first.typical
    rows, samples = [], {}
    for caption, whole in records.items():
        lengths = [step.length for step in whole.steps]
        exposed = [max(rank.exposed for rank in step.ranks) for step in whole.steps]
        rows.append([caption, f"{median(lengths):.1f}", f"{median(exposed):.1f}"])
        samples[caption] = {"milliseconds": lengths, "exposed": exposed}
    table = text_table([f"median of {options.steps} steps, ms", "step", "exposed"], rows)
    text = f"{as_text(first, step)}\n\n{table}\n"
    print(f"\n{text}", flush=True)
    settings = {"benchmark": "timelines", "model": options.model, "place": options.place[0]}
    write(name, first.title, samples, options.results, **settings)
    path = options.results / f"{name}.png"
    path.with_suffix(".txt").write_text(text, encoding="utf-8")
    drawn = draw(first, step, path)
    print(f"drawn to {path}" if drawn else "not drawn: there is no matplotlib", flush=True)


if __name__ == "__main__":
    run_to_exit(main)
