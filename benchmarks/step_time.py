"""python -m benchmarks.step_time: runs `python -m ddp_from_scratch.bench`, and draws the results.

It takes the options of that program, which is part of the installed package. It writes every sample
to benchmarks/results unless --results names another folder, and beside them a picture of the
contenders that a reader chooses from, as multiples of torch's DDP. The tables have the others.

    python -m benchmarks.step_time --draw FILE.json ...    draws such files again, and times nothing
"""

import json
import re
import sys
from pathlib import Path

from benchmarks.harness.report import RESULTS, Bar, draw_bars
from ddp_from_scratch import UsageError
from ddp_from_scratch.bench.__main__ import main
from ddp_from_scratch.bench.results import Run, Samples, kind
from ddp_from_scratch.bench.timing import BenchmarkJob
from ddp_from_scratch.bench.workloads import workload
from ddp_from_scratch.launch.rank_process import run_to_exit

PROGRAM = "python -m benchmarks.step_time"
# Without the optimizer's name and the backend; on mpi the same would be drawn twice.
DRAWN = ("Reducer, views", "", ", shard=world", ", shard=node", ", shard=node, fuse_wgrad")
_DRAWN_NAME = re.compile(r"(?:ddp\.\w+)?(.*?) on (?:gloo|nccl)(.*)")


def draw(job: BenchmarkJob, run: Run, folder: Path) -> None:
    draw_run(job.file_name, job.model, job.nproc, run, folder)


def draw_file(path: Path) -> None:
    """Draws a file that this program wrote."""
    content = json.loads(path.read_text()) if path.suffix == ".json" and path.is_file() else {}
    if content.get("settings", {}).get("benchmark") != "step_time":
        raise UsageError(f"--draw needs a JSON file that this program has written, got {path}")
    samples = [Samples(**sample) for sample in content["samples"]]
    run = Run(samples, content["settings"]["way"] != "alone", content.get("disturbed"))
    settings = content["settings"]
    draw_run(path.stem, settings["model"], settings["nproc"], run, path.parent)


def draw_run(name: str, model: str, nproc: int, run: Run, folder: Path) -> None:
    title = f"{workload(model).name}; {nproc} ranks"
    warning = "" if run.disturbed is None else "; NOT A QUIET MACHINE"
    draw_bars(
        name,
        f"a training step: {title}{warning}",
        "time of a step / that of torch's DDP at its fastest setting; shorter is faster\n"
        "the line of a bar is the 95 % interval",
        {"": bars(run)},
        folder,
        unit=1.0,
    )


def bars(run: Run) -> list[Bar]:
    """Returns torch's DDP at its fastest, and this library's rows of `DRAWN` on gloo or nccl."""
    found = []
    for s in run.samples:
        parts = _DRAWN_NAME.fullmatch(s.name)
        ours = kind(s.name) == "ours" and parts is not None and "".join(parts.groups()) in DRAWN
        ratio = run.ratio(s, run.torch_ddp)
        if ratio is not None and (ours or s is run.torch_ddp):
            middle, low, high = ratio
            name = re.sub(" on (gloo|nccl)", "", s.name)
            found.append(Bar(name, (low, middle, high), kind(s.name), f"{middle:.2f}"))
    return found


def start(arguments: list[str]) -> int:
    if arguments[:1] == ["--draw"]:
        for name in arguments[1:]:
            draw_file(Path(name))
        return 0
    return main(arguments, PROGRAM, RESULTS, draw)


if __name__ == "__main__":
    run_to_exit(lambda: start(sys.argv[1:]))
