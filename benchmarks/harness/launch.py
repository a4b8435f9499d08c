"""Options that benchmarks share."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.harness.report import RESULTS
from ddp_from_scratch import UsageError
from ddp_from_scratch.bench.workloads import WORKLOADS

ON_CPU = ("gloo", "mpi")


def add_common_options(
    parser: argparse.ArgumentParser,
    models: Sequence[str],
    backends: Sequence[str] = (*ON_CPU, "nccl"),
) -> None:
    """Adds --backend, --model and --results.

    Args:
        parser: gets the options.
        models: the default of --model.
        backends: the choices of --backend. Its default is nccl if that is a choice and there is a
            GPU, otherwise the choices on a CPU.
    """
    on_gpu = "nccl" in backends and torch.cuda.is_available()
    default = ["nccl"] if on_gpu else [name for name in ON_CPU if name in backends]
    parser.add_argument(
        "--backend",
        nargs="+",
        choices=backends,
        default=default,
        help=f"default: {' '.join(default)}",
    )
    parser.add_argument(
        "--model",
        nargs="+",
        choices=WORKLOADS,
        default=list(models),
        metavar="M",
        help=f"of {', '.join(WORKLOADS)} (default: {' '.join(models)})",
    )
    add_results_option(parser)


def add_results_option(parser: argparse.ArgumentParser) -> None:
    """Adds --results, which every benchmark of the set has."""
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        metavar="FOLDER",
        help="where JSON and PNG go (default: benchmarks/results)",
    )


@dataclass(frozen=True)
class Duration:
    """Seconds for which a benchmark times steps of a model on a backend, after warm-up.

    Attributes:
        usual: without an option.
        full: with --full.
        quick: with --quick.
    """

    usual: float
    full: float
    quick: float = 3.0

    def add_options(self, parser: argparse.ArgumentParser, quick: str, full: str) -> None:
        """Adds --rounds, --seconds, --quick and --full.

        Args:
            parser: gets the options.
            quick: what --quick selects, besides its seconds.
            full: what --full selects, besides its seconds.
        """
        parser.add_argument("--rounds", type=int, help="timed steps of each, in place of --seconds")
        parser.add_argument(
            "--seconds",
            type=float,
            help=f"for a model on a backend, after warm-up (default: {self.usual:g})",
        )
        sweep = parser.add_mutually_exclusive_group()
        for name, what, seconds in (("quick", quick, self.quick), ("full", full, self.full)):
            described = f"{what}, {seconds:g} seconds each"
            sweep.add_argument(f"--{name}", action="store_true", help=described)

    def settle(self, options: argparse.Namespace) -> None:
        """Fills in --seconds.

        Raises:
            UsageError: --seconds or --rounds is out of range.
        """
        if options.seconds is None:
            way = self.quick if options.quick else self.full if options.full else self.usual
            options.seconds = way
        if not 0 < options.seconds < math.inf:
            raise UsageError(f"--seconds must be more than 0, got {options.seconds:g}")
        if options.rounds is not None and options.rounds < 2:
            raise UsageError(f"--rounds must be 2 or more, got {options.rounds}")


def backend_of_job(options: argparse.Namespace) -> str:
    """Returns the backend for which this rank was started.

    Raises:
        UsageError: another launcher started it without a single --backend.
    """
    if len(options.backend) != 1:
        raise UsageError(f"under a launcher --backend takes one, got {' '.join(options.backend)}")
    backend: str = options.backend[0]
    return backend
