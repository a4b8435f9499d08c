"""python -m benchmarks.overlap: measures the communication hidden behind backward, by bucket size.

Examples:
    python -m benchmarks.overlap                  gloo and mpi, MLP and ResNet-18, two processes
    python -m benchmarks.overlap --cap 1 4 16 64 --model resnet50
    python -m benchmarks.overlap --quick          one model, two caps

For each cap, three contenders share rounds: a Reducer that launches its buckets during backward,
one that launches them at its end, and torch's DDP. All use gradients as bucket views and send no
buffers, so they differ in nothing else. With `alone`, a step without communication:

    communication  =  at its end - alone               to be hidden
    exposed        =  during backward - alone          the step is longer by this
    hidden share   =  1 - exposed / communication      1: all of it; 0: none

Each is a median over rounds; the share has a 95 % bootstrap interval. The share is negative if
overlap costs more than it hides, since backward and communication compete for cores. torch's DDP
cannot launch at the end, so its communication is that of a Reducer with the same buckets, on gloo
one without shared memory. The best cap is the one with the shortest step.
"""

import argparse
import sys
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.harness.launch import add_common_options, parse_sweep, run_on_ranks
from benchmarks.harness.report import make_parser, write
from ddp_from_scratch import UsageError
from ddp_from_scratch.bench.contenders import (
    NO_COMMUNICATION,
    TORCH_BEST,
    ContenderSpec,
    alone,
    contenders,
    reducer,
    torch_ddp,
)
from ddp_from_scratch.bench.results import Interval, Samples, text_table
from ddp_from_scratch.bench.timing import check_equal, interleave, rounds_for, warm_up
from ddp_from_scratch.bench.workloads import WORKLOADS
from ddp_from_scratch.launch.rank_process import run_to_exit
from ddp_from_scratch.world.world import World

CAPS = (1.0, 4.0, 12.0, 25.0, 64.0)
DURING, AT_END, TORCH = "during backward", "at its end", "torch DDP"
BY_GLOO = "by gloo at its end"
VIEWS = {"gradient_as_bucket_view": True}


@dataclass(frozen=True)
class Overlap:
    """Results of one cap."""

    cap: float  # of every bucket, in MiB
    milliseconds: float  # the median step with overlap
    exposed: float  # its ms beyond a step without communication
    hidden: Interval  # the share of communication that is not exposed
    torch_milliseconds: float  # the same three for torch's DDP
    torch_exposed: float
    torch_hidden: Interval


def main() -> int:
    options = parse(sys.argv[1:])
    return run_on_ranks("benchmarks.overlap", options, measure)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("benchmarks.overlap", __doc__)
    add_common_options(parser)
    parser.add_argument(
        "--cap", type=float, nargs="+", metavar="MB", help="bucket caps (default: 1 4 12 25 64)"
    )
    options = parse_sweep(parser, arguments, quick="mlp, caps 4 and 25", full="nine caps")
    if options.cap is None:
        options.cap = [4.0, 25.0] if options.quick else list(CAPS)
        if options.full:
            options.cap = [0.25, 1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 50.0, 100.0]
    options.cap = sorted(set(options.cap))
    if options.nproc < 2:
        raise UsageError(f"--nproc must be 2 or more, got {options.nproc}")
    if min(options.cap) <= 0:
        raise UsageError(f"--cap must be more than 0, got {min(options.cap):g}")
    return options


def specs(caps: list[float], backend: str) -> list[ContenderSpec]:
    """Returns a contender without communication, and three or four for each cap."""
    # To know what is hidden, each cap needs a launch during backward and one at its end.
    found = [ContenderSpec(NO_COMMUNICATION, alone)]
    for cap in caps:
        found += [
            ContenderSpec(_name(DURING, cap), reducer(bucket_cap_mb=cap, **VIEWS)),
            ContenderSpec(_name(AT_END, cap), reducer(bucket_cap_mb=cap, overlap=False, **VIEWS)),
            ContenderSpec(_name(TORCH, cap), torch_ddp(bucket_cap_mb=cap, **TORCH_BEST)),
        ]
        if backend == "gloo":
            # torch's DDP does not use shared memory, so its communication differs.
            plain = reducer(bucket_cap_mb=cap, overlap=False, shared_memory=False, **VIEWS)
            found.append(ContenderSpec(_name(BY_GLOO, cap), plain))
    return found


def _name(way: str, cap: float) -> str:
    return f"{way}, {cap:g} MB"


def measure(options: argparse.Namespace, world: World, model: str, title: str) -> None:
    compared = contenders(WORKLOADS[model], world.device, specs(options.cap, world.backend))
    warm_up(compared)
    check_equal(compared)
    rounds = rounds_for(options.seconds, options.rounds, world.device, title)
    samples = interleave(compared, rounds, world.device)
    if world.rank == 0:
        report(options, world, model, title, samples)


def report(
    options: argparse.Namespace, world: World, model: str, title: str, samples: list[Samples]
) -> None:
    found = overlaps(samples, options.cap)
    count = len(samples[0].milliseconds)
    print(f"\n{title}, {count} steps each\n{table(found, samples[0])}", flush=True)
    write(
        f"overlap-{model}-{world.backend}-{world.world_size}",
        title,
        [asdict(s) for s in samples],
        options.results,
        benchmark="overlap",
        model=model,
        backend=world.backend,
        nproc=world.world_size,
        caps=options.cap,
    )


def overlaps(samples: list[Samples], caps: list[float]) -> list[Overlap]:
    """Returns the results of each cap; `samples` have the names of `specs`."""
    by_name = {s.name: np.array(s.milliseconds) for s in samples}
    bare = by_name[NO_COMMUNICATION]
    found = []
    for cap in caps:
        at_end = by_name[_name(AT_END, cap)]
        communication = at_end - bare
        of_torch = by_name.get(_name(BY_GLOO, cap), at_end) - bare
        ours, theirs = by_name[_name(DURING, cap)], by_name[_name(TORCH, cap)]
        found.append(
            Overlap(
                cap,
                float(np.median(ours)),
                float(np.median(ours - bare)),
                hidden_share(ours - bare, communication),
                float(np.median(theirs)),
                float(np.median(theirs - bare)),
                hidden_share(theirs - bare, of_torch),
            )
        )
    return found


def hidden_share(exposed: np.ndarray, communication: np.ndarray) -> Interval:
    """Returns 1 - exposed / communication, of medians over rounds, with its 95 % interval.

    NaN if there is no communication to hide.
    """
    if np.median(communication) <= 0:
        return (float("nan"),) * 3
    # Draws whole rounds, since exposed and communication of a round belong together.
    drawn = np.random.default_rng(0).integers(len(exposed), size=(2000, len(exposed)))
    whole = np.median(communication[drawn], axis=1)
    shares = 1 - np.median(exposed[drawn], axis=1) / np.where(whole > 0, whole, np.nan)
    low, high = np.nanpercentile(shares, [2.5, 97.5])
    return float(1 - np.median(exposed) / np.median(communication)), float(low), float(high)


def table(found: list[Overlap], bare: Samples) -> str:
    """Returns a row per cap, with the best of each column of times marked."""
    best = min(found, key=lambda o: o.milliseconds)
    torch_best = min(found, key=lambda o: o.torch_milliseconds)
    rows = [
        [
            f"{o.cap:g}",
            f"{o.milliseconds:.1f}{' *' if o is best else '  '}",
            f"{o.exposed:.1f}",
            _percent(o.hidden),
            f"{o.torch_milliseconds:.1f}{' *' if o is torch_best else '  '}",
            f"{o.torch_exposed:.1f}",
            _percent(o.torch_hidden),
        ]
        for o in found
    ]
    headers = ["bucket_cap_mb", "Reducer, ms  ", "exposed", "hidden"]
    headers += ["torch DDP, ms  ", "exposed", "hidden"]
    text = text_table(headers, rows)
    note = f"* the best cap; a step without communication takes {bare.quartiles[1]:.1f} ms"
    return f"{text}\n{note}"


def _percent(share: Interval) -> str:
    middle, low, high = (f"{100 * part:.0f}" for part in share)
    return f"{middle} % ({low} to {high})"


if __name__ == "__main__":
    run_to_exit(main)
