"""Compares layouts: how many ranks, with how many threads each, train fastest on this machine."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddp_from_scratch.bench.results import Run, Samples, fastest, save
from ddp_from_scratch.bench.timing import BenchmarkJob, Content
from ddp_from_scratch.bench.workloads import workload
from ddp_from_scratch.launch.cores import options_of_mpirun, own_cpus, read

# Beside torch's DDP, in two of its settings; a machine with many cores has many layouts.
COMPARED = ("torch DDP, views", "Reducer, views", "ddp.SGD")


@dataclass(frozen=True)
class Layout:
    """What one layout has reached, in samples per second of the whole machine."""

    ranks: int
    threads: int
    torch_ddp: float
    ours: float
    name: str  # of this library's fastest contender


def layouts_of(cores: int) -> list[tuple[int, int]]:
    """Returns ranks and threads that use all cores: 1 x 4, 2 x 2 and 4 x 1 of four."""
    return [(ranks, cores // ranks) for ranks in range(1, cores + 1) if cores % ranks == 0]


def compare(
    job: BenchmarkJob, run: Callable[[BenchmarkJob], Content], results: Path | None
) -> Iterator[str]:
    """Runs the job in each layout; yields the lines of a table, the fastest and how to start it.

    Each line comes as soon as it is known, since a machine with many cores has many layouts.
    The batch of the machine has the same size in all: one of the workload for each core.
    """
    here = read(own_cpus())
    cores, sockets = here.most_threads, len({core.socket for core in here.cores})
    of = workload(job.model)
    batch, found, contents = cores * of.samples(), [], []
    yield f"{of.name} for each of {cores} cores: {batch} samples in a step of this machine"
    yield _line("ranks x threads", "torch DDP", "ours", "in samples per second, with")
    yield _line("-" * 15, "-" * 9, "-" * 9, "-" * 27)
    for ranks, threads in layouts_of(cores):
        content = run(replace(job, nproc=ranks, threads=threads, batches=threads))
        contents.append(content)
        one = layout(ranks, threads, batch, [Samples(**s) for s in content["samples"]])
        found.append(one)
        yield _line(f"{ranks} x {threads}", f"{one.torch_ddp:,.0f}", f"{one.ours:,.0f}", one.name)
    if results is not None:
        merged: dict[str, Any] = contents[0] | {"samples": {}}
        for one, content in zip(found, contents, strict=True):
            merged["samples"][f"{one.ranks} x {one.threads}"] = content["samples"]
        merged["settings"] |= {"benchmark": "layouts", "batch": batch}
        save(f"layouts-{job.file_name}".replace("step_time-", ""), merged, results)
    disturbed = next(filter(None, (content.get("disturbed") for content in contents)), None)
    yield verdict(found, disturbed, sockets)


def layout(ranks: int, threads: int, batch: int, samples: Sequence[Samples]) -> Layout:
    """Returns the fastest contender of each kind, given the samples of one layout."""
    run = Run(samples)
    torch_ddp, ours = run.torch_ddp, fastest(run.ours)
    assert torch_ddp is not None
    assert ours is not None
    speeds = [1e3 * batch / one.quartiles[1] for one in (torch_ddp, ours)]
    return Layout(ranks, threads, speeds[0], speeds[1], ours.name)


def _line(layout: str, torch_ddp: str, ours: str, name: str) -> str:
    return f"{layout:<15}  {torch_ddp:>9}  {ours:>9}  {name}".rstrip()


def verdict(found: Sequence[Layout], disturbed: str | None = None, sockets: int = 1) -> str:
    """Returns the fastest layout, and the line that starts it.

    No layout is the fastest if `disturbed`, a sign that the machine was not quiet.
    """
    if disturbed is not None:
        return f"no verdict: the machine was not quiet ({disturbed})"
    best = max(found, key=lambda one: one.ours)
    of_torch = max(found, key=lambda one: one.torch_ddp)
    return (
        f"fastest: {best.ranks} x {best.threads}, {best.name}; torch's DDP: "
        f"{of_torch.ranks} x {of_torch.threads}\n"
        f"start it: {command_for(best, sockets)}"
    )


def command_for(best: Layout, sockets: int = 1) -> str:
    """Returns the line that starts a program of the user's own in a layout of all cores."""
    if best.ranks == 1:
        return f"OMP_NUM_THREADS={best.threads} python train.py"
    if " on mpi" in best.name:
        cores = best.ranks * best.threads
        options = options_of_mpirun(best.ranks, best.threads, cores, sockets)
        return f"mpirun -n {best.ranks} {options} python train.py"
    by_torchrun = f"torchrun --nproc-per-node {best.ranks} train.py"
    return (
        f"OMP_NUM_THREADS={best.threads} {by_torchrun}, or with cores of its own for each rank "
        f"ddp.start_ranks([sys.executable, 'train.py'], counts=[{best.ranks}])"
    )
