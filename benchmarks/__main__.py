"""python -m benchmarks: runs the benchmarks one after another, and prints a summary.

Examples:
    python -m benchmarks                  the whole set (make bench)
    python -m benchmarks --quick          two models, 3 seconds each; the numbers are rough
    python -m benchmarks --full           every model, backend and number of ranks, a minute each
    python -m benchmarks overlap memory   only these

two_hosts needs root, `ip` and `tc`; it does not run without these, nor with --quick. allreduce and
scaling run with --full only.

benchmarks/README.md explains what each benchmark measures and how to read it. Run nothing else at
the same time.

Exit code: 0, or that of the first benchmark that failed (the rest still run); 130 after Ctrl-C, 143
after SIGTERM.
"""

import argparse
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch

from benchmarks.harness import network
from benchmarks.harness.report import make_parser
from benchmarks.summary import summarise
from ddp_from_scratch import UsageError
from ddp_from_scratch.bench.contenders import NO_COMMUNICATION, TORCH
from ddp_from_scratch.bench.results import describe
from ddp_from_scratch.bench.timing import default_ranks
from ddp_from_scratch.launch.rank_process import run_to_exit

STOPPED = (130, 143)
_PATIENCE_S = 15.0  # for a benchmark to end after Ctrl-C


def needs_mpirun() -> str | None:
    found = shutil.which("mpirun") or (Path(sys.executable).parent / "mpirun").exists()
    return None if found else "there is no mpirun"


def needs_two_ranks() -> str | None:
    return "there is one GPU" if default_ranks() < 2 else None


def needs_two_hosts() -> str | None:
    return needs_mpirun() or network.missing("tc", "unshare")


@dataclass(frozen=True)
class Benchmark:
    """One command of the set."""

    name: str  # of the module in benchmarks/
    # Without an option, with --quick, and with --full; None leaves it out.
    arguments: tuple[str, ...] | None = ()
    quick: tuple[str, ...] | None = ("--quick",)
    full: tuple[str, ...] | None = ("--full",)
    # Returns the reason why it cannot run here, or None.
    obstacle: Callable[[], str | None] = lambda: None


_ALL_MODELS = ("mlp", "mlp64", "small", "resnet18", "resnet50", "transformer", "layers500")
_GPU_MODELS = ("gpt2",) if torch.cuda.is_available() else ()
# The most different ones: much communication, more computation, many layers, many small layers.
_MODELS = ("mlp64", "small", "resnet18", "transformer", "layers500", *_GPU_MODELS)
# Without settings that are rarely the fastest, since each takes seconds to start alone.
_OURS = ("Reducer, views", "ddp.SGD", "ddp.SGD, fuse_wgrad")
_SHARDED = tuple(f"ddp.SGD, shard={how}" for how in ("world", "node", "node, fuse_wgrad"))
_FEW = ("--contender", "torch DDP, views", *_OURS, *_SHARDED)
_ADAMW = (NO_COMMUNICATION, *_FEW[1:2], f"{TORCH}, ZeroRedundancyOptimizer", *_SHARDED[:2])
_WAYS = ("--way", "interleaved", "kept", "alone")
_QUICK = ("--seconds", "3")
_FULL = ("--seconds", "60")

# One rank on each host, since two on each would overload a small machine.
_TWO_HOSTS = ("--backend", "gloo", "--ranks", "2")

SET = [
    Benchmark(
        "step_time",
        ("--model", "mlp", *_WAYS, *_FEW, "--seconds", "20"),
        ("--model", "mlp", "resnet18", *_QUICK),
        ("--model", *_ALL_MODELS, *_GPU_MODELS, *_WAYS, *_FULL),
    ),
    Benchmark("step_time", ("--model", *_MODELS, "--seconds", "20"), None, None),
    # Saturated cores: twice as many ranks as a machine with 2 cores has.
    Benchmark(
        "step_time",
        ("--model", "mlp", "--nproc", "4", *_FEW, "--seconds", "20"),
        None,
        ("--model", "mlp", "resnet18", "--nproc", "4", *_FULL),
        needs_two_ranks,
    ),
    Benchmark(
        "step_time",
        ("--model", "mlp", "--optimizer", "adamw", "--seconds", "20"),
        None,
        ("--model", "mlp", "transformer", "--optimizer", "adamw", *_FULL),
    ),
    Benchmark("overlap", ("--model", "mlp"), obstacle=needs_two_ranks),
    Benchmark("ladder", (), None, (), obstacle=needs_two_ranks),
    Benchmark("beside", (), None, (), obstacle=needs_two_ranks),
    Benchmark("memory", ("--model", "mlp", "--contender", NO_COMMUNICATION, *_FEW[1:])),
    Benchmark(
        "memory",
        ("--model", "mlp", "--optimizer", "adamw", "--backend", "gloo", "--contender", *_ADAMW),
        None,
        None,
    ),
    Benchmark("two_hosts", _TWO_HOSTS, quick=None, obstacle=needs_two_hosts),
    Benchmark("allreduce", None, None, ("--nproc", "2", "4"), needs_mpirun),
    Benchmark("scaling", None, None, (), needs_mpirun),
]


def main() -> int:
    options = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, _stop)  # its default would leave the ranks behind
    size = "quick" if options.quick else "full" if options.full else "arguments"
    chosen = [b for b in SET if b.name in options.name and getattr(b, size) is not None]
    if not chosen:
        which = "with --quick" if options.quick else "without --full"
        raise UsageError(f"{which} the set has no {' and no '.join(options.name)}")
    began, lines, first_failure = time.time(), [], 0
    for number, benchmark in enumerate(chosen, 1):
        command = ["-m", f"benchmarks.{benchmark.name}", *getattr(benchmark, size)]
        command += ["--results", str(options.results)]
        label = f"{number} of {len(chosen)}: python {' '.join(command)}"
        print(f"\n== {label}", flush=True)
        reason = benchmark.obstacle()
        if reason is not None:
            lines.append(f"left out, {reason}: {label}")
            continue
        own_began = time.monotonic()
        code = run([sys.executable, *command])
        took = f"{time.monotonic() - own_began:.0f} s"
        lines.append(f"{'done' if code == 0 else f'FAILED with exit code {code}'}, {took}: {label}")
        # The other benchmarks still run.
        first_failure = first_failure or code
        if code in STOPPED:
            break
    report(lines, options.results, began)
    return first_failure


def parse(arguments: list[str]) -> argparse.Namespace:
    names = list(dict.fromkeys(benchmark.name for benchmark in SET))
    parser = make_parser("benchmarks", __doc__)
    parser.add_argument(
        "name", nargs="*", default=names, help=f"of {', '.join(names)} (default: all)"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="rough numbers, quickly")
    size.add_argument("--full", action="store_true", help="the whole sweep")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.name if name not in names]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}: choose from {', '.join(names)}")
    return options


def run(command: list[str]) -> int:
    """Runs a benchmark on this terminal and returns its exit code.

    If this process is stopped, the benchmark ends first.
    """
    child = subprocess.Popen(command)
    try:
        code = child.wait()
    except KeyboardInterrupt:
        # Ctrl-C has reached the child as well; a second signal would interrupt its cleanup.
        with suppress(subprocess.TimeoutExpired):
            child.wait(_PATIENCE_S)
        raise
    finally:
        if child.poll() is None:
            # Not `kill`: the child must end its ranks, and maybe remove hosts.
            child.terminate()
            child.wait()
    return 128 - code if code < 0 else code  # as a shell counts signals


def report(lines: list[str], results: Path, began: float) -> None:
    machine = describe()
    commit = f"{machine['commit']}{' with changes' if machine['uncommitted_changes'] else ''}"
    print(f"\n== summary: {machine['processor']}, {machine['cores']} cores, commit {commit}")
    print(summarise(results, began))
    print("\n" + "\n".join(lines), flush=True)


def _stop(number: int, _frame: FrameType | None) -> NoReturn:
    """Unwinds on SIGTERM, so `run` ends the benchmark and its ranks."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    run_to_exit(main)
