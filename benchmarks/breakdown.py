"""python -m benchmarks.breakdown: splits a training step into the parts of each rank's main thread.

Examples:
    python -m benchmarks.breakdown                    gloo and mpi, MLP and ResNet-18, two processes
    python -m benchmarks.breakdown --backend mpi --model mlp --seconds 30
    python -m benchmarks.breakdown --quick            the MLP for three seconds

Prints a table for each backend and model, writes every sample as JSON and draws the parts. Steps
and turns are those of benchmarks.step_time. In ms, medians over rounds:

    step         of the slowest rank; the parts are means over ranks, and need not add up to it
    forward      and zero_grad
    backward     autograd, and what a Reducer does in its hooks that is none of the following; with
                 torch's DDP all that its reducer does meanwhile
    packing      gradients into buckets, and averages out of them
    averaging    sums over ranks, where the main thread takes them (NodeSharedSGD)
    waiting      for averages that are under way, or for other ranks
    optimizer    its step
    others       CPU time of the rank's other threads: gloo's, or that of an mpi group, which sums
                 in shared memory. Where each core has a rank, the main thread lacks that time.

Not for nccl, whose work is not the processor's: see the CPU ms of step_time, or torch.profiler.
"""

import argparse
import gc
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.harness import make_parser
from benchmarks.harness.launch import ON_CPU, Duration, add_common_options, backend_of_job
from benchmarks.harness.report import draw_parts
from ddp_from_scratch import SGD, UsageError, process_group
from ddp_from_scratch.backend.process_group import SharedMemoryGroup
from ddp_from_scratch.backend.reduction import Reduction
from ddp_from_scratch.bench.contenders import (
    CONTENDERS,
    NO_COMMUNICATION,
    REFERENCES,
    Contender,
    ContenderSpec,
    contenders,
)
from ddp_from_scratch.bench.machine import write
from ddp_from_scratch.bench.samples import Samples
from ddp_from_scratch.bench.timing import check_equal, interleave, rounds_for, warm_up
from ddp_from_scratch.bench.verdict import text_table
from ddp_from_scratch.bench.ways import check_memory, start
from ddp_from_scratch.bench.workloads import WORKLOADS
from ddp_from_scratch.core.bucket import Bucket
from ddp_from_scratch.launch import environment
from ddp_from_scratch.launch.rank_process import run_to_exit
from ddp_from_scratch.optim.flat_params import FlatParams
from ddp_from_scratch.options.views import ViewBucket

MODELS = ("mlp", "resnet18")
DURATION = Duration(usual=10.0, full=30.0)
# The lower bound, and torch's DDP at its best.
ALWAYS = (NO_COMMUNICATION, REFERENCES[1])
DEFAULT_CONTENDERS = (
    "Reducer, views",
    "ddp.SGD",
    "ddp.SGD, one flat bucket",
    "NodeSharedSGD",
)
PARTS = ("forward", "backward", "packing", "averaging", "waiting", "optimizer")
OTHERS = "others"


@dataclass
class StepClock:
    """Divides the time of the main thread among the parts of a step.

    A nested part suspends the outer one.

    Attributes:
        steps: by contender and step, the seconds of each part.
    """

    steps: dict[str, list[dict[str, float]]] = field(default_factory=lambda: defaultdict(list))
    _step: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _open: list[str] = field(default_factory=list)
    _since: float = 0.0
    _thread: int = field(default_factory=threading.get_ident)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Counts the time inside the context for this part, on the thread that made the clock."""
        # The time of other threads is in "others", since it overlaps with the main thread's.
        if threading.get_ident() != self._thread:
            yield
            return
        self._pass_on()
        self._open.append(name)
        try:
            yield
        finally:
            self._pass_on()
            self._open.pop()

    def _pass_on(self) -> None:
        now = time.perf_counter()
        if self._open:
            self._step[self._open[-1]] += now - self._since
        self._since = now

    def timed(self, contender: Contender) -> Contender:
        """Returns the contender with a timed step; time in no other part is "forward"."""

        def step() -> None:
            self._step = defaultdict(float)
            self.steps[contender.name].append(self._step)
            of_all, own = time.process_time(), time.thread_time()
            with self.part("forward"):
                contender.step()
            # On saturated cores, other threads lengthen the step, which no part shows.
            own_took = time.thread_time() - own
            # CPU clocks are coarse, so the difference may be just below 0.
            self._step[OTHERS] = max(time.process_time() - of_all - own_took, 0.0)
            self._step = defaultdict(float)  # time between steps belongs to none

        return replace(contender, step=step)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Makes these calls separate parts in every contender, inside the context."""
        watched: list[tuple[Any, str, str]] = [
            (torch.Tensor, "backward", "backward"),
            (torch.optim.SGD, "step", "optimizer"),
            (SGD, "step", "optimizer"),
            (FlatParams, "update", "optimizer"),
            (ViewBucket, "pack_one", "packing"),
            (Bucket, "pack", "packing"),
            (Bucket, "unpack", "packing"),
            (Bucket, "wait", "waiting"),
            (Reduction, "fold", "averaging"),
            # Only NodeSharedSGD calls these, which wait for other ranks.
            (SharedMemoryGroup, "reduce_to_owners", "waiting"),
            (SharedMemoryGroup, "free_unused", "waiting"),
        ]
        with ExitStack() as patches:
            for owner, name, part in watched:
                call = self._as_part(getattr(owner, name), part)
                patches.enter_context(mock.patch.object(owner, name, call))
            yield

    def _as_part(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        def in_part(*arguments: Any, **settings: Any) -> Any:
            with self.part(part):
                return call(*arguments, **settings)

        return in_part


def main() -> int:
    options = parse(sys.argv[1:])
    if environment.launcher() != "none":
        measure(options)
        return 0
    for backend in options.backend:
        for model in options.model:
            check_memory(WORKLOADS[model], len(chosen(options, backend)), options.nproc)
        models = ["--model", *options.model]
        if code := start("benchmarks.breakdown", backend, options.nproc, *sys.argv[1:], *models):
            return code
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("benchmarks.breakdown", __doc__)
    add_common_options(parser, MODELS, ON_CPU)
    parser.add_argument("--nproc", type=int, default=2, help="default: 2")
    parser.add_argument(
        "--contender",
        nargs="+",
        choices=[s.name for s in CONTENDERS if "sgd" in s.optimizers and s.name not in ALWAYS],
        default=DEFAULT_CONTENDERS,
        metavar="NAME",
        help=f"beside {' and '.join(ALWAYS)}, by the names of benchmarks.step_time (default: "
        f"{'; '.join(DEFAULT_CONTENDERS)})",
    )
    DURATION.add_options(parser, quick="mlp", full="the same models")
    options = parser.parse_args(arguments)
    if options.quick and options.model == list(MODELS):
        options.model = ["mlp"]
    DURATION.settle(options)
    if options.nproc < 1:
        raise UsageError(f"--nproc must be 1 or more, got {options.nproc}")
    return options


def chosen(options: argparse.Namespace, backend: str) -> list[ContenderSpec]:
    names = {*ALWAYS, *options.contender}
    return [s for s in CONTENDERS if s.name in names and backend in s.backends]


def measure(options: argparse.Namespace) -> None:
    """Times every model on this rank. Rank 0 prints, writes and draws."""
    backend = backend_of_job(options)
    # More threads would take the other ranks' cores.
    torch.set_num_threads(1)
    with process_group(backend) as world:
        for model in options.model:
            torch.manual_seed(world.rank)
            compared = contenders(WORKLOADS[model], world.device, chosen(options, backend))
            title = f"{WORKLOADS[model].name}; {backend}, {world.world_size} ranks"
            warm_up(compared)
            check_equal(compared)
            rounds = rounds_for(options.seconds, options.rounds, world.device, title)
            samples, parts = take_apart(compared, rounds, world.device)
            if world.rank == 0:
                count = len(samples[0].milliseconds)
                print(f"\n{title}, {count} steps each, ms\n{table(samples, parts)}", flush=True)
                name = f"breakdown-{model}-{backend}-{world.world_size}"
                settings = {
                    "benchmark": "breakdown",
                    "model": model,
                    "backend": backend,
                    "nproc": world.world_size,
                }
                kept = [asdict(s) | {"parts": p} for s, p in zip(samples, parts, strict=True)]
                write(name, title, kept, settings=settings, folder=options.results)
                bars = {
                    s.name: {part: float(np.median(p[part])) for part in PARTS}
                    for s, p in zip(samples, parts, strict=True)
                }
                heading = f"where a step's time goes: {title}"
                draw_parts(name, heading, "ms of the main thread", bars, folder=options.results)
            # Frees the model before the next one, since hooks make cycles of model and Reducer.
            compared.clear()
            gc.collect()


Parts = dict[str, list[float]]


def take_apart(
    compared: Sequence[Contender], rounds: Iterator[int], device: torch.device
) -> tuple[list[Samples], list[Parts]]:
    """Interleaves; also returns the ms of every part by round, as means over ranks."""
    clock = StepClock()
    with clock.watching():
        samples = interleave([clock.timed(contender) for contender in compared], rounds, device)
    parts: list[Parts] = []
    for contender in compared:
        of_rounds = clock.steps[contender.name]
        steps = [[step[part] for part in (*PARTS, OTHERS)] for step in of_rounds]
        mean = torch.tensor(steps, dtype=torch.float64, device=device)
        dist.all_reduce(mean)
        columns = (1e3 * mean / dist.get_world_size()).T.tolist()
        parts.append(dict(zip((*PARTS, OTHERS), columns, strict=True)))
    return samples, parts


def table(samples: Sequence[Samples], parts: Sequence[Parts]) -> str:
    rows = [
        [s.name, f"{s.quartiles[1]:.1f}", *(f"{np.median(p[n]):.1f}" for n in (*PARTS, OTHERS))]
        for s, p in zip(samples, parts, strict=True)
    ]
    return text_table(["", "step", *PARTS, OTHERS], rows)


if __name__ == "__main__":
    run_to_exit(main)
