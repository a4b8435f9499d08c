"""python -m benchmarks.scaling: times a step by ranks, parameters, layers and batch.

Examples:
    python -m benchmarks.scaling                     gloo and mpi; 1, 2, 4 and 8 ranks
    python -m benchmarks.scaling --quick             gloo; 1, 2 and 4 ranks, fewer rounds
    python -m benchmarks.scaling --backend mpi --nproc 1 2 3 4

For each number of ranks it times a training step of models of equal layers: without communication,
with torch's DDP (gradients as views) and with a Reducer, which take turns. It prints

    weak scaling      every rank has the same batch: the ideal is the same time for any number
    strong scaling    the ranks share one batch: the ideal is 1/n of the time
    growth            with parameters (wider layers), with layers (as many parameters, in more and
                      smaller layers), with the batch

More ranks than cores take turns, so n ranks on c cores take at least n/c times as long as one rank.
`ideal` includes that, so it shows the loss to communication and not to missing cores. All ranks are
on this machine; two_hosts.py has a wire.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from benchmarks.harness.launch import backend_of_job
from benchmarks.harness.report import Bar, draw_bars, make_parser, write
from ddp_from_scratch import UsageError, process_group
from ddp_from_scratch.bench.contenders import (
    NO_COMMUNICATION,
    ContenderSpec,
    alone,
    contenders,
    reducer,
    torch_ddp,
)
from ddp_from_scratch.bench.results import Samples, kind, text_table
from ddp_from_scratch.bench.timing import check_equal, interleave, start, warm_up
from ddp_from_scratch.bench.workloads import Workload
from ddp_from_scratch.launch import environment
from ddp_from_scratch.launch.rank_process import run_to_exit

TORCH, REDUCER = "torch DDP, views", "Reducer"
VIEWS = {"gradient_as_bucket_view": True}
SPECS = [
    ContenderSpec(NO_COMMUNICATION, alone),
    ContenderSpec(TORCH, torch_ddp(**VIEWS)),
    ContenderSpec(REDUCER, reducer(**VIEWS)),
]


@dataclass(frozen=True)
class Shape:
    """A model of equal layers, Linear(width, width), and each rank's batch size."""

    layers: int
    width: int
    batch: int

    @property
    def parameters(self) -> int:
        return self.layers * self.width * (self.width + 1)

    def model(self) -> nn.Module:
        layers: list[nn.Module] = []
        for _ in range(self.layers):
            layers += [nn.Linear(self.width, self.width), nn.ReLU()]
        return nn.Sequential(*layers)


BASE = Shape(16, 512, 16)  # 4.2 M parameters, 17 MB
# The default numbers of ranks, 1, 2, 4 and 8, divide it.
WHOLE_BATCH = 64  # of strong scaling
GROWING = {
    "parameters": [Shape(16, width, 16) for width in (256, 512, 768)],
    # As many parameters each, 4.2 M, in more and smaller layers.
    "layers": [Shape(4, 1024, 16), BASE, Shape(64, 256, 16), Shape(256, 128, 16)],
    "batch": [Shape(16, 512, batch) for batch in (4, 16, 64)],
}


@dataclass(frozen=True)
class Run:
    """The steps of every shape with one number of ranks."""

    ranks: int
    cores: int
    by_shape: dict[Shape, dict[str, Samples]]  # by contender

    def median(self, shape: Shape, name: str) -> float:
        return self.by_shape[shape][name].quartiles[1]


def main() -> int:
    options = parse(sys.argv[1:])
    if environment.launcher() != "none":
        measure(options)
        return 0
    for backend in options.backend:
        for nproc in options.nproc:
            if code := start("benchmarks.scaling", backend, nproc, *sys.argv[1:]):
                return code
        files = [f"scaling-{backend}-{nproc}.json" for nproc in options.nproc]
        report(backend, [read(options.results / file) for file in files], options.results)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("benchmarks.scaling", __doc__)
    parser.add_argument(
        "--backend", nargs="+", choices=("gloo", "mpi"), help="default: gloo and mpi"
    )
    parser.add_argument("--nproc", type=int, nargs="+", help="ranks (default: 1 2 4 8)")
    parser.add_argument("--rounds", type=int, help="timed steps of each contender (default: 8)")
    parser.add_argument("--quick", action="store_true", help="gloo, up to 4 ranks, 4 rounds")
    options = parser.parse_args(arguments)
    options.backend = options.backend or (["gloo"] if options.quick else ["gloo", "mpi"])
    options.nproc = sorted(set(options.nproc or ([1, 2, 4] if options.quick else [1, 2, 4, 8])))
    options.rounds = options.rounds or (4 if options.quick else 8)
    if min(options.nproc) < 1 or options.rounds < 2:
        raise UsageError("--nproc must be 1 or more and --rounds 2 or more")
    return options


def measure(options: argparse.Namespace) -> None:
    backend = backend_of_job(options)
    # More threads would take the other ranks' cores.
    torch.set_num_threads(1)
    with process_group(backend) as world:
        title = f"scaling; {backend}, {world.world_size} ranks"
        shapes = [*chain(*GROWING.values()), shape_at("strong", world.world_size)]
        cases = []
        for shape in tqdm(dict.fromkeys(shapes), title, disable=world.rank != 0 or None):
            samples = time_steps(shape, options.rounds, world.device)
            cases.append({"shape": asdict(shape), "steps": [asdict(s) for s in samples]})
        if world.rank == 0:
            write(
                f"scaling-{backend}-{world.world_size}",
                title,
                cases,
                options.results,
                benchmark="scaling",
                backend=backend,
                nproc=world.world_size,
                cores=len(os.sched_getaffinity(0)),
            )


def time_steps(shape: Shape, rounds: int, device: torch.device) -> list[Samples]:
    torch.manual_seed(dist.get_rank())
    batch = torch.randn(shape.batch, shape.width), torch.randint(shape.width, (shape.batch,))
    compared = contenders(Workload("", shape.model, lambda: batch), device, SPECS)
    warm_up(compared)
    check_equal(compared)
    return interleave(compared, range(rounds), device)


def read(path: Path) -> Run:
    content = json.loads(path.read_text())
    by_shape = {
        Shape(**case["shape"]): {step["name"]: Samples(**step) for step in case["steps"]}
        for case in content["samples"]
    }
    return Run(content["settings"]["nproc"], content["settings"]["cores"], by_shape)


# Tables ---------------------------------------------------------------------------------------


def report(backend: str, runs: list[Run], folder: Path) -> None:
    print(f"\n{backend}: median ms of a step, {runs[0].cores} cores")
    print(scaling_table(runs), flush=True)
    print(f"\n{backend}: growth, by number of ranks: ms (alone, torch DDP, Reducer)")
    print(growth_table(runs), flush=True)
    draw_bars(
        f"scaling-{backend}",
        f"a training step by number of ranks: {BASE.layers} layers, {BASE.parameters / 1e6:.1f} M "
        f"parameters; {backend}, {runs[0].cores} cores",
        "ms per step, fused SGD; a bar ends at the median, its line spans the quartiles,\n"
        "the number is the ratio to torch DDP with as many ranks",
        {
            f"weak scaling: every rank has a batch of {BASE.batch}": bars(runs, "weak"),
            f"strong scaling: all ranks share a batch of {WHOLE_BATCH}": bars(runs, "strong"),
        },
        folder,
        "ideal: no time lost but to missing cores",
    )


def bars(runs: list[Run], scaling: str) -> list[Bar]:
    """Returns a bar per number of ranks and way to train, with a mark at the ideal."""
    found = []
    for run in runs:
        steps = run.by_shape[shape_at(scaling, run.ranks)]
        best = ideal(runs[0], run, scaling)
        for s in steps.values():
            first = s.name == NO_COMMUNICATION
            name = f"{run.ranks} rank{'s' * (run.ranks > 1)}: {s.name}" if first else s.name
            ratio = f"{s.ratio_to(steps[TORCH])[0]:.2f}"
            found.append(Bar(name, s.quartiles, kind(s.name), ratio, best, apart=first))
    return found


def shape_at(scaling: str, ranks: int) -> Shape:
    """Returns the model and a rank's batch in "weak" or "strong" scaling."""
    batch = BASE.batch if scaling == "weak" else max(1, WHOLE_BATCH // ranks)
    return Shape(BASE.layers, BASE.width, batch)


def ideal(fewest: Run, run: Run, scaling: str) -> float:
    """Scales the step of the fewest ranks without communication to the ranks of `run`."""
    alone = fewest.median(shape_at(scaling, fewest.ranks), NO_COMMUNICATION)
    # Ranks that share cores take turns, which is no loss to communication.
    turns, turns_then = max(1, run.ranks / run.cores), max(1, fewest.ranks / fewest.cores)
    carried = alone * turns / turns_then
    return carried * fewest.ranks / run.ranks if scaling == "strong" else carried


def scaling_table(runs: list[Run]) -> str:
    rows = []
    for scaling in ("weak", "strong"):
        for run in runs:
            shape = shape_at(scaling, run.ranks)
            times = [run.median(shape, spec.name) for spec in SPECS]
            numbers = [ideal(runs[0], run, scaling), *times]
            row = [scaling, str(run.ranks), str(shape.batch), *(f"{ms:.1f}" for ms in numbers)]
            rows.append([*row, f"{times[2] / times[0]:.2f}", f"{times[2] / times[1]:.2f}"])
    headers = ["", "ranks", "batch", "ideal", *(spec.name for spec in SPECS)]
    return text_table([*headers, "/ no comm.", "/ torch DDP"], rows)


def growth_table(runs: list[Run]) -> str:
    rows = []
    for what, shapes in GROWING.items():
        for shape in shapes:
            millions = f"{shape.parameters / 1e6:.1f} M"
            row = [what, millions if what == "parameters" else str(getattr(shape, what))]
            for run in runs:
                row.append(" ".join(f"{run.median(shape, spec.name):.0f}" for spec in SPECS))
            rows.append(row)
    return text_table(["with", "", *(f"{run.ranks} ranks" for run in runs)], rows)


if __name__ == "__main__":
    run_to_exit(main)
