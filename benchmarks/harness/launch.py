"""The skeleton of a benchmark: its options, and its ranks on each backend."""

import argparse
import gc
import math
import sys
from collections.abc import Callable, Sequence

import torch

from ddp_from_scratch import UsageError, process_group
from ddp_from_scratch.bench.timing import start
from ddp_from_scratch.bench.workloads import WORKLOADS
from ddp_from_scratch.launch import environment
from ddp_from_scratch.world.world import World

MODELS = ("mlp", "resnet18")
ON_CPU = ("gloo", "mpi")


def add_common_options(
    parser: argparse.ArgumentParser,
    models: Sequence[str] = MODELS,
    backends: Sequence[str] = (*ON_CPU, "nccl"),
    nproc: int = 2,
) -> None:
    """Adds --backend, --model and --nproc.

    The default of --backend is nccl if that is a choice and there is a GPU, otherwise the choices
    on a CPU.
    """
    on_gpu = "nccl" in backends and torch.cuda.is_available()
    default = ["nccl"] if on_gpu else [name for name in ON_CPU if name in backends]
    text = f"default: {' '.join(default)}"
    parser.add_argument("--backend", nargs="+", choices=backends, default=default, help=text)
    text = f"of {', '.join(WORKLOADS)} (default: {' '.join(models)})"
    parser.add_argument(
        "--model", nargs="+", choices=WORKLOADS, default=list(models), metavar="M", help=text
    )
    parser.add_argument("--nproc", type=int, default=nproc, help="ranks (default: 2)")


def parse_sweep(
    parser: argparse.ArgumentParser, arguments: Sequence[str], *, quick: str, full: str
) -> argparse.Namespace:
    """Adds --rounds, --seconds, --quick and --full to the common options, and parses.

    `quick` and `full` say what else these two select.

    Raises:
        UsageError: --seconds or --rounds is out of range.
    """
    parser.add_argument("--rounds", type=int, help="timed steps of each, in place of --seconds")
    text = "for a model on a backend, after warm-up (default: 12)"
    parser.add_argument("--seconds", type=float, help=text)
    sweep = parser.add_mutually_exclusive_group()
    sweep.add_argument("--quick", action="store_true", help=f"{quick}, 3 seconds each")
    sweep.add_argument("--full", action="store_true", help=f"{full}, 60 seconds each")
    options = parser.parse_args(arguments)
    if options.quick and options.model == list(MODELS):
        options.model = ["mlp"]
    if options.seconds is None:
        options.seconds = 3.0 if options.quick else 60.0 if options.full else 12.0
    if not 0 < options.seconds < math.inf:
        raise UsageError(f"--seconds must be more than 0, got {options.seconds:g}")
    if options.rounds is not None and options.rounds < 2:
        raise UsageError(f"--rounds must be 2 or more, got {options.rounds}")
    return options


def backend_of_job(options: argparse.Namespace) -> str:
    """Returns the backend for which this rank was started; a UsageError unless there is one."""
    if len(options.backend) != 1:
        raise UsageError(f"under a launcher --backend takes one, got {' '.join(options.backend)}")
    backend: str = options.backend[0]
    return backend


def run_on_ranks(
    name: str,
    options: argparse.Namespace,
    measure: Callable[[argparse.Namespace, World, str, str], None],
) -> int:
    """Starts `python -m NAME` on the ranks of each backend, or measures on this rank.

    `measure` gets the options, the world, the name of a model, and a title. Returns the exit code
    of the first rank that failed, or 0.
    """
    if environment.launcher() == "none":
        for backend in options.backend:
            if code := start(name, backend, options.nproc, *sys.argv[1:]):
                return code
        return 0
    backend = backend_of_job(options)
    # More threads would take the other ranks' cores.
    torch.set_num_threads(1)
    with process_group(backend) as world:
        for model in options.model:
            torch.manual_seed(world.rank)
            title = f"{WORKLOADS[model].name}; {backend}, {world.world_size} ranks"
            measure(options, world, model, title)
            gc.collect()  # hooks make cycles of model and Reducer
    return 0
