"""The processes that this one descends from, as /proc shows them.

A launcher may start a rank through wrappers that stay between the two:

    torchrun --fork--> timeout 60 python train.py --fork--> python train.py
    launcher           wrapper: has the rank's variables    the rank

Without /proc (macOS, some containers) a process sees only its parent.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from ddp_from_scratch.common.process import Process, stat_fields
from ddp_from_scratch.launch import environment


def own() -> Process:
    """Returns this process."""
    return Process.of(os.getpid())


def ancestors() -> Iterator[int]:
    """Yields the parent's process number, its parent's, and so on while they are visible."""
    pid = os.getppid()
    while pid > 0:
        yield pid
        fields = stat_fields(pid)
        pid = int(fields[1]) if fields else 0


def launcher() -> int:
    """Returns the nearest ancestor that does not have this rank's variables; 0 if none is visible.

    A wrapper was started with these variables, as this process was.
    """
    mine = place(os.environ)
    return next((pid for pid in ancestors() if not _was_started_with(pid, mine)), 0)


# What tells a rank of one start of a job from all others. Launchers set some of these, to values
# that no other process gets.
_PLACE = (
    *("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *(environment.RENDEZVOUS_FILE, environment.MEMBER),
    *("OMPI_COMM_WORLD_RANK", "PMIX_NAMESPACE", "PMIX_RANK", "PMI_RANK", "PMI_FD", "PMI_PORT"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID"),
)
_MASTER = ("MASTER_ADDR", "MASTER_PORT")


def place(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that make a process a certain rank of a certain job."""
    # Under srun the library itself sets where the ranks meet.
    names = _PLACE + (_MASTER if "RANK" in environ else ())
    return {name: environ[name] for name in names if name in environ}


def number_of_threads(pid: int) -> int:
    """Returns how many threads a process has; 0 if it is not visible."""
    fields = stat_fields(pid)
    return int(fields[17]) if fields else 0


def _was_started_with(pid: int, variables: Mapping[str, str]) -> bool:
    """True if a process was started with this place; False if its variables cannot be read."""
    with suppress(OSError):
        pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        environ = dict(os.fsdecode(pair).partition("=")[::2] for pair in pairs)
        return place(environ) == variables
    return False
