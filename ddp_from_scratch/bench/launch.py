"""Launch of the ranks that measure."""

import sys

from ddp_from_scratch import gpu
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
