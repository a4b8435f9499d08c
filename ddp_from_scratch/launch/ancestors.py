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
from typing import NamedTuple

from ddp_from_scratch.launch import environment


class Process(NamedTuple):
    """A process that is not mistaken for a later one with the same number.

    As text: PID:START:NAMESPACE, where START and NAMESPACE are empty without /proc.
    """

    pid: int
    start: str  # clock ticks from the machine's start to that of the process
    namespace: str  # of process numbers: containers have their own

    @classmethod
    def of(cls, pid: int) -> "Process":
        fields = _stat(pid)
        return cls(pid, fields[19] if fields else "", _namespace())

    @classmethod
    def parse(cls, text: str) -> "Process | None":
        pid, *rest = text.split(":", 2)
        if not pid.isdecimal() or len(rest) != 2:
            return None
        return cls(int(pid), *rest)

    def __str__(self) -> str:
        return ":".join(map(str, self))

    @property
    def is_visible(self) -> bool:
        """False if its number means another process here, since it belongs to a container."""
        return self.namespace == _namespace()

    def is_alive(self) -> bool:
        """False once the process has ended. Only for one that is visible."""
        if fields := _stat(self.pid):
            return fields[19] == self.start and fields[0] not in "ZX"  # ended, not yet waited for
        if _stat(os.getpid()):
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True


def own() -> Process:
    """Returns this process."""
    return Process.of(os.getpid())


def ancestors() -> Iterator[int]:
    """Yields the parent's process number, its parent's, and so on while they are visible."""
    pid = os.getppid()
    while pid > 0:
        yield pid
        fields = _stat(pid)
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
    fields = _stat(pid)
    return int(fields[17]) if fields else 0


def _was_started_with(pid: int, variables: Mapping[str, str]) -> bool:
    """True if a process was started with this place; False if its variables cannot be read."""
    with suppress(OSError):
        pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        environ = dict(os.fsdecode(pair).partition("=")[::2] for pair in pairs)
        return place(environ) == variables
    return False


def _stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat from the third, the state, on; [] if it has ended."""
    try:
        # The second field, the name, is in parentheses and may contain any character.
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return []
    return text.rpartition(b")")[2].decode().split()


def _namespace() -> str:
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""
