"""python -m benchmarks.step_time: times a training step, this library's beside torch's DDP.

Examples:
    python -m benchmarks.step_time                    gloo and mpi, two processes, every model
    python -m benchmarks.step_time --backend gloo --nproc 4 --model mlp
    python -m benchmarks.step_time --quick            two models, for a few seconds each
    python -m benchmarks.step_time --full             1, 2 and 4 processes, four times as long

Prints a table for each backend and model; writes every sample, the versions and the machine as JSON
and draws the medians. In an mpi job torch's DDP runs on mpi and, in the same rounds, on gloo.

"torch DDP" in a ratio is the faster of torch's two settings: its default, and "views", which is
gradient_as_bucket_view=True and broadcast_buffers=False. A ratio is the median of the ratios round
by round, with its 95 % bootstrap interval; "exposed" is the median of the differences to a step
without communication, in which torch's SGD steps (ddp.SGD is faster, so it may be negative).
"""

import argparse
import gc
import sys
from dataclasses import asdict

import torch
import torch.distributed as dist

from benchmarks.harness.contenders import (
    CONTENDERS,
    GLOO_REFERENCES,
    NO_COMMUNICATION,
    REFERENCES,
    WORKLOADS,
    ContenderSpec,
    contenders,
)
from benchmarks.harness.launch import (
    Duration,
    add_common_options,
    backend_of_job,
    check_memory,
    default_ranks,
    start,
)
from benchmarks.harness.report import draw_bars, write
from benchmarks.harness.text_table import text_table
from benchmarks.harness.timing import Interval, Samples, check_equal, interleave, rounds_for
from ddp_from_scratch import UsageError, process_group
from ddp_from_scratch.launch import environment
from ddp_from_scratch.launch.rank_process import run_to_exit

MODELS = ["mlp", "mlp64", "resnet18", "resnet50", "transformer", "layers500"]
if torch.cuda.is_available():
    MODELS.append("gpt2")
DURATION = Duration(usual=15.0, full=60.0)
ALWAYS = (NO_COMMUNICATION, *REFERENCES, *GLOO_REFERENCES)


def main() -> int:
    options = parse(sys.argv[1:])
    if environment.launcher() != "none":
        measure(options)
        return 0
    for backend in options.backend:
        for nproc in options.nproc:
            models = ["--model", *models_that_fit(options, backend, nproc)]
            if code := start("benchmarks.step_time", backend, nproc, *sys.argv[1:], *models):
                return code
    return 0


def models_that_fit(options: argparse.Namespace, backend: str, nproc: int) -> list[str]:
    """The chosen models; a full sweep leaves out those that do not fit, and prints that.

    Raises:
        UsageError: one does not fit into the memory, or none.
    """
    fitting = []
    for model in options.model:
        try:
            check_memory(model, len(specs(backend, options.contender)), nproc)
        except UsageError as error:
            if not options.full or (model == options.model[-1] and not fitting):
                raise
            print(f"left out: {error}", flush=True)
        else:
            fitting.append(model)
    return fitting


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line.

    Raises:
        UsageError: a number is out of its range.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_common_options(parser, MODELS)
    parser.add_argument("--nproc", type=int, nargs="+", help=f"ranks (default: {default_ranks()})")
    parser.add_argument(
        "--contender",
        nargs="+",
        choices=[s.name for s in CONTENDERS if s.name not in ALWAYS],
        metavar="NAME",
        help="only these beside torch's DDP and no communication, by their names in the table",
    )
    DURATION.add_options(parser, quick="mlp and resnet18", full="1, 2 and 4 ranks")
    options = parser.parse_args(arguments)
    if options.quick and options.model == MODELS:
        options.model = ["mlp", "resnet18"]
    options.nproc = options.nproc or ([1, 2, 4] if options.full else [default_ranks()])
    DURATION.settle(options)
    if min(options.nproc) < 1:
        raise UsageError(f"--nproc must be 1 or more, got {min(options.nproc)}")
    return options


def specs(backend: str, chosen: list[str] | None) -> list[ContenderSpec]:
    """Contenders in a job of this backend; where some were chosen, these and references."""
    return [
        s
        for s in CONTENDERS
        if backend in s.backends and (chosen is None or s.name in chosen or s.name in ALWAYS)
    ]


def measure(options: argparse.Namespace) -> None:
    """A rank's part: times every model and, on rank 0, prints, writes and draws."""
    backend = backend_of_job(options)
    # One thread a rank: more would take the other ranks' cores.
    torch.set_num_threads(1)
    panels = {}
    with process_group(backend) as world:
        # In the same job, so that both backends are measured in the same rounds.
        gloo = dist.new_group(backend="gloo") if backend == "mpi" else None
        compared = specs(backend, options.contender)
        for name in options.model:
            workload = WORKLOADS[name]
            torch.manual_seed(world.rank)
            of_model = contenders(workload, world.device, compared, gloo)
            title = f"{workload.name}; {backend}, {world.world_size} ranks"
            rounds = rounds_for(options.seconds, options.rounds, world.device, title)
            samples = interleave(of_model, rounds, world.device)
            # Before anything is printed: times of contenders that computed something else mean
            # nothing.
            check_equal(of_model)
            if world.rank == 0:
                count = len(samples[0].milliseconds)
                print(f"\n{title}, {count} steps each\n{table(samples)}", flush=True)
                settings = {
                    "benchmark": "step_time",
                    "model": name,
                    "backend": backend,
                    "nproc": world.world_size,
                }
                file = f"step_time-{name}-{backend}-{world.world_size}"
                kept = [asdict(s) for s in samples]
                write(file, title, kept, settings=settings, folder=options.results)
                panels[workload.name] = {s.name: s.quartiles for s in samples}
            # Before the next model's are made: hooks make cycles of model and Reducer.
            of_model.clear()
            gc.collect()
        if world.rank == 0:
            draw_bars(
                f"step_time-{backend}-{world.world_size}",
                f"a training step, {backend}, {world.world_size} ranks",
                "ms; the bar ends at the median, the line spans the quartiles",
                panels,
                folder=options.results,
            )


def reference(samples: list[Samples], names: tuple[str, ...] = REFERENCES) -> Samples | None:
    """The fastest of those named, by its median; None where none was measured."""
    named = [s for s in samples if s.name in names]
    # The rival's best setting: a ratio to the slower one would flatter.
    return min(named, key=lambda s: s.quartiles[1], default=None)


def table(samples: list[Samples]) -> str:
    """Median, quartiles, and ratios to torch's DDP (its faster setting) and no communication."""
    torch_ddp = reference(samples)
    on_gloo = reference(samples, GLOO_REFERENCES)
    alone = reference(samples, (NO_COMMUNICATION,))
    compared = {"/ torch DDP": torch_ddp, "/ it on gloo": on_gloo, "/ no comm.": alone}
    ratios = {header: other for header, other in compared.items() if other is not None}
    rows = []
    for s in samples:
        low, median, high = s.quartiles
        row = [s.name, f"{median:.1f}", f"{low:.1f} to {high:.1f}"]
        for other in ratios.values():
            row.append("1" if other is s else _with_interval(s.ratio_to(other)))
        if alone is not None:
            row.append(f"{s.minus(alone)[0]:.1f}")
        if s.cpu_milliseconds:
            row.append(f"{sorted(s.cpu_milliseconds)[len(s.cpu_milliseconds) // 2]:.1f}")
        rows.append(row)
    headers = ["", "ms", "quartiles", *ratios, *["exposed ms"] * (alone is not None)]
    headers += ["CPU ms"] * (len(rows[0]) - len(headers))
    return text_table(headers, rows)


def _with_interval(ratio: Interval) -> str:
    middle, low, high = ratio
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    run_to_exit(main)
