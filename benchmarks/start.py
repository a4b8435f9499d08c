"""Starts a benchmark's ranks: `python -m benchmarks.start BACKEND NPROC -m benchmarks.NAME ...`.

A process of its own, since mpirun takes the place of the one that calls it.
"""

import sys

from ddp_from_scratch import launch, start_ranks
from ddp_from_scratch.exit import run_to_exit


def main() -> int:
    backend, nproc, *arguments = sys.argv[1:]
    command = [sys.executable, *arguments]
    if backend == "mpi":
        launch.exec_mpirun(int(nproc), command)
    return start_ranks(command, (int(nproc),))


if __name__ == "__main__":
    run_to_exit(main)
