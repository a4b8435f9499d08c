"""python -m benchmarks.machine: measures a machine in a few minutes, and writes one page about it.

Examples:
    python -m benchmarks.machine                  6 minutes
    python -m benchmarks.machine --minutes 20     the same with more steps of each

What the machine is; how many ranks with how many threads train fastest, for three models; what a
Reducer's Python costs; an all-reduce by size and number of ranks. With a GPU also the GPU tests and
a training step on nccl. The folder gets a page of tables (Markdown) and all samples (JSON), both
named after the machine.

It finishes on time: each part is a process, gets a share of the remaining time, and is stopped when
that is used up. The page says which parts were done. Run nothing else at the same time.
"""

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.__main__ import needs_mpirun
from benchmarks.harness.report import make_parser
from ddp_from_scratch import UsageError
from ddp_from_scratch.bench.layouts import layouts_of
from ddp_from_scratch.bench.results import compact_json, describe
from ddp_from_scratch.launch.cores import own_cpus, read
from ddp_from_scratch.launch.rank_process import run_to_exit

ROOT = Path(__file__).parents[1]
_GRACE_S = 5.0  # for a part that is cut off to end its ranks
_START_S = 15.0  # to import torch, to start ranks and to warm up, for each table
_MARGIN = 0.7  # of the time that is left: the last step of each table, and slow machines


@dataclass(frozen=True)
class Part:
    """A command of the page; its options depend on the seconds that it has."""

    title: str
    weight: float  # its share of the time, beside those of the parts after it
    arguments: Callable[[float], Sequence[str]]  # for `python`
    obstacle: str | None = None  # why it cannot run here


@dataclass(frozen=True)
class Outcome:
    """What became of a part."""

    title: str
    state: str
    seconds: float = 0.0
    command: str = ""
    output: str = ""


def main() -> int:
    options = parse(sys.argv[1:])
    end = time.monotonic() + 60 * options.minutes
    outcomes, samples = [], {}
    with tempfile.TemporaryDirectory(prefix="machine-") as folder:
        waiting = parts()
        while waiting:
            part, *rest = waiting
            remaining = end - time.monotonic()
            weights = [p.weight for p in waiting if p.obstacle is None]
            share = remaining * part.weight / (sum(weights) or 1.0)
            print(f"== {part.title}", flush=True)
            outcomes.append(run(part, share, Path(folder)))
            print(f"{outcomes[-1].state}, {outcomes[-1].seconds:.0f} s", flush=True)
            waiting = rest
        for path in sorted(Path(folder).glob("*.json")):
            samples[path.stem] = json.loads(path.read_text())["samples"]
    machine = describe() | cores_here()
    options.results.mkdir(parents=True, exist_ok=True)
    name = options.results / file_name(machine)
    content = {"machine": machine, "parts": [vars(o) for o in outcomes], "samples": samples}
    name.with_suffix(".json").write_text(compact_json(content) + "\n")
    name.with_suffix(".md").write_text(page(machine, outcomes))
    print(f"written to {os.path.relpath(name)}.md and .json", flush=True)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("benchmarks.machine", __doc__)
    parser.add_argument("--minutes", type=float, default=6.0, metavar="M", help="default: 6")
    options = parser.parse_args(arguments)
    if not 0 < options.minutes < math.inf:
        raise UsageError(f"--minutes must be more than 0, got {options.minutes:g}")
    return options


def parts() -> list[Part]:
    cores = read(own_cpus()).most_threads
    layouts = len(layouts_of(cores))
    found = [_layouts(model, layouts) for model in ("mlp", "resnet18", "transformer")]
    found.append(Part("what a Reducer's Python costs", 1.0, _host_time))
    ranks = [str(2**k) for k in range(1, 8) if 2**k <= max(2, cores)]
    found.append(
        Part(
            "an all-reduce by size and ranks",
            0.5 * len(ranks),
            lambda _: ("-m", "benchmarks.allreduce", "--quick", "--nproc", *ranks),
            needs_mpirun(),
        )
    )
    no_gpu = None if torch.cuda.is_available() else "there is no GPU"
    tests = ("-m", "pytest", "-q", "-m", "gpu", str(ROOT / "tests" / "gpu"))
    found.append(Part("the GPU tests", 2.0, lambda _: tests, no_gpu))
    for model in ("mlp", "transformer", "resnet50", "gpt2"):
        found.append(Part(f"a step of {model} on nccl", 1.0, _on_nccl(model), no_gpu))
    return found


def _layouts(model: str, count: int) -> Part:
    def arguments(share: float) -> Sequence[str]:
        return (
            *("-m", "ddp_from_scratch.bench", "--layouts", "--backend", "gloo"),
            *("--model", model, "--seconds", _seconds(share, count)),
        )

    return Part(f"ranks x threads, {model}", 0.7 * count, arguments)


def _host_time(share: float) -> Sequence[str]:
    return "-m", "benchmarks.host_time", "--seconds", _seconds(share - _START_S, 14, start=0.0)


def _on_nccl(model: str) -> Callable[[float], Sequence[str]]:
    step_time = ("-m", "ddp_from_scratch.bench", "--backend", "nccl", "--model", model)
    return lambda share: (*step_time, "--seconds", _seconds(share, 1))


def _seconds(share: float, tables: int, start: float = _START_S) -> str:
    """Returns the --seconds of each table of a part."""
    return f"{max(0.2, _MARGIN * (share / tables - start)):.1f}"


def run(part: Part, seconds: float, folder: Path) -> Outcome:
    """Runs a part for at most these seconds."""
    if part.obstacle is not None:
        return Outcome(part.title, f"left out: {part.obstacle}")
    arguments = [*part.arguments(seconds)]
    if "pytest" not in arguments:
        arguments += ["--results", str(folder)]
    command = f"python {' '.join(arguments)}".replace(str(folder), "FOLDER")
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = child.wait(max(seconds - _GRACE_S, seconds / 2))
            state = "done" if code == 0 else f"FAILED with exit code {code}"
        except subprocess.TimeoutExpired:
            state = f"cut off after {time.monotonic() - began:.0f} s"
        finally:
            _end(child)
        output.seek(0)
        text = output.read()
    took = time.monotonic() - began
    return Outcome(part.title, state, round(took, 1), command, _without_notes(text))


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Ends a part and its ranks. Idempotent."""
    if child.poll() is None:
        child.terminate()  # it ends its ranks
        with suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _without_notes(text: str) -> str:
    lines = text.splitlines()
    return "\n".join(line for line in lines if not re.match("written to|drawn to|starting: ", line))


# The page -----------------------------------------------------------------------------------------


def cores_here() -> dict[str, Any]:
    """Returns the cores that this job may use, and where they are."""
    found = read(own_cpus())
    return {
        "physical_cores": len(found.cores),
        "sockets": len({core.socket for core in found.cores}),
        "numa_nodes": len({core.node for core in found.cores}),
        "cpus_of_a_core": found.cpus_of_core,
        "quota": None if found.quota == math.inf else found.quota,
        "gpus": torch.cuda.device_count(),
        "mpirun": needs_mpirun() is None,
    }


def file_name(machine: dict[str, Any]) -> str:
    """Names the files of a machine: machine-amd-epyc-2-cores."""
    what = f"{machine['processor']} {machine['physical_cores']} cores {machine['gpu'] or ''}"
    return "-".join(["machine", *re.findall(r"[a-z0-9]+", what.lower())])


def page(machine: dict[str, Any], outcomes: Sequence[Outcome]) -> str:
    """Returns the page, in Markdown."""
    title = f"# {machine['processor']}, {machine['physical_cores']} cores"
    about = ["| | |", "| --- | --- |", *(f"| {k} | {v} |" for k, v in machine.items())]
    states = ["| part | | seconds |", "| --- | --- | --- |"]
    states += [f"| {o.title} | {o.state} | {o.seconds:.0f} |" for o in outcomes]
    blocks = [
        f"## {o.title}\n\n`{o.command}`: {o.state}\n\n```text\n{o.output.strip()}\n```"
        for o in outcomes
        if o.command
    ]
    return "\n\n".join([title, "\n".join(about), "\n".join(states), *blocks]) + "\n"


if __name__ == "__main__":
    run_to_exit(main)
