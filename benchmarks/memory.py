"""python -m benchmarks.memory: measures the memory of training, per rank and per node.

Examples:
    python -m benchmarks.memory                   gloo and mpi, MLP and ResNet-18, two processes
    python -m benchmarks.memory --model resnet50 --backend mpi --nproc 4
    python -m benchmarks.memory --model mlp --optimizer adamw    compares ZeroRedundancyOptimizer
    python -m benchmarks.memory --quick           the MLP on gloo, three contenders

Every contender has its own processes, since it would reuse memory that another one has freed. They
take six steps while a thread reads /proc/self/smaps_rollup every 5 ms:

    rank    Private_Dirty: memory of this process alone, without files that it only reads
    node    the sum over ranks of Pss_Anon and Pss_Shmem, which counts shared memory once

Both are increases since before the model was made, as Python, torch and MPI are the same for
all. The peak is over the whole run, whose first steps rebuild the buckets; "steady" is over the
last three steps. "x" counts multiples of the parameters; with SGD, parameters, gradients and
momentum take at least 3. With nccl, the numbers are torch's count of GPU memory.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from benchmarks.harness.launch import MODELS, add_common_options
from benchmarks.harness.report import make_parser, write
from ddp_from_scratch import UsageError, check_sync, process_group
from ddp_from_scratch.bench.contenders import (
    CONTENDERS,
    NO_COMMUNICATION,
    OPTIMIZERS,
    TORCH,
    contenders,
)
from ddp_from_scratch.bench.results import text_table
from ddp_from_scratch.bench.timing import check_distance, default_ranks, start
from ddp_from_scratch.bench.workloads import WORKLOADS
from ddp_from_scratch.launch import environment
from ddp_from_scratch.launch.rank_process import run_to_exit

# Ratios are to the best of these that this torch has.
REFERENCES = tuple(
    f"{TORCH}, {what}" for what in ("default", "views", "batched copies", "tapering buckets")
)
QUICK = (NO_COMMUNICATION, REFERENCES[1], "Reducer, views")
# The first steps rebuild the buckets, so they count only for the peak.
STEPS, STEADY = 6, 3
# Much shorter than a step, to see peaks within backward.
_INTERVAL_S = 0.005

ROLLUP = Path("/proc/self/smaps_rollup")

Memory = tuple[int, int]  # bytes of this process alone, and with its part of shared memory


def main() -> int:
    options = parse(sys.argv[1:])
    if not ROLLUP.exists():
        raise UsageError(f"benchmarks.memory needs Linux's {ROLLUP}")
    if environment.launcher() != "none":
        measure(options)
        return 0
    for backend in options.backend:
        for model in options.model:
            if code := compare(options, backend, model):
                return code
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("benchmarks.memory", __doc__)
    add_common_options(parser, nproc=default_ranks())
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd", help="default: sgd")
    every = [s.name for s in CONTENDERS]
    parser.add_argument(
        "--contender",
        nargs="+",
        choices=every,
        metavar="NAME",
        help="contenders (default: all but rungs, which take no less than the others)",
    )
    sweep = parser.add_mutually_exclusive_group()
    sweep.add_argument("--quick", action="store_true", help="mlp on gloo, three contenders")
    sweep.add_argument("--full", action="store_true", help="every model, every contender")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)  # where a rank 0 puts its part
    options = parser.parse_args(arguments)
    if options.nproc < 1:
        raise UsageError(f"--nproc must be 1 or more, got {options.nproc}")
    if options.quick:
        options.model = ["mlp"] if options.model == list(MODELS) else options.model
        options.backend = options.backend[:1]
    if options.full and options.model == list(MODELS):
        options.model = [name for name in WORKLOADS if name not in ("mlp64", "gpt2")]
    names = [s.name for s in CONTENDERS if options.optimizer in s.optimizers]
    if options.contender is None:
        rungs = [] if options.full else [s.name for s in CONTENDERS if s.rung]
        options.contender = [n for n in (QUICK if options.quick else names) if n not in rungs]
    return options


def compare(options: argparse.Namespace, backend: str, model: str) -> int:
    """Starts ranks for each contender in turn; returns the exit code of the first that failed."""
    optimizer = options.optimizer
    chosen = [
        s.name
        for s in CONTENDERS
        if s.name in options.contender and backend in s.backends and optimizer in s.optimizers
    ]
    title = f"{WORKLOADS[model].name}; {backend}, {options.nproc} ranks; {_named(optimizer)}"
    samples = []
    torch.manual_seed(0)
    initial = [parameter.detach() for parameter in WORKLOADS[model].model().parameters()]
    trained: tuple[str, list[torch.Tensor]] | None = None
    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        for name in tqdm(chosen, title, disable=None, leave=False):
            into = Path(folder) / "part"
            code = start(
                "benchmarks.memory",
                backend,
                options.nproc,
                *("--model", model, "--optimizer", optimizer, "--contender", name, "--into", into),
            )
            if code:
                return code
            shown = name.replace("SGD", _named(optimizer))
            samples.append({"name": shown, **json.loads(into.read_text())})
            if name != NO_COMMUNICATION:
                parameters = torch.load(into.with_suffix(".pt"), map_location="cpu")
                if trained is None:
                    trained = (name, parameters)
                check_distance((name, trained[0]), parameters, trained[1], initial)
    size = sum(parameter.nbytes for parameter in initial)
    print(f"\n{title}: MB more than before the model was made\n{table(samples, size)}", flush=True)
    settings = {"benchmark": "memory", "model": model, "backend": backend, "nproc": options.nproc}
    settings["optimizer"] = optimizer
    file = f"memory-{model}-{backend}-{options.nproc}" + f"-{optimizer}" * (optimizer != "sgd")
    write(file, title, samples, options.results, **settings)
    return 0


def _named(optimizer: str) -> str:
    return OPTIMIZERS[optimizer].name


def measure(options: argparse.Namespace) -> None:
    """Trains with one contender on this rank. Rank 0 writes the memory of all ranks."""
    (backend,), (model,), (name,) = options.backend, options.model, options.contender
    torch.set_num_threads(1)
    with process_group(backend) as world:
        dist.barrier()  # the backend allocates at its first use, which must not be in a phase
        torch.manual_seed(world.rank)
        # Includes Python, torch, MPI and the group, which are the same for all contenders.
        before = read(world.device)
        watch = Watch(world.device)
        spec = [s for s in CONTENDERS if s.name == name]
        # Without the start, a copy of the parameters that training does not need.
        workload, optimizers = WORKLOADS[model], OPTIMIZERS[options.optimizer]
        (contender,) = contenders(
            workload, world.device, spec, optimizers=optimizers, keep_start=False
        )
        phases = [watch.peak()]
        for _ in range(STEPS):
            contender.step()
            dist.barrier()  # so that all ranks are in the same phase
            phases.append(watch.peak())
        if name != NO_COMMUNICATION:
            check_sync(contender.model)
        everyone: list[Any] = [None] * world.world_size
        dist.all_gather_object(everyone, [before, *phases])
        if world.rank == 0:
            by_rank = torch.tensor(everyone)
            kinds = {"private": by_rank[:, :, 0].tolist(), "node": by_rank[:, :, 1].tolist()}
            torch.save(list(contender.model.parameters()), options.into.with_suffix(".pt"))
            options.into.write_text(json.dumps(kinds))


class Watch:
    """Watches this process's memory from a separate thread; on a GPU, torch counts it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._highest = 0, 0
        self._lock = threading.Lock()  # guards the highest, which both threads replace
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            threading.Thread(target=self._look, daemon=True).start()

    def peak(self) -> Memory:
        """Returns the maximum since the last call or the beginning, including now."""
        if self._device.type == "cuda":
            highest = torch.cuda.max_memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            return highest, highest
        self._note()
        with self._lock:
            highest_of_both, self._highest = self._highest, (0, 0)
        return highest_of_both

    def _note(self) -> None:
        private, node = read(self._device)
        with self._lock:
            self._highest = max(private, self._highest[0]), max(node, self._highest[1])

    def _look(self) -> None:
        while True:
            time.sleep(_INTERVAL_S)
            self._note()


def read(device: torch.device) -> Memory:
    if device.type == "cuda":
        allocated = torch.cuda.memory_allocated(device)
        return allocated, allocated
    lines = (line.split() for line in ROLLUP.read_text().splitlines()[1:])  # "Pss_Anon:    123 kB"
    sizes = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
    # Pss divides shared memory by the number of its users, so a sum over ranks counts it once.
    return sizes["Private_Dirty"], sizes["Pss_Anon"] + sizes["Pss_Shmem"]


def growth(sample: dict[str, Any], kind: str, steady: bool = False) -> int:
    """Returns the increase of memory in bytes, of the largest rank or of the node.

    A sample has, for each rank, its memory before and its peak in each phase. `kind` is "private"
    for the largest rank's own memory, "node" for the sum. `steady` counts only the last steps.
    """
    by_rank = sample[kind]
    phases = [[rank[i] - rank[0] for rank in by_rank] for i in range(1, len(by_rank[0]))]
    if steady:
        phases = phases[-STEADY:]
    peaks: list[int] = [sum(phase) if kind == "node" else max(phase) for phase in phases]
    return max(peaks)


def table(samples: list[dict[str, Any]], parameter_bytes: int) -> str:
    """Tables peaks in MB, in multiples of the parameters, and as ratios to torch's best setting."""
    references = [s for s in samples if s["name"] in REFERENCES]
    reference = min((growth(s, "node") for s in references), default=None)
    rows = []
    for sample in samples:
        row = [sample["name"]]
        for kind in ("private", "node"):
            peak, steady = growth(sample, kind), growth(sample, kind, steady=True)
            row += [f"{peak / 1e6:,.0f}", f"{steady / 1e6:,.0f}", f"{peak / parameter_bytes:.1f}"]
        ratio = "-" if not reference else f"{growth(sample, 'node') / reference:.2f}"
        rows.append([*row, ratio])
    headers = ["", "rank", "steady", "x", "node", "steady", "x", "/ torch DDP"]
    return text_table(headers, rows)


if __name__ == "__main__":
    run_to_exit(main)
