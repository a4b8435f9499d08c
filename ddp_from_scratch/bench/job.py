"""Jobs: what one group of ranks measures, and the part of a rank."""

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch.bench.contenders import (
    NO_COMMUNICATION,
    Contender,
    ContenderSpec,
    contenders,
    rows,
)
from ddp_from_scratch.bench.machine import content_of
from ddp_from_scratch.bench.prepare import OPTIMIZERS
from ddp_from_scratch.bench.samples import CpuUse, disturbance
from ddp_from_scratch.bench.timing import check_equal, interleave, rounds_for
from ddp_from_scratch.bench.workloads import Workload, workload
from ddp_from_scratch.world.process_group import World, process_group


@dataclass(frozen=True)
class Job:
    """What one group of ranks measures.

    Attributes:
        model: see `workload`.
        backends: of the table; mpi's ranks open groups of the others beside their own.
        nproc: ranks.
        optimizer: of `OPTIMIZERS`.
        chosen: contenders beside the references; None means the usual ones.
        seconds, rounds: how long: by the clock, or so many steps of each contender.
        only: one row of the table alone; None means all.
        way: of running, for the file.
        own: the backend of the ranks' own group; "" means mpi where that is among the backends,
            since its ranks can open groups of the others as well.
    """

    model: str
    backends: tuple[str, ...]
    nproc: int
    optimizer: str = "sgd"
    chosen: tuple[str, ...] | None = None
    seconds: float = 15.0
    rounds: int | None = None
    only: str | None = None
    way: str = "interleaved"
    own: str = ""

    @classmethod
    def parse(cls, text: str) -> "Job":
        """The job that `dumps` has written."""
        values: dict[str, Any] = json.loads(text)
        # JSON has no tuples.
        for name in ("backends", "chosen"):
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        return cls(**values)

    def dumps(self) -> str:
        """The job as one argument of a command line."""
        defaults = {f.name: f.default for f in fields(self)}
        return json.dumps({k: v for k, v in asdict(self).items() if v != defaults[k]})

    @property
    def rows(self) -> list[ContenderSpec]:
        """The contenders to measure."""
        found = rows(self.backends, self.optimizer, self.chosen)
        return [spec for spec in found if self.only in (None, spec.name)]

    @property
    def backend(self) -> str:
        """That of the ranks' own group."""
        return self.own or next((b for b in ("mpi", "nccl") if b in self.backends), "gloo")

    @property
    def file_name(self) -> str:
        """Of the results."""
        model = "-".join(Path(self.model).name.replace(".py:", "-").split())
        parts = [f"step_time-{model}-{'+'.join(self.backends)}-{self.nproc}"]
        parts += [self.optimizer] if self.optimizer != "sgd" else []
        return "-".join([*parts, *([self.way] if self.way != "interleaved" else [])])

    def title(self, of: Workload) -> str:
        """For people."""
        optimizer = f"fused {OPTIMIZERS[self.optimizer].name} in rows with torch's optimizer"
        return f"{of.name}; {' and '.join(self.backends)}, {self.nproc} ranks; {optimizer}"


def measure(job: Job) -> dict[str, Any] | None:
    """A rank's part: times the contenders. Returns the file's content on rank 0.

    Raises:
        RuntimeError: contenders did not compute the same.
    """
    # One thread a rank: more would take the other ranks' cores.
    torch.set_num_threads(1)
    of = workload(job.model)
    with process_group(job.backend) as world:
        groups = _groups(job, world)
        torch.manual_seed(world.rank)
        # Batches differ over ranks, as in training; `contenders` seeds the models.
        compared, left_out = _make(job, of, world, groups)
        rounds = rounds_for(job.seconds, job.rounds, world.device, job.title(of))
        use = CpuUse()
        samples = interleave(compared, rounds, world.device)
        others = use.others()
        # Before anything is printed: times of contenders that computed something else mean
        # nothing.
        check_equal(compared)
        if world.rank != 0:
            return None
        settings = {
            "benchmark": "step_time",
            "model": job.model,
            "backend": " ".join(job.backends),
            "nproc": world.world_size,
            "optimizer": job.optimizer,
            "way": job.way,
        }
        content = content_of(job.title(of), [asdict(s) for s in samples], settings)
        if world.device.type == "cpu" and world.world_size == world.local_world_size:
            alone = next((s for s in samples if s.name == NO_COMMUNICATION), None)
            cores = len(use.processors)
            content["disturbed"] = disturbance(alone, others, world.world_size, cores)
        return content | {"left_out": left_out}


def _groups(job: Job, world: World) -> dict[str, dist.ProcessGroup]:
    """Groups of all ranks, of the backends of the job's rows, beside the job's own."""
    groups: dict[str, dist.ProcessGroup] = {}
    # Sorted: making a group is collective, so all ranks make them in one order.
    for backend in sorted({spec.group for spec in job.rows if spec.group} - {world.backend}):
        if backend == "node":
            # Here and not above: it registers the backend, which others do without.
            import ddp_from_scratch.node  # noqa: F401
        group = dist.new_group(backend=backend)
        assert isinstance(group, dist.ProcessGroup), "every rank is in it"
        groups[backend] = group
    return groups


def _make(
    job: Job, of: Workload, world: World, groups: dict[str, dist.ProcessGroup]
) -> tuple[list[Contender], dict[str, str]]:
    """The contenders, and the reasons of those that cannot train this model."""
    made: list[Contender] = []
    left_out: dict[str, str] = {}
    for spec in job.rows:
        state = torch.get_rng_state()  # the same batch for all
        try:
            made += contenders(of, world.device, [spec], groups, job.optimizer, not made)
        except (TypeError, ValueError) as error:
            # On all ranks alike, since they have the same model: none waits for another.
            left_out[spec.name] = str(error)
        torch.set_rng_state(state)
    # One start is enough for all.
    return [replace(c, start=made[0].start) for c in made], left_out
