"""python -m benchmarks.two_hosts: times a step across a slow wire; compares the wire's limit.

Examples:
    sudo python -m benchmarks.two_hosts              1 Gbit/s, gloo and mpi, 2 and 4 ranks
    sudo python -m benchmarks.two_hosts --quick      gloo, 2 ranks, few rounds
    sudo python -m benchmarks.two_hosts --full       0.1, 1 and 10 Gbit/s
    sudo python -m benchmarks.two_hosts --gbit 0.5 --backend mpi --ranks 4 --model mlp

Needs Linux, root, `ip` and `tc`, and for mpi Open MPI. Two network namespaces on this machine are
the hosts, a veth pair with a token bucket at both ends is the wire (harness/network.py); they
are removed at the end, after Ctrl-C and after a failure. The contenders take turns in one process
group. How to read the table:

    bound      the time until the first bucket is ready, plus the wire's limit: the bytes that must
               cross over its speed; but no less than a step takes without communication, which is
               more where the wire is fast. Overlapping cannot do better. Two hosts that sum N bytes
               send N each: half of the summands, and the sums of the other half. With compression N
               is the compressed size; torch's PowerSGD does not count it.
    MB sent    by the host that sent more, in a step, by its interface's counter, headers and all;
               x is that as a multiple of what must cross. A flat ring of 2 ranks on each of 2 hosts
               (gloo) sends 1.5 N over the wire, sums taken in each host first (mpi) send N.

TCP, IP and Ethernet headers take 4 % of the wire's speed. The program rejects impossible results:
fewer bytes on the interface than must cross, or more than its speed lets through.
Ranks that compute on this machine's few cores compute at the same time as they communicate: on slow
wires (1 Gbit/s and less) that costs little, at 10 Gbit/s the processor is the limit. torch's
PowerSGD gets one bucket for all gradients: with several on gloo, each rank's callbacks start their
collectives in an order of their own, and it fails.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import ddp_from_scratch as ddp
from benchmarks.harness import network
from benchmarks.harness.launch import backend_of_job
from benchmarks.harness.network import Meter, Result, check_crossed, gather_sent, limit_ms
from benchmarks.harness.report import Bar, draw_bars, make_parser, write
from benchmarks.harness.wire_contenders import (
    BF16,
    POWER_SGD,
    TORCH,
    TORCH_POWER_SGD,
    check_alike,
    make_contenders,
    until_first_bucket,
)
from ddp_from_scratch import UsageError, process_group
from ddp_from_scratch.bench.contenders import NO_COMMUNICATION, Contender
from ddp_from_scratch.bench.results import Samples, kind, text_table
from ddp_from_scratch.bench.timing import WARM_UP, interleave, warm_up
from ddp_from_scratch.bench.workloads import WORKLOADS
from ddp_from_scratch.launch import environment
from ddp_from_scratch.launch.rank_process import run_to_exit

_ROUNDS = {0.1: 5, 1.0: 15, 100.0: 30}  # by the wire's speed, about a minute each


def main() -> int:
    options = parse(sys.argv[1:])
    if environment.launcher() != "none":
        measure(options)
        return 0
    network.check_available(options.backend)
    found: dict[tuple[str, int], dict[float, list[dict[str, Any]]]] = {}
    with network.stoppable():
        for gbit, backend, ranks in product(options.gbit, options.backend, options.ranks):
            # The last of several equal options counts.
            rank = [sys.executable, "-m", "benchmarks.two_hosts", *sys.argv[1:]]
            rank += ["--backend", backend, "--gbit", str(gbit)]
            rounds = options.rounds or next(n for speed, n in _ROUNDS.items() if gbit <= speed)
            rank += ["--rounds", str(rounds)]
            with network.two_hosts(gbit) as hosts:
                code = network.run_ranks(hosts, ranks // 2, backend, rank)
            if code:
                return code
            file = f"{file_name(options.model, backend, ranks, gbit)}.json"
            part = json.loads((options.results / file).read_text())
            found.setdefault((backend, ranks), {})[gbit] = part["samples"]
    for (backend, ranks), by_speed in found.items():
        draw(options.model, backend, ranks, by_speed, options.results)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("benchmarks.two_hosts", __doc__)
    text = "the wire's speed in Gbit/s, each way (default: 1)"
    parser.add_argument("--gbit", type=float, nargs="+", help=text)
    text = "default: gloo and mpi"
    parser.add_argument("--backend", nargs="+", choices=("gloo", "mpi"), help=text)
    text = "ranks on both hosts together (default: 2 and 4)"
    parser.add_argument("--ranks", type=int, nargs="+", help=text)
    parser.add_argument("--model", choices=("resnet18", "mlp"), default="resnet18")
    text = "timed steps of each contender (default: 15 at 1 Gbit/s)"
    parser.add_argument("--rounds", type=int, help=text)
    text = "further caps, besides the defaults of 1 and 25 (default: 1)"
    parser.add_argument("--cap", type=float, nargs="+", default=[1.0], metavar="MB", help=text)
    sweep = parser.add_mutually_exclusive_group()
    sweep.add_argument("--quick", action="store_true", help="gloo, 2 ranks, 5 rounds, 1 Gbit/s")
    sweep.add_argument("--full", action="store_true", help="0.1, 1 and 10 Gbit/s")
    options = parser.parse_args(arguments)
    options.gbit = options.gbit or ([0.1, 1.0, 10.0] if options.full else [1.0])
    options.backend = options.backend or (["gloo"] if options.quick else ["gloo", "mpi"])
    options.ranks = options.ranks or ([2] if options.quick else [2, 4])
    if options.rounds is None and options.quick:
        options.rounds = 5
    if any(ranks < 2 or ranks % 2 for ranks in options.ranks):
        raise UsageError(f"--ranks must be even and 2 or more, got {options.ranks}")
    if not all(0.001 <= gbit <= 100 for gbit in options.gbit):
        raise UsageError(f"--gbit must be 0.001 to 100, got {options.gbit}")
    if options.rounds is not None and options.rounds < 2:
        raise UsageError(f"--rounds must be 2 or more, got {options.rounds}")
    return options


def file_name(model: str, backend: str, ranks: int, gbit: float) -> str:
    return f"two_hosts-{model}-{backend}-{ranks}-{gbit:g}gbit"


# A rank ---------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> None:
    backend, (gbit,) = backend_of_job(options), options.gbit
    # More threads would take the other ranks' cores.
    torch.set_num_threads(1)
    with process_group(backend) as world:
        workload = WORKLOADS[options.model]
        ready = until_first_bucket(workload)  # no byte can cross before
        torch.manual_seed(world.rank)
        # Counts bytes at the interface, since a backend may send more than it must.
        meter = Meter()
        powers = ddp.power_sgd.PowerSGDState(rank=4, start=WARM_UP - 1)
        compared = make_contenders(workload, world.device, backend, powers, options.cap)
        metered = [Contender(c.name, c.model, meter.before(c)) for c in compared]
        rounds = tqdm(
            range(options.rounds),
            desc=f"{gbit:g} Gbit/s, {backend}, {world.world_size} ranks",
            disable=world.rank != 0 or None,
            leave=False,
        )
        warm_up(metered)
        samples = interleave(metered, rounds, world.device)
        meter.read()  # counts the last step, since a step is counted before the next one
        check_alike(compared)
        sent = gather_sent(meter, world.local_rank == 0)
        if world.rank == 0:
            nbytes = sum(p.numel() * p.element_size() for p in compared[0].model.parameters())
            results = results_of(samples, sent, bytes_to_cross(nbytes, powers), ready, gbit)
            # A result that bypassed the wire is not printed.
            check_crossed(results, gbit)
            title = (
                f"{workload.name}; {backend}, {world.world_size} ranks on 2 hosts, {gbit:g} Gbit/s"
            )
            wire = limit_ms(nbytes, gbit)
            print(f"\n{title}, {options.rounds} steps each")
            print(
                f"first bucket ready after {ready:.0f} ms; the wire needs {wire:.0f} ms for the "
                f"{nbytes / 1e6:.1f} MB of gradients"
            )
            print(table(results, samples), flush=True)
            write(
                file_name(options.model, backend, world.world_size, gbit),
                title,
                [asdict(r) for r in results],
                options.results,
                benchmark="two_hosts",
                model=options.model,
                backend=backend,
                nproc=world.world_size,
                gbit=gbit,
            )


def bytes_to_cross(nbytes: int, powers: ddp.power_sgd.PowerSGDState) -> Callable[[str], int | None]:
    """Maps a contender's name to the bytes that each host must send per step; None if unknown."""
    # `sent` counts elements of float32 matrices, in the steps with compression.
    per_step = 4 * powers.sent // max(1, powers.iteration - powers.start)
    by_name: dict[str, int | None] = {
        NO_COMMUNICATION: 0,
        BF16: nbytes // 2,
        POWER_SGD: per_step,
        TORCH_POWER_SGD: None,
    }
    # By prefix, since some names end with a bucket size.
    return lambda name: next((n for known, n in by_name.items() if name.startswith(known)), nbytes)


def results_of(
    samples: list[Samples],
    sent: dict[str, list[list[int]]],
    must_cross: Callable[[str], int | None],
    ready: float,
    gbit: float,
) -> list[Result]:
    # On a fast wire, computing is the limit. From the same rounds, with an equally busy machine.
    least = next(s.quartiles[1] for s in samples if s.name == NO_COMMUNICATION)
    results = []
    for s in samples:
        nbytes = must_cross(s.name)
        bound = None if nbytes is None else max(least, ready + limit_ms(nbytes, gbit))
        results.append(Result(s.name, s.milliseconds, nbytes, sent[s.name], bound))
    return results


# Tables ---------------------------------------------------------------------------------------


def table(results: list[Result], samples: list[Samples]) -> str:
    by_name = {s.name: s for s in samples}
    rows = []
    for r, s in zip(results, samples, strict=True):
        low, median, high = s.quartiles
        ratio, ratio_low, ratio_high = s.ratio_to(by_name[TORCH])
        multiple = f"{r.most_sent / r.must_cross:.2f}" if r.must_cross else ""
        rows.append(
            [
                s.name,
                f"{median:.0f}",
                f"{low:.0f} to {high:.0f}",
                f"{ratio:.2f}",
                f"{ratio_low:.2f} to {ratio_high:.2f}",
                "" if r.over_bound is None else f"{r.bound:.0f}",
                "" if r.over_bound is None else f"{r.over_bound:.2f}",
                f"{r.most_sent / 1e6:.2f}",
                multiple,
            ]
        )
    headers = ["", "ms", "quartiles", "/ torch DDP", "95 %", "bound", "/ bound", "MB sent", "x"]
    return text_table(headers, rows)


def draw(
    model: str,
    backend: str,
    ranks: int,
    by_speed: dict[float, list[dict[str, Any]]],
    folder: Path,
) -> None:
    missing = "; torch's PowerSGD needs gloo" if backend == "mpi" else ""
    draw_bars(
        f"two_hosts-{model}-{backend}-{ranks}",
        f"a training step across a wire: {WORKLOADS[model].name}; {backend}, {ranks} ranks on "
        f"2 hosts",
        "ms per step, fused SGD; shorter is faster. A bar ends at the median, its line spans the "
        f"quartiles,\nand its number is the ratio to torch DDP in full precision{missing}",
        {
            f"{gbit:g} Gbit/s": bars([Result(**sample) for sample in samples])
            for gbit, samples in sorted(by_speed.items())
        },
        folder,
        "least: computing and the wire",
    )


def bars(results: list[Result]) -> list[Bar]:
    """Returns a bar per contender, torch's first, with its ratio to torch's DDP."""
    samples = {r.name: Samples(r.name, r.milliseconds) for r in results}
    found = []
    for r in results:
        s = samples[r.name]
        label = f"{s.ratio_to(samples[TORCH])[0]:.2f}"
        found.append(
            Bar(s.name, s.quartiles, kind(s.name), label, r.bound if r.must_cross else None)
        )
    order = ("reference", "torch", "ours")
    return sorted(found, key=lambda bar: order.index(bar.kind))


if __name__ == "__main__":
    run_to_exit(main)
