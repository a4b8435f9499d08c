"""python -m benchmarks.what_if: compares measured steps with those that the what-if page predicts.

Examples:
    sudo python -m benchmarks.what_if                        36 steps, some minutes
    python -m benchmarks.what_if --place memory messages     without root
    python -m benchmarks.what_if --record                    the models of the site's page alone

In each place two ranks on gloo record the times of a model's layers, both at once and without
communication. They measure an all-reduce of 4 KiB and one of 16 MiB, which gives the latency and
the bandwidth. Then they time steps with several bucket caps, with and without overlap. Each row of
the table has one of these and what `ddp_from_scratch/bench/step_model.py` predicts.

Places are `memory` (one machine, shared memory), `messages` (the same without it) and `1-gbit`:
two hosts, network namespaces with a wire of 1 Gbit/s. They share the cores of this machine.

The layer times of one rank alone go to what_if-models.json, which the site's page shows, and the
cases to what_if.json.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import network
from benchmarks.harness.report import make_parser, write
from ddp_from_scratch import Reducer, UsageError, broadcast_parameters, process_group
from ddp_from_scratch.bench import what_if
from ddp_from_scratch.bench.contenders import OPTIMIZERS, ContenderSpec, contenders, reducer
from ddp_from_scratch.bench.results import text_table, usable_cpus
from ddp_from_scratch.bench.step_model import CALL_MS, Layers, Setting, predict
from ddp_from_scratch.bench.timing import interleave, start, warm_up
from ddp_from_scratch.bench.workloads import WORKLOADS
from ddp_from_scratch.core.layout import bucket_caps
from ddp_from_scratch.launch import environment
from ddp_from_scratch.launch.rank_process import run_to_exit

MEMORY, MESSAGES, WIRE = PLACES = ("memory", "messages", "1-gbit")
GBIT = 1.0
MODELS = ("mlp", "resnet18", "transformer")
SITE = (*MODELS, "layers500")
RANKS = 2
GOAL = 1.5  # times more or less
SETTINGS: dict[str, dict[str, Any]] = {
    "default caps": {},
    "1 MiB": {"bucket_cap_mb": 1},
    "one bucket": {"bucket_cap_mb": float("inf")},
    "default caps, no overlap": {"overlap": False},
}
_SMALL, _LARGE = 2**10, 2**22  # elements of the measured all-reduces


def main() -> int:
    options = parse(sys.argv[1:])
    if environment.launcher() != "none":
        measure(options)
        return 0
    if options.record:
        cpu, sgd = torch.device("cpu"), OPTIMIZERS["sgd"]
        found = [what_if.record(WORKLOADS[name], cpu, sgd, options.rounds) for name in SITE]
        models = [asdict(layers) for layers in found]
        write("what_if-models", "layer times of one rank", models, options.results)
        return 0
    if WIRE in options.place:
        network.check_available(["gloo"])
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="what-if-") as folder:
        into = Path(folder) / "part"
        for place in options.place:
            # The last of several equal options counts.
            arguments = [*sys.argv[1:], "--place", place, "--into", str(into)]
            if code := run(place, arguments):
                return code
            cases += json.loads(into.read_text())
    print(table(cases), flush=True)
    write("what_if", "measured and predicted steps", cases, options.results)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("benchmarks.what_if", __doc__)
    parser.add_argument(
        "--place", nargs="+", choices=PLACES, default=list(PLACES), help="default: all"
    )
    text = f"default: {' '.join(MODELS)}"
    parser.add_argument("--model", nargs="+", choices=WORKLOADS, default=MODELS, help=text)
    text = "steps with each setting (default: 10)"
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help=text)
    text = "only record the models of the site's page"
    parser.add_argument("--record", action="store_true", help=text)
    # Of ranks: where rank 0 puts its part, and what `start` passes.
    for name in ("--into", "--backend", "--nproc"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rounds < 2:
        raise UsageError(f"--rounds must be 2 or more, got {options.rounds}")
    return options


def run(place: str, arguments: list[str]) -> int:
    """Runs the ranks of a place; returns the exit code of the first that failed."""
    if place != WIRE:
        return start("benchmarks.what_if", "gloo", RANKS, *arguments)
    rank = [sys.executable, "-m", "benchmarks.what_if", *arguments]
    with network.stoppable(), network.two_hosts(GBIT) as hosts:
        return network.run_ranks(hosts, 1, "gloo", rank)


def measure(options: argparse.Namespace) -> None:
    (place,) = options.place
    torch.set_num_threads(1)
    with process_group("gloo") as world:
        cases = []
        shared = {"shared_memory": place != MESSAGES}
        copies = what_if.copy_gbs(world.device)
        latency_us, gbit = fit(copies, **shared)
        for name in options.model:
            dist.barrier()  # all ranks compute at once, as in training
            layers = what_if.record(
                WORKLOADS[name], world.device, OPTIMIZERS["sgd"], options.rounds
            )
            specs = [
                ContenderSpec(what, reducer(**own, **shared, gradient_as_bucket_view=True))
                for what, own in SETTINGS.items()
            ]
            compared = contenders(WORKLOADS[name], world.device, specs, keep_start=False)
            warm_up(compared)
            for sample in interleave(compared, range(options.rounds), world.device):
                own = SETTINGS[sample.name]
                caps = bucket_caps(own.get("bucket_cap_mb"))
                cores = usable_cpus() / world.world_size
                overlap = own.get("overlap", True)
                asked = Setting(caps, world.world_size, latency_us, gbit, cores, overlap)
                cases.append(case(place, name, sample.name, sample.milliseconds, layers, asked))
        if world.rank == 0:
            Path(options.into).write_text(json.dumps(cases))


def fit(copies: float, **settings: Any) -> tuple[float, float]:
    """Returns the latency in us and the bandwidth in Gbit/s of a Reducer's all-reduce."""
    small, large = (average_ms(numel, **settings) for numel in (_SMALL, _LARGE))
    messages = 2 * (dist.get_world_size() - 1)
    moved = messages / dist.get_world_size() * (_LARGE - _SMALL) * 4
    copying = (_LARGE - _SMALL) * 4 / (copies * 1e6)
    latency_us = max(small - CALL_MS, 0.0) / messages * 1e3
    return latency_us, moved * 8 / max(large - small - copying, 1e-3) / 1e6


def average_ms(numel: int, **settings: Any) -> float:
    """Returns the median ms of averaging one gradient, on the slowest rank."""
    layer = torch.nn.Linear(numel, 1, bias=False)
    broadcast_parameters(layer)
    averaging = Reducer(layer, gradient_as_bucket_view=True, **settings)
    layer.weight.grad = torch.ones_like(layer.weight)
    times = timed(averaging.average_gradients)
    averaging.remove()
    slowest = torch.tensor(median(times), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def timed(call: Callable[[], object], warm: int = 3, rounds: int = 9) -> list[float]:
    times = []
    for _ in range(warm + rounds):
        dist.barrier()
        began = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - began))
    return times[warm:]


def case(
    place: str, model: str, what: str, times: list[float], layers: Layers, asked: Setting
) -> dict[str, Any]:
    step = predict(layers, asked)
    row = {"place": place, "model": model, "setting": what, "measured": times}
    wire = {"latency_us": asked.latency_us, "gbit": asked.gbit, "cores": asked.cores}
    return row | {"predicted": step.total, "exposed": step.exposed} | wire


def table(cases: list[dict[str, Any]]) -> str:
    rows, close = [], 0
    for each in cases:
        measured = median(each["measured"])
        ratio = each["predicted"] / measured
        close += 1 / GOAL <= ratio <= GOAL
        wire = f"{each['latency_us']:.0f} us, {each['gbit']:.2f} Gbit/s"
        label = f"{each['place']}, {each['model']}, {each['setting']}"
        rows.append([label, wire, f"{measured:.1f}", f"{each['predicted']:.1f}", f"{ratio:.2f}"])
    headers = ["", "all-reduce", "measured ms", "predicted", "ratio"]
    last = f"{close} of {len(cases)} predictions are within {GOAL:g} times the measured step"
    return f"{text_table(headers, rows)}\n{last}"


if __name__ == "__main__":
    run_to_exit(main)
