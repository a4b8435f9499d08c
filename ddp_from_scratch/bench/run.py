"""Runs what the command line asks for: tables, layouts, or a page about other settings."""

import argparse
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from ddp_from_scratch.bench import layouts, what_if
from ddp_from_scratch.bench.contenders import CONTENDERS, OPTIMIZERS
from ddp_from_scratch.bench.results import Run, Samples, compact_json, save, table, verdict
from ddp_from_scratch.bench.timing import WAYS, BenchmarkJob, Content, default_ranks, measure, show
from ddp_from_scratch.bench.workloads import workload
from ddp_from_scratch.common import gpu
from ddp_from_scratch.common.errors import UsageError, one_line
from ddp_from_scratch.launch import environment

Draw = Callable[[BenchmarkJob, Run, Path], None]


def run(options: argparse.Namespace, draw: Draw | None = None) -> int:
    """Runs the program with parsed options. `draw` draws a job, run in its first way."""
    if options.job is not None:
        content = measure(BenchmarkJob(**json.loads(options.job.read_text())))
        if content is not None:
            options.into.write_text(compact_json(content))
        return 0
    _complete(options)
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


def _complete(options: argparse.Namespace) -> None:
    """Fills in defaults that depend on the machine, and checks what depends on torch."""
    options.nproc = options.nproc or [default_ranks()]
    options.backend = options.backend or _default_backends(options.layouts)
    there = {spec.name for spec in CONTENDERS}
    for name in options.contender or ():
        if name not in there:
            raise UsageError(f"--contender {name!r} needs a newer torch than {torch.__version__}")


def _default_backends(on_cpu: bool) -> list[str]:
    if gpu.count() and not on_cpu:
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
        print()
        for line in layouts.compare(job, WAYS[job.way][0], options.results):
            print(line, flush=True)
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
