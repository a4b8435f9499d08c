"""python -m benchmarks.memory: measures the memory of training, per rank and per node.

Examples:
    python -m benchmarks.memory                   gloo and mpi, MLP and ResNet-18, two processes
    python -m benchmarks.memory --model resnet50 --backend mpi --nproc 4
    python -m benchmarks.memory --model mlp --optimizer adamw    beside ZeroRedundancyOptimizer, too
    python -m benchmarks.memory --quick           the MLP on gloo, three contenders

Every contender has processes of its own: it would use memory that another one has freed. They take
six steps while a thread reads /proc/self/smaps_rollup every 5 ms:

    rank    Private_Dirty: memory of this process alone, without files that it only reads
    node    the sum over ranks of Pss_Anon and Pss_Shmem: shared memory counts once

Both less what they were before the model was made: Python, torch and MPI are the same for all. The
peak is that of the whole run (buckets are laid out anew in the first steps), "steady" that of the
last three steps. With SGD parameters, gradients and momentum are 3 times the parameters at least,
which "x" counts. With nccl it is torch's count of GPU memory.
"""

import argparse
import json
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from benchmarks.harness import make_parser
from benchmarks.harness.launch import add_common_options
from benchmarks.harness.report import Bar, draw_bars
from ddp_from_scratch import UsageError, check_sync, process_group
from ddp_from_scratch.bench.contenders import (
    CONTENDERS,
    NO_COMMUNICATION,
    OPTIMIZERS,
    REFERENCES,
    contenders,
)
from ddp_from_scratch.bench.machine import on_terminal, write
from ddp_from_scratch.bench.timing import check_distance
from ddp_from_scratch.bench.verdict import kind as kind_of
from ddp_from_scratch.bench.verdict import text_table
from ddp_from_scratch.bench.ways import default_ranks, start
from ddp_from_scratch.bench.workloads import WORKLOADS
from ddp_from_scratch.launch import environment
from ddp_from_scratch.launch.rank_process import run_to_exit

MODELS = ("mlp", "resnet18")
QUICK = (NO_COMMUNICATION, REFERENCES[1], "Reducer, views")
# Buckets are laid out anew in the first steps, which belong to the peak alone.
STEPS, STEADY = 6, 3
# Short beside a step, so that peaks within backward are seen.
_INTERVAL_S = 0.005

ROLLUP = Path("/proc/self/smaps_rollup")


@dataclass(frozen=True)
class Memory:
    """Bytes of one process at one time, or more than at another.

    Attributes:
        private: of this process alone.
        node: with its part of what it shares with others.
    """

    private: int
    node: int


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
    add_common_options(parser, MODELS)
    parser.add_argument("--nproc", type=int, default=default_ranks(), help="default: 2")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd", help="default: sgd")
    every = [s.name for s in CONTENDERS]
    parser.add_argument(
        "--contender",
        nargs="+",
        choices=every,
        metavar="NAME",
        help="default: all but rungs, which take no less than the others",
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
    """Starts ranks for each contender in turn; prints, writes and draws their memory.

    Returns:
        The exit code of the first rank that failed, or 0.

    Raises:
        RuntimeError: two contenders have trained to different parameters.
    """
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
        for name in tqdm(chosen, title, disable=not on_terminal(), leave=False):
            into = Path(folder) / "part"
            # In processes of its own: a contender would use memory that the one before has freed.
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
    size = WORKLOADS[model].parameter_bytes
    print(f"\n{title}: MB more than before the model was made\n{table(samples, size)}", flush=True)
    settings = {"benchmark": "memory", "model": model, "backend": backend, "nproc": options.nproc}
    settings["optimizer"] = optimizer
    file = f"memory-{model}-{backend}-{options.nproc}" + f"-{optimizer}" * (optimizer != "sgd")
    write(file, title, samples, settings=settings, folder=options.results)
    panels = {
        "peak of a rank": [_bar(sample, "private") for sample in samples],
        "peak of the node": [_bar(sample, "node") for sample in samples],
    }
    draw_bars(file, title, "MB", panels, folder=options.results)
    return 0


def _named(optimizer: str) -> str:
    return OPTIMIZERS[optimizer].name


def _bar(sample: dict[str, Any], memory: str) -> Bar:
    value = growth(sample, memory) / 1e6
    return Bar(sample["name"], (value, value, value), kind_of(sample["name"]), f"{value:,.0f}")


def measure(options: argparse.Namespace) -> None:
    """A rank's part: trains with one contender; rank 0 writes the memory of all ranks."""
    (backend,), (model,), (name,) = options.backend, options.model, options.contender
    torch.set_num_threads(1)
    with process_group(backend) as world:
        dist.barrier()  # now, and not in a phase: the backend allocates at its first use
        torch.manual_seed(world.rank)
        # After the group is open: Python, torch and MPI are in it, and the same for all contenders.
        before = read(world.device)
        with Watch(world.device) as watch:
            spec = [s for s in CONTENDERS if s.name == name]
            # No start is kept: it would be a copy of the parameters that training does not need.
            workload, optimizer = WORKLOADS[model], options.optimizer
            (contender,) = contenders(
                workload, world.device, spec, optimizer=optimizer, keep_start=False
            )
            phases = [watch.peak()]
            for _ in range(STEPS):
                contender.step()
                dist.barrier()  # so that a phase is the same time on all ranks
                phases.append(watch.peak())
        if name != NO_COMMUNICATION:
            check_sync(contender.model)
        own = [[m.private, m.node] for m in (before, *phases)]
        everyone: list[Any] = [None] * world.world_size
        dist.all_gather_object(everyone, own)
        if world.rank == 0:
            by_rank = torch.tensor(everyone)
            kinds = {"private": by_rank[:, :, 0].tolist(), "node": by_rank[:, :, 1].tolist()}
            torch.save(list(contender.model.parameters()), options.into.with_suffix(".pt"))
            options.into.write_text(json.dumps(kinds))


class Watch:
    """Watches this process's memory from a thread of its own.

    Args:
        device: torch counts a GPU's memory by itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._highest = Memory(0, 0)
        self._lock = threading.Lock()  # guards the highest, which both threads replace
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "Watch":
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def peak(self) -> Memory:
        """The most since the last call, or since the beginning; now counts, too."""
        if self._device.type == "cuda":
            highest = torch.cuda.max_memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            return Memory(highest, highest)
        self._note()
        with self._lock:
            highest_of_both, self._highest = self._highest, Memory(0, 0)
        return highest_of_both

    def _note(self) -> None:
        now = read(self._device)
        with self._lock:
            self._highest = Memory(
                max(now.private, self._highest.private), max(now.node, self._highest.node)
            )

    def _look(self) -> None:
        while not self._stopped.wait(_INTERVAL_S):
            self._note()


def read(device: torch.device) -> Memory:
    """Memory of this process now."""
    if device.type == "cuda":
        allocated = torch.cuda.memory_allocated(device)
        return Memory(allocated, allocated)
    return parse_rollup(ROLLUP.read_text())


def parse_rollup(text: str) -> Memory:
    """Memory from the kernel's lines "Pss_Anon:    123 kB"."""
    lines = (line.split() for line in text.splitlines()[1:])
    sizes = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
    # Pss divides what is shared by the number of its users: summed over ranks it counts once.
    return Memory(sizes["Private_Dirty"], sizes["Pss_Anon"] + sizes["Pss_Shmem"])


def growth(sample: dict[str, Any], kind: str, steady: bool = False) -> int:
    """Bytes more than at first; of the largest rank, or of the node.

    Args:
        sample: a contender's: for each rank its memory before, and its peak in each phase.
        kind: "private" for a rank's own, "node" for the sum over ranks.
        steady: in the last steps; otherwise at any time.
    """
    by_rank = sample[kind]
    phases = [[rank[i] - rank[0] for rank in by_rank] for i in range(1, len(by_rank[0]))]
    if steady:
        phases = phases[-STEADY:]
    peaks: list[int] = [sum(phase) if kind == "node" else max(phase) for phase in phases]
    return max(peaks)


def table(samples: list[dict[str, Any]], parameter_bytes: int) -> str:
    """Peaks in MB, in multiples of the parameters, and as a ratio to torch's better setting."""
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
