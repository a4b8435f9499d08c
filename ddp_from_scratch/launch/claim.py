"""A rank belongs to one process; a program that this process starts inherits only its variables.

A process that joins a group claims its place: in its environment, for programs that it starts from
then on, and as an open file with its place in the name, for those that it started before.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from contextlib import suppress

from ddp_from_scratch.common.errors import UsageError
from ddp_from_scratch.common.process import Process
from ddp_from_scratch.launch import ancestors, environment

_CLAIM = "DDP_CLAIMED_BY"
_open_file: int | None = None  # until this process ends or calls `exec`

_OF_RANKS = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
    r"|OMPI_(COMM_)?WORLD_.*|PMIX?_.*|MPI_LOCAL.*|PRTE_LAUNCHED"
    r"|SLURM_(PROCID|LOCALID|NODEID|STEPID|STEP_.*)"
    r"|DDP_(STARTED_HERE|PARENT_PID|RENDEZVOUS_FILE|MACHINE_0|MEMBER|CLAIMED_BY|OUTPUT"
    r"|CPUS|CPUS_OF_RANKS|WORKER_CPUS|THREADS|OMP_SET)"
)


def environment_without_rank(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns environment variables, by default this process's, without those that define its rank.

    For a program that a rank starts:

        subprocess.run([sys.executable, "evaluate.py"], env=ddp.environment_without_rank())

    In that program `ddp.process_group` then opens a group of only one process, and the program can
    start its own ranks. Removes the variables of torchrun, mpirun, srun and `start_ranks`.
    """
    variables = os.environ if environ is None else environ
    found = {name: value for name, value in variables.items() if not _OF_RANKS.fullmatch(name)}
    if found.get("OMP_NUM_THREADS") == variables.get(environment.OMP_SET):  # not the user's
        found.pop("OMP_NUM_THREADS", None)
    return found


def claim_rank() -> None:
    """Claims the rank that this process's variables name. A no-op without a launcher. Idempotent.

    Raises:
        UsageError: the rank belongs to a process that this one descends from.
    """
    global _open_file
    if environment.launcher() == "none":
        return
    if (owner := inherited_from()) is not None:
        found = [name for name in ancestors.place(os.environ) if name[:4] != "DDP_"]
        by_mpi = any(name.startswith(("OMPI_", "PMI")) for name in found)
        names = "OMPI_COMM_WORLD_*, PMIX_* and PMI_*" if by_mpi else ", ".join(found)
        raise UsageError(
            f"this process has inherited the rank of process {owner}, which is a rank itself: "
            f"start it with env=ddp.environment_without_rank(), or without {names}"
        )
    own, place = ancestors.own(), _digest()
    os.environ[_CLAIM] = f"{own}/{place}"
    if _open_file is None and hasattr(os, "memfd_create"):
        with suppress(OSError):  # no such call here, or no file left
            _open_file = os.memfd_create(_name(own.pid, place))


def inherited_from() -> int | None:
    """Returns the process that has claimed this process's rank; None if it is its own."""
    if _may_be_shared():
        return None
    claimed_by, _, place = os.environ.get(_CLAIM, "").partition("/")
    owner = Process.parse(claimed_by)
    # A launcher that a rank has started sets another place.
    if owner is not None and place == _digest() and owner != ancestors.own():
        return owner.pid
    return next((pid for pid in ancestors.ancestors() if _has_claimed(pid)), None)


def _may_be_shared() -> bool:
    """True for a world of one without MPI: a second process in it is alone, too."""
    by, environ = environment.launcher(), os.environ
    alone = by in ("torchrun", "srun") and environment.started() == 1
    return alone and environment.MEMBER not in environ


def _has_claimed(pid: int) -> bool:
    name = f"/memfd:{_name(pid, _digest())} (deleted)"
    with suppress(OSError):  # gone, or of another user
        for file in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.readlink(file.path) == name:
                    return True
    return False


def _name(pid: int, place: str) -> str:
    return f"ddp-rank-{pid}-{place}"


def _digest() -> str:
    text = repr(sorted(ancestors.place(os.environ).items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
