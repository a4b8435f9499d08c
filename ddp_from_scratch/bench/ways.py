"""Ways of running a job's contenders: together in one process, with memory kept, or each alone."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddp_from_scratch.bench.job import Job
from ddp_from_scratch.bench.launch import start

MODULE = "ddp_from_scratch.bench"

# glibc then keeps freed memory for the next allocation. It ignores a first value above 32 MB.
KEPT = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**32)}

_LEAST_S = 2.0  # of a contender by itself

Content = dict[str, Any]


class RanksFailed(Exception):
    """Ranks that did not end well, and have said why; `code` is the first one's."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the ranks ended with exit code {code}")
        self.code = code


def interleaved(job: Job) -> Content:
    """All contenders in the same processes, taking turns step by step."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        part = Path(folder) / "part.json"
        code = start(MODULE, job.backend, job.nproc, "--job", job.dumps(), "--into", part)
        if code:
            raise RanksFailed(code)
        content: Content = json.loads(part.read_text())
        return content


def kept(job: Job) -> Content:
    """The same, where glibc keeps memory that is freed: no page is taken from the system twice."""
    with _environment(KEPT):
        return interleaved(job)


def alone(job: Job) -> Content:
    """Each contender in processes of its own, one after the other.

    A lone model gets the memory of each gradient from the system anew, step after step. Contenders
    that take turns use each other's freed memory, which hides that cost.
    """
    specs = job.rows
    seconds = max(_LEAST_S, job.seconds / len(specs))
    contents = []
    for spec in specs:
        # What runs on gloo and node groups is measured without MPI, too.
        alone_on = "nccl" if "nccl" in job.backends else "gloo"
        own = "mpi" if spec.group == "mpi" else alone_on
        contents.append(interleaved(replace(job, only=spec.name, seconds=seconds, own=own)))
    # The machine's description and the title are the same in all.
    merged = contents[0]
    for other in contents[1:]:
        merged["samples"] += other["samples"]
        merged["left_out"] |= other["left_out"]
        merged["disturbed"] = merged.get("disturbed") or other.get("disturbed")
    return merged


WAYS: Mapping[str, Callable[[Job], Content]] = {
    "interleaved": interleaved,
    "kept": kept,
    "alone": alone,
}


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
