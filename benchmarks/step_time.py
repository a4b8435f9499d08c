"""python -m benchmarks.step_time: runs `python -m ddp_from_scratch.bench`, and draws the results.

It takes the options of that program, which is part of the installed package. It writes every sample
and draws the medians, to benchmarks/results unless --results names another folder.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.harness.report import RESULTS, Bar, draw_bars
from ddp_from_scratch.bench.__main__ import described, main
from ddp_from_scratch.bench.contenders import OPTIMIZERS
from ddp_from_scratch.bench.results import Run, kind
from ddp_from_scratch.bench.timing import Job
from ddp_from_scratch.bench.workloads import workload
from ddp_from_scratch.launch.rank_process import run_to_exit

PROGRAM = "python -m benchmarks.step_time"


def draw(job: Job, runs: Mapping[str, Run], folder: Path) -> None:
    draw_bars(
        job.file_name,
        f"a training step: {workload(job.model).name}; {job.nproc} ranks",
        f"ms per step, fused {OPTIMIZERS[job.optimizer].name}; a bar ends at the median, its line "
        f"spans the quartiles,\nthe number is the ratio to the fastest torch DDP on gloo (nccl)",
        {f"{described(way, run)}{_warning(run)}": bars(run) for way, run in runs.items()},
        folder,
    )


def bars(run: Run) -> list[Bar]:
    found = []
    for s in run.samples:
        ratio = run.ratio(s, run.torch_ddp)
        label = "" if ratio is None else f"{ratio[0]:.2f}"
        found.append(Bar(s.name, s.quartiles, kind(s.name), label))
    return found


def _warning(run: Run) -> str:
    return "" if run.disturbed is None else "; NOT A QUIET MACHINE"


if __name__ == "__main__":
    run_to_exit(lambda: main(sys.argv[1:], PROGRAM, RESULTS, draw))
