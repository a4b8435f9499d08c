"""python -m benchmarks.wait_cost: measures how much a waiting rank slows one that computes.

Examples:
    python -m benchmarks.wait_cost              one computing and one waiting rank for each core

Half of the ranks compute a fixed piece of work each; the other half wait for them, in one of five
ways: in the middle of nothing (they sleep until they are called: the reference), in mpi4py's
Allreduce, in a loop that asks MPI whether the message has come, in one that yields the core each
time, and in this library's all_reduce. Prints how much longer the work took.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from benchmarks.harness import make_parser
from benchmarks.harness.launch import add_results_option
from ddp_from_scratch import UsageError, process_group
from ddp_from_scratch.bench.machine import on_terminal, write
from ddp_from_scratch.bench.verdict import text_table
from ddp_from_scratch.launch import environment
from ddp_from_scratch.launch.rank_process import run_to_exit
from ddp_from_scratch.launch.start import start_mpirun


def main() -> int:
    parser = make_parser("benchmarks.wait_cost", __doc__)
    cores = len(os.sched_getaffinity(0))
    # Two ranks per core, one of each kind, so that a polling rank can take a working rank's core.
    parser.add_argument(
        "--nproc", type=int, default=2 * cores, help=f"ranks (default: {2 * cores}, two a core)"
    )
    parser.add_argument("--rounds", type=int, default=20, help="pieces of work (default: 20)")
    add_results_option(parser)
    options = parser.parse_args()
    if options.nproc < 2 or options.nproc % 2 or options.rounds < 1:
        raise UsageError("--nproc must be an even number, 2 or more, and --rounds 1 or more")
    if environment.launcher() == "none":
        rank = [sys.executable, "-m", "benchmarks.wait_cost", "--rounds", str(options.rounds)]
        rank += ["--results", str(options.results)]
        return start_mpirun(options.nproc, [*rank, "--nproc", str(options.nproc)])
    measure(options.rounds, options.results)
    return 0


def measure(rounds: int, folder: Path) -> None:
    """Computes or waits on this rank, in each way in turn."""
    from ddp_from_scratch.backend.mpi_transport import MPI

    everyone = MPI.COMM_WORLD
    # More threads would take the other ranks' cores.
    torch.set_num_threads(1)
    with process_group("mpi") as world:
        computes = world.rank < world.world_size // 2
        square, tensor = torch.randn(256, 256), torch.zeros(256)
        flat = np.zeros(256, np.float32)

        def asleep() -> None:
            # The reference sleeps and takes no core, unlike MPI's own waits, which poll.
            request = everyone.Ibarrier()
            while not request.Test():
                time.sleep(0.01)

        def asking(between: Callable[[], None]) -> None:
            request = everyone.Ibarrier()
            while not request.Test():
                between()

        ways: dict[str, Callable[[], object]] = {
            "nobody waits": asleep,
            "mpi4py Allreduce": lambda: everyone.Allreduce(MPI.IN_PLACE, flat),
            "MPI_Test in a loop": lambda: asking(lambda: None),
            "MPI_Test and sched_yield": lambda: asking(os.sched_yield),
            "this library's all_reduce": lambda: dist.all_reduce(tensor),
        }
        times = torch.zeros(len(ways), rounds, dtype=torch.float64)
        turns = tqdm(range(rounds), disable=world.rank != 0 or not on_terminal(), leave=False)
        for turn in turns:
            for index, wait in enumerate(ways.values()):
                dist.barrier()
                time.sleep(0.02)  # until the waiting ranks wait
                began = time.perf_counter()
                if computes:
                    for _ in range(100):
                        square @ square
                times[index, turn] = time.perf_counter() - began
                wait()  # both halves: the computing ones wake the others
        # The slowest of the computing ranks counts, since the others wait for it.
        dist.all_reduce(times, dist.ReduceOp.MAX)
        if world.rank == 0:
            report(list(ways), times, world.world_size, folder)


def report(ways: list[str], times: torch.Tensor, ranks: int, folder: Path) -> None:
    """Prints the medians and writes all samples."""
    medians = times.median(1).values.tolist()
    rows = [
        [name, f"{1e3 * median:.1f}", f"{median / medians[0]:.2f}"]
        for name, median in zip(ways, medians, strict=True)
    ]
    half, cores = ranks // 2, len(os.sched_getaffinity(0))
    title = f"{half} ranks compute while {half} wait, on {cores} cores"
    print(f"\n{title}: median ms of the work")
    print(text_table(["way to wait", "ms", "/ nobody waits"], rows), flush=True)
    settings = {"benchmark": "wait_cost", "nproc": ranks}
    samples = dict(zip(ways, times.tolist(), strict=True))
    write("wait_cost", title, samples, settings=settings, folder=folder)


if __name__ == "__main__":
    run_to_exit(main)
