"""Times training steps with this library and with torch's DistributedDataParallel.

Examples:
    {program}                                  an MLP, 2 ranks
    {program} --model resnet50 --optimizer adamw --nproc 4
    {program} --model my_file.py:make --backend gloo mpi
    {program} --model my_file.py:make --layouts       how many ranks to start
    {program} --model my_file.py:make --what-if step.html    a page about other settings

Your own model is a function in a file that returns a module, a batch and, optionally, a loss:

    from torch.nn.functional import cross_entropy

    def make():
        model = torch.nn.Linear(1000, 10)
        batch = torch.randn(32, 1000), torch.randint(10, (32,))
        return model, batch, lambda model, batch: cross_entropy(model(batch[0]), batch[1])

The default loss is the one shown. Every rank gets the same model and its own batch.

How to read the table:

    no communication   each rank trains by itself, so a step is only computation
    torch DDP          torch's class in several settings; ratios are to the fastest on gloo (nccl)
    Reducer            this library's hooks, with torch's optimizer
    ddp.SGD            this library's optimizer, on the Reducer's flat buckets
    shard=world        each rank updates its share of the parameters, and keeps that share's state
    shard=node         the same, with one copy of parameters and state per machine
    fuse_wgrad         gradients of linear layers are computed in their buckets
    on gloo, mpi, node the process group's backend; node is shared memory beside gloo

    ms, quartiles      the median step of the slowest rank, and its quartiles
    / torch DDP        the median of the ratios in each round, with its 95% interval
    / no comm.         the same; an optimizer that does less work may bring it below 1
    CPU ms             the CPU time of all threads of a rank

torch's optimizers use fused=True, their fastest form. Contenders take turns in the same processes.
--way has two alternatives: with "kept", glibc also keeps freed memory; with "alone", each contender
gets its own processes, and a model pays for new memory from the system in each step.

--layouts times the ways to divide this machine's cores among ranks, such as 1 x 4, 2 x 2 and 4 x 1
(ranks x threads), with torch's DDP and this library, in samples per second. The machine's batch is
the same in all: one of the model's batches for each core, joined along their first dimension.

--what-if trains one rank for a few steps (--rounds, or 10) without communication, records when each
gradient is ready (with --backend nccl on the GPU), and writes one page that works offline. In it
you choose bucket cap, ranks, wire and cores, guess what a step costs, and see what a model of the
step says, and the memory of a rank.

Run nothing else at the same time. Otherwise the table says so, and gives no verdict.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_from_scratch.bench.names import CONTENDERS, MODELS, OPTIMIZERS, WAYS
from ddp_from_scratch.common.errors import UsageError
from ddp_from_scratch.launch.rank_process import run_to_exit

if TYPE_CHECKING:
    from ddp_from_scratch.bench.run import Draw


def main(
    arguments: list[str],
    program: str = "python -m ddp_from_scratch.bench",
    results: Path | None = None,
    draw: "Draw | None" = None,
) -> int:
    """Runs the program, named `program` in --help. `draw` draws a job, run in its first way."""
    options = parse(arguments, program, results)
    from ddp_from_scratch.bench.run import run  # only now, since it imports torch

    return run(options, draw)


def parse(arguments: list[str], program: str, results: Path | None = None) -> argparse.Namespace:
    """Parses the command line. Raises a UsageError for wrong values."""
    parser = argparse.ArgumentParser(
        prog=program,
        description=(__doc__ or "").format(program=program),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    models = f"{', '.join(MODELS)}, any classifier of torchvision, or FILE.py:FUNCTION"
    add("--model", nargs="+", default=["mlp"], metavar="M", help=f"{models} (default: mlp)")
    text = "backends in one table (default: nccl with a GPU; without one gloo, and mpi if mpirun "
    text += "and mpi4py are installed)"
    add("--backend", nargs="+", choices=("gloo", "mpi", "nccl"), help=text)
    text = "ranks (default: 2, or 1 with a single GPU)"
    add("--nproc", type=int, nargs="+", metavar="N", help=text)
    add("--threads", type=int, metavar="N", help="threads of a rank (default: 1)")
    add("--layouts", action="store_true", help="compare ranks x threads on all cores")
    text = "write a page that computes what a step would cost with other settings"
    add("--what-if", type=Path, metavar="FILE", help=text)
    add("--optimizer", choices=OPTIMIZERS, default="sgd", help="default: sgd")
    text = "how contenders run (default: interleaved)"
    add("--way", nargs="+", choices=WAYS, default=["interleaved"], help=text)
    text = "contenders besides torch's DDP on gloo and no communication (default: all), of: "
    text += "; ".join(CONTENDERS)
    add("--contender", nargs="+", choices=CONTENDERS, metavar="NAME", help=text)
    text = 'seconds of steps for each table, after warm-up; "alone" takes at least 2 for each row '
    add("--seconds", type=float, default=15.0, metavar="S", help=text + "(default: 15)")
    add("--rounds", type=int, metavar="N", help="steps of each contender, instead of --seconds")
    text = f"folder for JSON results (default: {'none' if results is None else results})"
    add("--results", type=Path, default=results, metavar="FOLDER", help=text)
    add("--job", type=Path, help=argparse.SUPPRESS)  # of a rank: a file
    add("--into", type=Path, help=argparse.SUPPRESS)  # where rank 0 puts its part
    options = parser.parse_args(arguments)
    _check_layouts(options)
    _check_what_if(options, parser)
    options.threads = 1 if options.threads is None else options.threads
    if not 0 < options.seconds < math.inf:
        raise UsageError(f"--seconds must be more than 0, got {options.seconds:g}")
    if options.rounds is not None and options.rounds < 2:
        raise UsageError(f"--rounds must be 2 or more, got {options.rounds}")
    least_ranks = min(options.nproc or [1])
    for option, least in {"--nproc": least_ranks, "--threads": options.threads}.items():
        if least < 1:
            raise UsageError(f"{option} must be 1 or more, got {least}")
    backends = set(options.backend or ())
    if "nccl" in backends and len(backends) > 1:
        raise UsageError(f"--backend nccl has a table of its own, got {' '.join(options.backend)}")
    return options


def _check_layouts(options: argparse.Namespace) -> None:
    if not options.layouts:
        return
    for name in ("nproc", "threads"):
        if getattr(options, name) is not None:
            raise UsageError(f"--layouts chooses --{name}: leave it out")
    if "nccl" in (options.backend or ()) or len(options.way) > 1:
        raise UsageError("--layouts is for gloo and mpi, in one --way")
    if options.contender and all(name.startswith("torch") for name in options.contender):
        raise UsageError(
            f"--layouts compares torch's DDP with this library: add one of its contenders, as "
            f"'ddp.SGD', got --contender {' '.join(map(repr, options.contender))}"
        )


def _check_what_if(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if options.what_if is None:
        return
    for name in ("layouts", "nproc", "contender", "way", "seconds", "results"):
        if getattr(options, name) != parser.get_default(name):
            raise UsageError(
                f"--what-if records one rank without communication: leave --{name} out"
            )
    if not options.what_if.parent.is_dir() or options.what_if.is_dir():
        raise UsageError(f"--what-if must name a file in an existing folder, got {options.what_if}")


if __name__ == "__main__":
    run_to_exit(lambda: main(sys.argv[1:]))
