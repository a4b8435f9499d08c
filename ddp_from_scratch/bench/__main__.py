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

Run nothing else meanwhile. Otherwise the table says so, and gives no verdict.
"""

import argparse
import importlib.util
import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from ddp_from_scratch.bench import layouts, what_if
from ddp_from_scratch.bench.contenders import CONTENDERS, OPTIMIZERS
from ddp_from_scratch.bench.results import Run, Samples, compact_json, kind, save, table, verdict
from ddp_from_scratch.bench.timing import WAYS, BenchmarkJob, Content, default_ranks, measure, show
from ddp_from_scratch.bench.workloads import WORKLOADS, workload
from ddp_from_scratch.common.errors import UsageError, one_line
from ddp_from_scratch.launch import environment
from ddp_from_scratch.launch.rank_process import run_to_exit

Draw = Callable[[BenchmarkJob, Run, Path], None]


def main(
    arguments: list[str],
    program: str = "python -m ddp_from_scratch.bench",
    results: Path | None = None,
    draw: Draw | None = None,
) -> int:
    """Runs the program, named `program` in --help. `draw` draws a job, run in its first way."""
    options = parse(arguments, program, results)
    if options.job is not None:
        content = measure(BenchmarkJob(**json.loads(options.job.read_text())))
        if content is not None:
            options.into.write_text(compact_json(content))
        return 0
    if environment.launcher() != "none":
        return _under_launcher(options)
    for name in options.model:
        workload(name).check()  # reports a mistake before the first job runs
    if options.layouts:
        return _compare_layouts(options)
    if options.what_if is not None:
        return _write_what_if(options)
    for nproc, name in product(options.nproc, options.model):
        job = _job(options, name, nproc)
        ways = [replace(job, way=way) for way in options.way]
        runs = [report(own, WAYS[own.way][0](own), options.results) for own in ways]
        if draw is not None:
            draw(job, runs[0], options.results)
    return 0


def parse(arguments: list[str], program: str, results: Path | None = None) -> argparse.Namespace:
    """Parses the command line. Raises a UsageError for wrong values."""
    parser = argparse.ArgumentParser(
        prog=program,
        description=(__doc__ or "").format(program=program),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, ranks, backends = parser.add_argument, default_ranks(), _default_backends()
    names = [spec.name for spec in CONTENDERS[1:]]
    models = f"{', '.join(WORKLOADS)}, any classifier of torchvision, or FILE.py:FUNCTION"
    add("--model", nargs="+", default=["mlp"], metavar="M", help=f"{models} (default: mlp)")
    text = f"backends in one table (default here: {' '.join(backends)})"
    add("--backend", nargs="+", choices=("gloo", "mpi", "nccl"), default=backends, help=text)
    text = f"ranks (default: {ranks})"
    add("--nproc", type=int, nargs="+", metavar="N", help=text)
    add("--threads", type=int, metavar="N", help="threads of a rank (default: 1)")
    add("--layouts", action="store_true", help="compare ranks x threads on all cores")
    text = "write a page that asks what a step would cost with other settings"
    add("--what-if", type=Path, metavar="FILE", help=text)
    add("--optimizer", choices=OPTIMIZERS, default="sgd", help="default: sgd")
    text = "how contenders run (default: interleaved)"
    add("--way", nargs="+", choices=WAYS, default=["interleaved"], help=text)
    text = "contenders besides torch's DDP on gloo and no communication (default: all), of: "
    text += "; ".join(names)
    add("--contender", nargs="+", choices=names, metavar="NAME", help=text)
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
    options.nproc = options.nproc or [ranks]
    options.threads = 1 if options.threads is None else options.threads
    if not 0 < options.seconds < math.inf:
        raise UsageError(f"--seconds must be more than 0, got {options.seconds:g}")
    if options.rounds is not None and options.rounds < 2:
        raise UsageError(f"--rounds must be 2 or more, got {options.rounds}")
    for option, least in {"--nproc": min(options.nproc), "--threads": options.threads}.items():
        if least < 1:
            raise UsageError(f"{option} must be 1 or more, got {least}")
    if "nccl" in options.backend and len(set(options.backend)) > 1:
        raise UsageError(f"--backend nccl has a table of its own, got {' '.join(options.backend)}")
    return options


def _check_layouts(options: argparse.Namespace) -> None:
    if not options.layouts:
        return
    for name in ("nproc", "threads"):
        if getattr(options, name) is not None:
            raise UsageError(f"--layouts chooses --{name}: leave it out")
    if "nccl" in options.backend or len(options.way) > 1:
        raise UsageError("--layouts is for gloo and mpi, in one --way")
    if options.contender and "ours" not in map(kind, options.contender):
        raise UsageError(
            f"--layouts compares torch's DDP with this library: add one of its contenders, as "
            f"{layouts.COMPARED[-1]!r}, got --contender {' '.join(map(repr, options.contender))}"
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


def _default_backends() -> list[str]:
    from ddp_from_scratch.common import gpu

    if gpu.count():
        return ["nccl"]
    mpirun = shutil.which("mpirun") or (Path(sys.executable).parent / "mpirun").exists()
    return ["gloo", "mpi"] if mpirun and importlib.util.find_spec("mpi4py") else ["gloo"]


def _job(options: argparse.Namespace, model: str, nproc: int) -> BenchmarkJob:
    backends, chosen = list(dict.fromkeys(options.backend)), options.contender
    shows = sys.stderr.isatty()
    return BenchmarkJob(
        *(model, backends, nproc, options.optimizer, chosen, options.seconds, options.rounds),
        threads=options.threads,
        shows=shows,
    )


def _compare_layouts(options: argparse.Namespace) -> int:
    for name in options.model:
        job = replace(_job(options, name, 1), way=options.way[0])
        job = replace(job, chosen=options.contender or layouts.COMPARED)
        print(f"\n{layouts.compare(job, WAYS[job.way][0], options.results)}", flush=True)
    return 0


def _write_what_if(options: argparse.Namespace) -> int:
    device = torch.device("cuda" if options.backend == ["nccl"] else "cpu")
    optimizers, steps = OPTIMIZERS[options.optimizer], options.rounds or 10
    models, shows = [], sys.stderr.isatty()
    for name in options.model:
        if shows:
            show(f"recording {name}")
        models.append(what_if.record(workload(name), device, optimizers, steps, options.threads))
    if shows:
        show("")
    try:
        options.what_if.write_text(what_if.as_html(models), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {options.what_if}: {one_line(error)}") from error
    print(f"{options.what_if}: open it in a browser", flush=True)
    return 0


def report(job: BenchmarkJob, content: Content, results: Path | None) -> Run:
    """Prints the results of a job, and writes them to the folder `results` if there is one."""
    samples = [Samples(**sample) for sample in content["samples"]]
    run = Run(samples, job.way != "alone", content.get("disturbed"))
    counts = sorted({len(s.milliseconds) for s in samples})
    steps = f"{counts[0]} steps" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} steps"
    print(f"\n{content['title']}; {WAYS[job.way][1]}, {steps} each\n{table(run)}")
    print(verdict(run), flush=True)
    if results is not None:
        save(job.file_name, content, results)
    return run


def _under_launcher(options: argparse.Namespace) -> int:
    """Runs this rank's part of one table, under torchrun, srun or mpirun."""
    if options.layouts or options.what_if is not None:
        name = "layouts" if options.layouts else "what-if"
        raise UsageError(f"--{name} starts what it measures itself: leave the launcher out")
    if len(options.model) > 1 or options.way != ["interleaved"] or len(options.backend) > 1:
        raise UsageError("under a launcher give one --model, one --backend and no --way")
    job = _job(options, options.model[0], environment.started() or 1)
    content = measure(job)
    if content is not None:
        # Through JSON, like the results that ranks pass to their parent.
        report(job, json.loads(compact_json(content)), options.results)
    return 0


if __name__ == "__main__":
    run_to_exit(lambda: main(sys.argv[1:]))
