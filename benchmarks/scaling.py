"""python -m benchmarks.scaling: times a step by ranks, parameters, layers and batch.

Examples:
    python -m benchmarks.scaling                     gloo and mpi; 1, 2, 4 and 8 ranks
    python -m benchmarks.scaling --quick             gloo; 1, 2 and 4 ranks, fewer rounds
    python -m benchmarks.scaling --backend mpi --nproc 1 2 3 4
    python -m benchmarks.cost_model --help           the model that is fitted to this

For each number of ranks it times an all-reduce by size, and a training step of models of equal
layers: without communication, with torch's DDP (gradients as views) and with a Reducer, which take
turns. It prints

    weak scaling      every rank has the same batch: the ideal is the same time for any number
    strong scaling    the ranks share one batch: the ideal is 1/n of the time
    growth            with parameters (wider layers), with layers (as many parameters, in more and
                      smaller layers), with the batch
    memory            by how much a rank's peak grows from before the model was made until it has
                      been trained; as a multiple of the parameters' bytes

More ranks than cores take turns, so n ranks on c cores take at least n/c times as long as one rank.
`ideal` includes that, so it shows the loss to communication and not to missing cores. All ranks are
on this machine; two_hosts.py has a wire.
"""

import argparse
import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from benchmarks import cost_model
from benchmarks.harness.costs import Shape, oversubscribed
from benchmarks.harness.launch import backend_of_job, make_parser
from benchmarks.harness.report import Bar, draw_bars, write
from ddp_from_scratch import UsageError, mpi, process_group
from ddp_from_scratch.bench.contenders import (
    NO_COMMUNICATION,
    Contender,
    ContenderSpec,
    alone,
    contenders,
    reducer,
    torch_ddp,
)
from ddp_from_scratch.bench.samples import Samples
from ddp_from_scratch.bench.timing import check_equal, interleave, warm_up
from ddp_from_scratch.bench.verdict import text_table
from ddp_from_scratch.bench.ways import start
from ddp_from_scratch.bench.workloads import Workload
from ddp_from_scratch.launch import environment
from ddp_from_scratch.launch.rank_process import run_to_exit

TORCH, REDUCER = "torch DDP, views", "Reducer"
KINDS = {"alone": NO_COMMUNICATION, "torch": TORCH, "averaged": REDUCER}
VIEWS = {"gradient_as_bucket_view": True}
WAYS = {"alone": alone, "torch": torch_ddp(**VIEWS), "averaged": reducer(**VIEWS)}
COLOUR_OF = {"alone": "reference", "torch": "torch", "averaged": "ours"}

SIZES = [4**k for k in range(5, 13)]  # bytes of an all-reduce, 1 kB to 16 MB
BASE = Shape(16, 512, 16)  # 4.2 M parameters, 17 MB
# The default numbers of ranks, 1, 2, 4 and 8, divide it.
WHOLE_BATCH = 64  # of strong scaling
PARAMETERS = [Shape(16, width, 16) for width in (256, 512, 768)]
# As many parameters each, 4.2 M, in more and smaller layers.
LAYERS = [Shape(4, 1024, 16), BASE, Shape(64, 256, 16), Shape(256, 128, 16)]
BATCHES = [Shape(16, 512, batch) for batch in (4, 16, 64)]


def main() -> int:
    options = parse(sys.argv[1:])
    if environment.launcher() != "none":
        measure(options)
        return 0
    measured = {}
    for backend in options.backend:
        for nproc in options.nproc:
            if code := start("benchmarks.scaling", backend, nproc, *sys.argv[1:]):
                return code
        paths = [options.results / f"{file_name(backend, nproc)}.json" for nproc in options.nproc]
        runs = [json.loads(path.read_text())["samples"] for path in paths]
        report(backend, runs, options.results)
        measured[backend] = [cost_model.measured(run) for run in runs]
    if 2 in options.nproc:
        cost_model.report(measured, cost_model.parse(["--results", str(options.results)]))
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("benchmarks.scaling", __doc__)
    parser.add_argument(
        "--backend", nargs="+", choices=("gloo", "mpi"), help="(default: gloo and mpi)"
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


def file_name(backend: str, ranks: int) -> str:
    """Returns the name of a run's file, which cost_model.py also reads."""
    return f"scaling-{backend}-{ranks}"


def shapes(ranks: int) -> list[Shape]:
    return list(dict.fromkeys([*PARAMETERS, *LAYERS, *BATCHES, shape_at("strong", ranks)]))


# A rank ---------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> None:
    backend = backend_of_job(options)
    # More threads would take the other ranks' cores.
    torch.set_num_threads(1)
    with process_group(backend) as world:
        trained = shapes(world.world_size)
        progress = tqdm(
            total=len(trained) + len(SIZES),
            desc=f"{backend}, {world.world_size} ranks",
            disable=world.rank != 0 or None,
            leave=False,
        )
        all_reduce, add = {}, {}
        for nbytes in SIZES:
            tensor = torch.zeros(nbytes // 4)
            other = torch.zeros(nbytes // 4)
            all_reduce[nbytes] = slowest(lambda t=tensor: dist.all_reduce(t), options.rounds)  # type: ignore[misc]
            add[nbytes] = slowest(lambda t=tensor, o=other: t.add_(o), options.rounds)  # type: ignore[misc]
            progress.update()
        for kind in KINDS:  # untimed: the first model of a process costs more memory
            grown(Shape(2, 64, 2), (torch.zeros(2, 64), torch.zeros(2, dtype=torch.long)), kind)
        cases = []
        for shape in trained:
            cases.append(measure_steps(shape, options.rounds, world.device))
            progress.update()
        progress.close()
        if world.rank == 0:
            samples = {
                "ranks": world.world_size,
                "cores": len(os.sched_getaffinity(0)),
                "all_reduce": all_reduce,
                "add": add,
                "cases": cases,
            }
            title = f"scaling; {backend}, {world.world_size} ranks"
            settings = {"benchmark": "scaling", "backend": backend, "nproc": world.world_size}
            name = file_name(backend, world.world_size)
            write(name, title, samples, options.results, **settings)


def slowest(call: Callable[[], Any], rounds: int) -> list[float]:
    """Returns the seconds of a call on the slowest rank, by round. Collective.

    Three calls before the first are not counted. Short calls are repeated in each round.
    """
    times = torch.zeros(rounds, dtype=torch.float64)
    # The last warm-up call sets the number of repetitions; one short call is below the clock.
    calls = 1
    for turn in range(-3, rounds):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        if turn >= 0:
            times[turn] = (time.perf_counter() - began) / calls
        elif turn == -1:  # as many for about 5 ms, alike on all ranks
            took = torch.tensor([time.perf_counter() - began])
            dist.all_reduce(took, dist.ReduceOp.MAX)
            calls = int(min(100, max(1, 0.005 / took.item())))
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.tolist()


def measure_steps(shape: Shape, rounds: int, device: torch.device) -> dict[str, Any]:
    """Returns the ms of a step in every way, and the bytes of memory that a Reducer takes."""
    torch.manual_seed(dist.get_rank())
    batch = torch.randn(shape.batch, shape.width), torch.randint(shape.width, (shape.batch,))
    memory = {kind: grown(shape, batch, kind) for kind in KINDS}
    compared = contenders_of(shape, batch, *KINDS, keep_start=True)
    warm_up(compared)
    check_equal(compared)
    samples = interleave(compared, range(rounds), device)
    by_name = {s.name: s.milliseconds for s in samples}
    return {
        "layers": shape.layers,
        "width": shape.width,
        "batch": shape.batch,
        "parameters": shape.parameters,
        "memory": memory,
        **{kind: by_name[name] for kind, name in KINDS.items()},
    }


def grown(shape: Shape, batch: tuple[torch.Tensor, torch.Tensor], kind: str) -> int:
    """Returns by how many bytes the largest rank's peak grows over three steps. Collective.

    This is resident memory; shared memory counts on each rank.
    """
    gc.collect()
    # Frees old buckets and the heap, since the model would reuse their memory unseen.
    if dist.get_backend() == "mpi":
        # Collective; frees windows that no rank uses any more.
        mpi.empty(1)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
    before = _resident("VmRSS")
    (one,) = contenders_of(shape, batch, kind, keep_start=False)
    for _ in range(3):
        one.step()
    most = torch.tensor([_resident("VmHWM") - before])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most.item())


def _resident(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if name in line)
    return 1024 * int(line.split()[1])


def contenders_of(
    shape: Shape, batch: tuple[torch.Tensor, torch.Tensor], *kinds: str, keep_start: bool
) -> list[Contender]:

    def model() -> nn.Module:
        layers: list[nn.Module] = []
        for _ in range(shape.layers):
            layers += [nn.Linear(shape.width, shape.width), nn.ReLU()]
        return nn.Sequential(*layers)

    device, workload = torch.device("cpu"), Workload("", model, lambda: batch)
    specs = [ContenderSpec(KINDS[kind], WAYS[kind]) for kind in kinds]
    return contenders(workload, device, specs, keep_start=keep_start)


# Tables ---------------------------------------------------------------------------------------


def report(backend: str, runs: Sequence[dict[str, Any]], folder: Path) -> None:
    by_ranks = {run["ranks"]: run for run in runs}
    print(f"\n{backend}: median ms of a step, {runs[0]['cores']} cores")
    print(scaling_table(by_ranks), flush=True)
    print(f"\n{backend}: growth, by number of ranks: ms (alone, torch DDP, Reducer); memory")
    print(growth_table(by_ranks), flush=True)
    draw_bars(
        f"scaling-{backend}",
        f"a training step by number of ranks: {BASE.layers} layers, {BASE.parameters / 1e6:.1f} M "
        f"parameters; {backend}, {runs[0]['cores']} cores",
        "ms per step, fused SGD; a bar ends at the median, its line spans the quartiles,\n"
        "the number is the ratio to torch DDP with as many ranks",
        {
            f"weak scaling: every rank has a batch of {BASE.batch}": bars(by_ranks, "weak"),
            f"strong scaling: all ranks share a batch of {WHOLE_BATCH}": bars(by_ranks, "strong"),
        },
        folder,
        "ideal: no time lost but to missing cores",
    )


def bars(by_ranks: dict[int, dict[str, Any]], scaling: str) -> list[Bar]:
    """Returns a bar per number of ranks and way to train, with a mark at the ideal."""
    found = []
    for ranks, run in by_ranks.items():
        case = case_of(run, shape_at(scaling, ranks))
        samples = {kind: Samples(name, case[kind]) for kind, name in KINDS.items()}
        best = ideal(by_ranks, scaling, ranks)
        for kind, s in samples.items():
            first = kind == "alone"
            name = f"{ranks} rank{'s' * (ranks > 1)}: {s.name}" if first else s.name
            ratio = f"{s.ratio_to(samples['torch'])[0]:.2f}"
            found.append(Bar(name, s.quartiles, COLOUR_OF[kind], ratio, best, apart=first))
    return found


def shape_at(scaling: str, ranks: int) -> Shape:
    """Returns the model and a rank's batch in "weak" or "strong" scaling."""
    batch = BASE.batch if scaling == "weak" else max(1, WHOLE_BATCH // ranks)
    return Shape(BASE.layers, BASE.width, batch)


def ideal(by_ranks: dict[int, dict[str, Any]], scaling: str, ranks: int) -> float:
    """Scales the step of the fewest ranks without communication to this number of ranks."""
    fewest, cores = min(by_ranks), by_ranks[ranks]["cores"]
    alone = median(by_ranks[fewest], shape_at(scaling, fewest), "alone")
    # Ranks that share cores take turns, which is no loss to communication.
    carried = alone * oversubscribed(ranks, cores) / oversubscribed(fewest, cores)
    return carried * fewest / ranks if scaling == "strong" else carried


def scaling_table(by_ranks: dict[int, dict[str, Any]]) -> str:
    """Tables weak and strong scaling, with the ideal by the fewest ranks' step alone."""
    rows = []
    for scaling in ("weak", "strong"):
        for ranks, run in by_ranks.items():
            shape = shape_at(scaling, ranks)
            times = [median(run, shape, kind) for kind in KINDS]
            rows.append(
                [
                    scaling,
                    str(ranks),
                    str(shape.batch),
                    f"{ideal(by_ranks, scaling, ranks):.1f}",
                    *(f"{t:.1f}" for t in times),
                    f"{times[2] / times[0]:.2f}",
                    f"{times[2] / times[1]:.2f}",
                ]
            )
    headers = ["", "ranks", "batch", "ideal", *KINDS.values(), "/ no comm.", "/ torch DDP"]
    return text_table(headers, rows)


def growth_table(by_ranks: dict[int, dict[str, Any]]) -> str:
    growing = {"parameters": PARAMETERS, "layers": LAYERS, "batch": BATCHES}
    rows = []
    for what, models in growing.items():
        for shape in models:
            number = {
                "parameters": f"{shape.parameters / 1e6:.1f} M",
                "layers": str(shape.layers),
                "batch": str(shape.batch),
            }[what]
            row = [what, number]
            for run in by_ranks.values():
                row.append(" ".join(f"{median(run, shape, kind):.0f}" for kind in KINDS))
            for kind in KINDS:
                multiples = [
                    case_of(run, shape)["memory"][kind] / (4 * shape.parameters)
                    for run in by_ranks.values()
                ]
                row.append(" ".join(f"{m:.1f}" for m in multiples))
            rows.append(row)
    headers = ["with", "", *(f"{n} ranks" for n in by_ranks)]
    headers += [f"{name}, x parameters" for name in KINDS.values()]
    return text_table(headers, rows)


def case_of(run: dict[str, Any], shape: Shape) -> dict[str, Any]:
    wanted = (shape.layers, shape.width, shape.batch)
    return next(
        case for case in run["cases"] if (case["layers"], case["width"], case["batch"]) == wanted
    )


def median(run: dict[str, Any], shape: Shape, kind: str) -> float:
    return float(torch.tensor(case_of(run, shape)[kind], dtype=torch.float64).median())


if __name__ == "__main__":
    run_to_exit(main)
