"""Jobs: what one group of ranks measures, the part of each rank, and the ways to run the ranks."""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch import gpu, node  # noqa: F401  # node registers its backend
from ddp_from_scratch.bench.contenders import (
    NO_COMMUNICATION,
    OPTIMIZERS,
    ContenderSpec,
    contenders,
    rows,
)
from ddp_from_scratch.bench.machine import content_of
from ddp_from_scratch.bench.samples import disturbance
from ddp_from_scratch.bench.timing import check_equal, check_ranks, interleave, rounds_for, warm_up
from ddp_from_scratch.bench.workloads import Workload, workload
from ddp_from_scratch.launch.start import start_mpirun, start_ranks
from ddp_from_scratch.world import process_group

# Makes glibc keep freed memory for later allocations. It ignores a first value above 32 MB.
KEPT = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**32)}

_LEAST_S = 2.0  # for each contender that runs alone

Content = dict[str, Any]


@dataclass(frozen=True)
class Job:
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
        return "-".join([*parts, *([self.way] if self.way != "interleaved" else [])])

    def title(self, of: Workload) -> str:
        optimizer = f"fused {OPTIMIZERS[self.optimizer].name} in rows with torch's optimizer"
        return f"{of.name}; {' and '.join(self.backends)}, {self.nproc} ranks; {optimizer}"


def measure(job: Job) -> dict[str, Any] | None:
    """Times the contenders on this rank. Returns the file's content on rank 0."""
    # More threads would take the other ranks' cores.
    torch.set_num_threads(1)
    of = workload(job.model)
    with process_group(job.backend) as world:
        # Sorted, since making a group is collective and needs the same order on all ranks.
        others = sorted({spec.group for spec in job.rows if spec.group} - {world.backend})
        groups: dict[str, Any] = {backend: dist.new_group(backend=backend) for backend in others}
        # Batches differ between ranks, as in training; `contenders` seeds the models.
        torch.manual_seed(world.rank)
        compared = contenders(of, world.device, job.rows, groups, OPTIMIZERS[job.optimizer])
        warm_up(compared)
        # Times mean nothing if contenders do not compute the same.
        check_equal(compared)
        rounds = rounds_for(job.seconds, job.rounds, world.device, job.title(of))
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
        )
        if world.device.type == "cpu" and world.world_size == world.local_world_size:
            alone = next((s for s in samples if s.name == NO_COMMUNICATION), None)
            cores = len(os.sched_getaffinity(0))
            content["disturbed"] = disturbance(alone, world.world_size, cores)
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


def interleaved(job: Job) -> Content:
    """Runs all contenders in the same processes, in turn; exits with the code of a failed rank."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        part = Path(folder) / "part.json"
        options = ("--job", json.dumps(asdict(job)), "--into", part)
        code = start("ddp_from_scratch.bench", job.backend, job.nproc, *options)
        if code:
            raise SystemExit(code)
        content: Content = json.loads(part.read_text())
        return content


def kept(job: Job) -> Content:
    """Runs `interleaved` with a glibc that keeps freed memory, so no page is mapped twice."""
    os.environ.update(KEPT)  # the ranks inherit it
    try:
        return interleaved(job)
    finally:
        for name in KEPT:
            del os.environ[name]


def alone(job: Job) -> Content:
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


WAYS: Mapping[str, Callable[[Job], Content]] = {
    "interleaved": interleaved,
    "kept": kept,
    "alone": alone,
}
