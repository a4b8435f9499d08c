"""Jobs: starts ranks (interleaved, with memory kept, each alone), which time steps fairly.

Contenders take turns in the same processes, and the slowest rank counts.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.utils import get_total_norm

from ddp_from_scratch import node  # noqa: F401  # node registers its backend
from ddp_from_scratch.bench.contenders import (
    OPTIMIZERS,
    Contender,
    ContenderSpec,
    contenders,
    rows,
)
from ddp_from_scratch.bench.results import (
    NO_COMMUNICATION,
    Run,
    Samples,
    content_of,
    disturbance,
    usable_cpus,
)
from ddp_from_scratch.bench.workloads import Workload, workload
from ddp_from_scratch.common import gpu
from ddp_from_scratch.launch.environment import STARTED_HERE
from ddp_from_scratch.launch.start import start_mpirun, start_ranks
from ddp_from_scratch.sync.check_sync import check_sync
from ddp_from_scratch.world.world import process_group

FEWEST_ROUNDS = 5  # even if the time is over before
WARM_UP = 3  # rounds that are not counted

# Makes glibc keep freed memory for later allocations. It ignores a first value above 32 MB.
KEPT = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**32)}

_LEAST_S = 2.0  # for each contender that runs alone

Content = dict[str, Any]


@dataclass(frozen=True)
class BenchmarkJob:
    """What one group of ranks measures."""

    model: str  # see `workload`
    backends: Sequence[str]  # of the table
    nproc: int
    optimizer: str = "sgd"
    chosen: Sequence[str] | None = None  # beside the references; None means the default ones
    seconds: float = 15.0
    rounds: int | None = None  # steps of each contender; replaces `seconds`
    only: str | None = None  # the only row to measure
    way: str = "interleaved"
    own: str = ""  # the ranks' own backend; "" prefers mpi, whose ranks can open other groups, too
    shows: bool = False  # a line on standard error, a terminal, that says what is done now
    threads: int = 1  # of a rank
    batches: int = 1  # of the workload, joined to a rank's batch

    @property
    def rows(self) -> list[ContenderSpec]:
        found = rows(self.backends, self.optimizer, self.chosen)
        return [spec for spec in found if self.only in (None, spec.name)]

    @property
    def backend(self) -> str:
        return self.own or next((b for b in ("mpi", "nccl") if b in self.backends), "gloo")

    @property
    def file_name(self) -> str:
        model = "-".join(Path(self.model).name.replace(".py:", "-").split())
        parts = [f"step_time-{model}-{'+'.join(self.backends)}-{self.nproc}"]
        parts += [self.optimizer] if self.optimizer != "sgd" else []
        parts += [f"{self.threads}-threads"] if self.threads > 1 else []
        return "-".join([*parts, *([self.way] if self.way != "interleaved" else [])])

    def title(self, of: Workload) -> str:
        optimizer = f"fused {OPTIMIZERS[self.optimizer].name} in rows with torch's optimizer"
        ranks = f"{self.nproc} ranks" + (f" x {self.threads} threads" if self.threads > 1 else "")
        return f"{of.name}; {' and '.join(self.backends)}, {ranks}; {optimizer}"


def measure(job: BenchmarkJob) -> dict[str, Any] | None:
    """Times the contenders on this rank. Returns the file's content on rank 0."""
    torch.set_num_threads(job.threads)
    of = workload(job.model).joined(job.batches)
    with process_group(job.backend) as world:
        if STARTED_HERE not in os.environ:  # else the parent has checked it
            of.check()
        # Sorted, since making a group is collective and needs the same order on all ranks.
        others = sorted({spec.group for spec in job.rows if spec.group} - {world.backend})
        groups: dict[str, Any] = {backend: dist.new_group(backend=backend) for backend in others}
        # Batches differ between ranks, as in training; `contenders` seeds the models.
        torch.manual_seed(world.rank)
        shows = job.shows and world.rank == 0
        if shows:
            show("making the models")
        compared = contenders(of, world.device, job.rows, groups, OPTIMIZERS[job.optimizer])
        warm_up(compared, shows)
        # Times mean nothing if contenders do not compute the same.
        check_equal(compared)
        rounds = rounds_for(job.seconds, job.rounds, world.device, of.name, job.shows)
        samples = interleave(compared, rounds, world.device)
        check_ranks(compared)
        if world.rank != 0:
            return None
        content = content_of(
            job.title(of),
            [asdict(s) for s in samples],
            benchmark="step_time",
            model=job.model,
            backend=" ".join(job.backends),
            nproc=world.world_size,
            optimizer=job.optimizer,
            way=job.way,
            threads=job.threads,
        )
        on_one = world.device.type == "cpu" and world.world_size == world.local_world_size
        if on_one and job.threads == 1:  # several threads wait for each other
            alone = Run(samples).alone
            content["disturbed"] = disturbance(alone, world.world_size, usable_cpus())
        return content


def default_ranks() -> int:
    """Returns two, or one on a machine with a single GPU."""
    return min(2, gpu.count() or 2)


def start(module: str, backend: str, nproc: int, *arguments: object) -> int:
    """Runs `python -m module` on every rank; returns the exit code of the first that failed.

    Its last options are the backend and the number of ranks, which override others.
    """
    rank = [sys.executable, "-m", module, *map(str, arguments)]
    rank += ["--backend", backend, "--nproc", str(nproc)]
    if backend == "mpi":
        return start_mpirun(nproc, rank)
    return start_ranks(rank, (nproc,))


def interleaved(job: BenchmarkJob) -> Content:
    """Runs all contenders in the same processes, in turn; exits with the code of a failed rank."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        described, part = Path(folder) / "job.json", Path(folder) / "part.json"
        described.write_text(json.dumps(asdict(job)))
        if job.shows and job.backend != "mpi":  # where the command is printed
            show(f"starting {job.nproc} ranks")
        options = ("--job", described, "--into", part)
        code = start("ddp_from_scratch.bench", job.backend, job.nproc, *options)
        if code:
            raise SystemExit(code)
        content: Content = json.loads(part.read_text())
        return content


def kept(job: BenchmarkJob) -> Content:
    """Runs `interleaved` with a glibc that keeps freed memory, so no page is mapped twice."""
    os.environ.update(KEPT)  # the ranks inherit it
    try:
        return interleaved(job)
    finally:
        for name in KEPT:
            del os.environ[name]


def alone(job: BenchmarkJob) -> Content:
    """Runs each contender in its own processes, one after another.

    A lone model takes new memory for its gradients from the system in every step. Contenders that
    take turns reuse each other's, which hides that cost.
    """
    specs = job.rows
    seconds = max(_LEAST_S, job.seconds / len(specs))
    contents = []
    for spec in specs:
        # Contenders on gloo and node groups run without MPI.
        alone_on = "nccl" if "nccl" in job.backends else "gloo"
        own = "mpi" if spec.group == "mpi" else alone_on
        contents.append(interleaved(replace(job, only=spec.name, seconds=seconds, own=own)))
    # All have the same title and description of the machine.
    merged = contents[0]
    for other in contents[1:]:
        merged["samples"] += other["samples"]
        merged["disturbed"] = merged.get("disturbed") or other.get("disturbed")
    return merged


# How to run a job, and what the table calls it.
WAYS: Mapping[str, tuple[Callable[[BenchmarkJob], Content], str]] = {
    "interleaved": (interleaved, "taking turns"),
    "kept": (kept, "taking turns, freed memory kept"),
    "alone": (alone, "each in processes of its own"),
}


# Steps ------------------------------------------------------------------------------------------


def show(text: str) -> None:
    """Shows a line on the terminal, which the next output replaces."""
    print(f"\033[K{text}\r", end="", file=sys.stderr, flush=True)


def warm_up(compared: Sequence[Contender], shows: bool = False) -> None:
    """Runs `WARM_UP` rounds, in which buckets are rebuilt once and allocators settle."""
    for turn in range(WARM_UP):
        for place, contender in enumerate(compared):
            if shows:
                done = turn * len(compared) + place
                show(f"warming up: step {done + 1} of {WARM_UP * len(compared)}")
            _seed(turn)
            contender.step()


def interleave(
    compared: Sequence[Contender], rounds: Iterable[int], device: torch.device
) -> list[Samples]:
    """Times one step of each contender in every round, in a new random order each round.

    Call `warm_up` before. `rounds` may look at the clock, but must be equal on all ranks.
    """
    order = np.random.default_rng(0)  # the same on every rank
    times: list[list[float]] = [[] for _ in compared]
    cpu_times: list[list[float]] = [[] for _ in compared]
    # Times stay on their rank until the end, since sending them would disturb the next step.
    for turn in rounds:
        for index in order.permutation(len(compared)):
            _seed(WARM_UP + turn)
            dist.barrier()  # all ranks begin together
            gpu.synchronize(device)
            began, cpu_began = time.perf_counter(), time.process_time()
            # No barrier after the step, which would add the wait for other ranks.
            compared[index].step()
            cpu_ended = time.process_time()  # before the wait for a GPU, which spins
            gpu.synchronize(device)
            times[index].append(1e3 * (time.perf_counter() - began))
            cpu_times[index].append(1e3 * (cpu_ended - cpu_began))
    slowest = torch.tensor([times, cpu_times], dtype=torch.float64, device=device)
    # The next step waits for the slowest rank, so its time counts.
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [
        Samples(c.name, milliseconds, cpu)
        for c, milliseconds, cpu in zip(compared, *slowest.tolist(), strict=True)
    ]


def _seed(turn: int) -> None:
    """Makes dropout equal for all contenders of a round, and different on each rank."""
    torch.manual_seed(turn * dist.get_world_size() + dist.get_rank())


def rounds_for(
    seconds: float, count: int | None, device: torch.device, title: str, shows: bool = False
) -> Iterator[int]:
    """Yields `count` rounds, or as many as rank 0's clock allows from the first round on.

    Rank 0 shows how many are done, if its standard error is a terminal, or, with `shows`, leads to
    one.
    """
    limit = count or seconds
    shows = dist.get_rank() == 0 and (shows or sys.stderr.isatty())
    name, unit, shown = title.partition(";")[0], "rounds" if count else "s", ""
    began, turn = time.perf_counter(), 0
    while True:
        done = turn if count else time.perf_counter() - began
        text = f"{name}: {min(done, limit):.0f} of {limit:g} {unit}"
        if shows and text != shown:
            show(shown := text)
        # Rank 0 decides for all, since a rank that continued alone would hang.
        over = torch.tensor([done >= limit], device=device)
        dist.broadcast(over, 0)
        if over.item() and turn >= (count or FEWEST_ROUNDS):
            break
        yield turn
        turn += 1
    if shows:
        show("")


def check_ranks(compared: Sequence[Contender]) -> None:
    """Raises a RuntimeError unless each contender's parameters are bit-identical over ranks."""
    for contender in compared:
        if contender.name != NO_COMMUNICATION:
            check_sync(contender.model)


def check_equal(compared: Sequence[Contender], tolerance: float = 0.01) -> None:
    """Raises a RuntimeError if contenders computed different results, so times do not compare.

    Parameters must be bit-identical over ranks. Contenders sum in other orders, so theirs may
    differ by `tolerance` times the distance that training moved them. Call it after few steps: some
    kernels of a GPU round differently in each run, and training amplifies that.
    """
    check_ranks(compared)
    trained = [c for c in compared if c.name != NO_COMMUNICATION]  # none if that one runs alone
    for other in trained[1:]:
        models = (other.model.parameters(), trained[0].model.parameters())
        check_distance((other.name, trained[0].name), *models, other.start, tolerance)


@torch.no_grad()
def check_distance(
    names: tuple[str, str],
    some: Iterable[torch.Tensor],
    others: Iterable[torch.Tensor],
    start: Iterable[torch.Tensor],
    tolerance: float = 0.01,
) -> None:
    """Raises a RuntimeError if two models differ by more than `tolerance` of their training."""
    others = list(others)
    moved, apart = (
        float(get_total_norm([a - b for a, b in zip(*pair, strict=True)]))
        for pair in ((others, start), (some, others))
    )
    if not (moved > 0 and apart <= tolerance * moved):  # negated to catch NaN
        raise RuntimeError(
            f"{names[0]} and {names[1]} have trained to a different model, {apart:.2g} apart where "
            f"training moved it by {moved:.2g}: they cannot be compared"
        )
