"""Ways of running a job's contenders: together in one process, with memory kept, or each alone."""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddp_from_scratch import gpu
from ddp_from_scratch.bench.job import Job
from ddp_from_scratch.bench.machine import available_memory
from ddp_from_scratch.bench.workloads import Workload
from ddp_from_scratch.errors import UsageError
from ddp_from_scratch.launch.supervisor import start_mpirun, start_ranks


def default_ranks() -> int:
    """Two, or one where there is a single GPU."""
    return min(2, gpu.count() or 2)


def start(module: str, backend: str, nproc: int, *arguments: object) -> int:
    """Runs `python -m module` on every rank of a job, and waits for it.

    Args:
        module: the benchmark.
        backend: of the job.
        nproc: number of ranks. Every rank gets this and the backend as its last options.
        arguments: other options.

    Returns:
        The exit code of the first rank that failed, or 0.
    """
    rank = [sys.executable, "-m", module, *map(str, arguments)]
    # Last: of an option that is there twice the last counts.
    rank += ["--backend", backend, "--nproc", str(nproc)]
    # Ranks of MPI come from its own launcher.
    if backend == "mpi":
        return start_mpirun(nproc, rank)
    return start_ranks(rank, (nproc,))


def check_memory(model: Workload, copies: int, nproc: int) -> None:
    """Refuses copies that would not fit into memory, before a rank is started.

    A copy of a model is taken for four times its parameters: these, momentum, gradients, buckets.

    Raises:
        UsageError: it does not fit into what is available.
    """
    # All contenders of a model are in memory at once, since they take turns.
    needed = 4 * model.parameter_bytes * copies * nproc
    available = available_memory()
    if available is not None and needed > available and not gpu.count():
        raise UsageError(
            f"{copies} copies of {model.name} on {nproc} ranks need about {needed / 2**30:.0f} "
            f"GiB, and {available / 2**30:.0f} GiB are available: choose fewer with --contender, "
            f"--model or --nproc"
        )


MODULE = "ddp_from_scratch.bench"

# glibc then keeps freed memory for the next allocation. It ignores a first value above 32 MB.
KEPT = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**32)}

_LEAST_S = 2.0  # of a contender by itself

Content = dict[str, Any]


class RanksFailed(Exception):
    """Ranks that did not end well, and have said why; `code` is the first one's."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the ranks ended with exit code {code}")
        self.code = code


def interleaved(job: Job) -> Content:
    """All contenders in the same processes, taking turns step by step."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        part = Path(folder) / "part.json"
        code = start(MODULE, job.backend, job.nproc, "--job", job.dumps(), "--into", part)
        if code:
            raise RanksFailed(code)
        content: Content = json.loads(part.read_text())
        return content


def kept(job: Job) -> Content:
    """The same, where glibc keeps memory that is freed: no page is taken from the system twice."""
    with _environment(KEPT):
        return interleaved(job)


def alone(job: Job) -> Content:
    """Each contender in processes of its own, one after the other.

    A lone model gets the memory of each gradient from the system anew, step after step. Contenders
    that take turns use each other's freed memory, which hides that cost.
    """
    specs = job.rows
    seconds = max(_LEAST_S, job.seconds / len(specs))
    contents = []
    for spec in specs:
        # What runs on gloo and node groups is measured without MPI, too.
        alone_on = "nccl" if "nccl" in job.backends else "gloo"
        own = "mpi" if spec.group == "mpi" else alone_on
        contents.append(interleaved(replace(job, only=spec.name, seconds=seconds, own=own)))
    # The machine's description and the title are the same in all.
    merged = contents[0]
    for other in contents[1:]:
        merged["samples"] += other["samples"]
        merged["left_out"] |= other["left_out"]
        merged["disturbed"] = merged.get("disturbed") or other.get("disturbed")
    return merged


WAYS: Mapping[str, Callable[[Job], Content]] = {
    "interleaved": interleaved,
    "kept": kept,
    "alone": alone,
}


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
