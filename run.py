"""Trains an image classifier on several processes at once, gradients averaged from scratch.

Examples:
    python run.py                                two gloo processes on this machine
    python run.py --backend mpi --nproc 4        the same on MPI: starts itself under mpirun
    mpirun -n 4 python run.py --backend mpi      under a launcher of yours;
    torchrun --nproc-per-node 2 run.py             torchrun and srun, too
    python run.py --backend nccl                 one process for each visible GPU
    python run.py --nproc 8,2 --node-rank 0 --master-addr HOST
                                                 two machines without a launcher: the same on the
                                                 other one, with --node-rank 1 and the DDP_SECRET
                                                 that this one prints
    python run.py test --checkpoint FILE         the test accuracy of a saved model
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence

if __name__ == "__main__":
    # A stream that is closed (`>&-`) becomes /dev/null, before a socket gets its number and with it
    # what is printed.
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            stream = open(os.devnull, "r+")  # noqa: SIM115  # has the lowest number that is free
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
    # Ctrl-C ends the process without a traceback, also during the seconds that the imports below
    # take, until somebody has something to save or to stop.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch

from ddp_from_scratch import UsageError, World, process_group, start_ranks
from ddp_from_scratch.launch import environment
from ddp_from_scratch.launch.rank_exit import run_to_exit
from ddp_from_scratch.launch.supervisor import start_mpirun
from ddp_from_scratch.training.cli import parse
from ddp_from_scratch.training.evaluate import test
from ddp_from_scratch.training.loop import Trainer
from ddp_from_scratch.training.settings import Settings


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    settings, options = parse(arguments, str(__doc__))
    # A job's interactive shell, as `srun --pty bash` gives it, is a step with a single task.
    in_slurm_shell = (
        environment.launcher() == "srun" and environment.started() == 1 and options.nproc
    )
    if environment.launcher() == "none" or in_slurm_shell:
        code = start(settings.backend, options, arguments)
        if code is not None:
            return code
    elif not environment.started_here():
        for name in ("nproc", "node_rank", "master_addr", "master_port"):
            if getattr(options, name) is not None:
                raise UsageError(
                    f"--{name.replace('_', '-')} is for starting without a launcher, but "
                    f"{environment.launcher()} has started this process already: leave it out"
                )
    with process_group(settings.backend, timeout=settings.timeout) as world:
        return work(settings, options, world)


def start(backend: str, options: argparse.Namespace, arguments: Sequence[str]) -> int | None:
    """Starts the ranks; None when this process is to be the only one."""
    command = [sys.executable, os.path.abspath(__file__), *arguments]
    default = 2
    if backend == "nccl":
        default = torch.cuda.device_count()
        if default == 0:
            raise UsageError(
                "--backend nccl needs a GPU, and none is visible here: use --backend gloo or mpi"
            )
    node_rank = options.node_rank or 0
    counts = environment.parse_counts(options.nproc or str(default), node_rank)
    if len(counts) > 1:
        if backend == "mpi":
            raise UsageError(
                "--backend mpi runs on several machines under mpirun: mpirun --host A:8,B:2 "
                "python run.py --backend mpi"
            )
        if options.node_rank is None or options.master_addr is None:
            raise UsageError("--nproc for several machines needs --node-rank and --master-addr")
    elif options.master_addr is not None or options.master_port is not None:
        raise UsageError("--master-addr and --master-port are for several machines: --nproc 8,2")
    if counts == (1,):
        return None
    if backend == "mpi":
        return start_mpirun(counts[0], command)
    return start_ranks(
        command,
        counts,
        node_rank,
        options.master_addr or "127.0.0.1",
        options.master_port or 29500,
        options.timeout,
    )


def work(settings: Settings, options: argparse.Namespace, world: World) -> int:
    """This rank's part."""
    if options.command == "test":
        test(settings, options.dataset, options.checkpoint, world)
        return 0
    number = Trainer(settings, world).run()
    return 128 + number if number else 0


if __name__ == "__main__":
    run_to_exit(lambda: main(sys.argv[1:]))
