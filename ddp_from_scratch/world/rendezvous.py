"""The store through which the ranks of a gloo or nccl group meet."""

import os
import stat
import tempfile
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch.distributed as dist

from ddp_from_scratch.errors import UsageError
from ddp_from_scratch.launch import environment
from ddp_from_scratch.launch.environment import MACHINE_0, RENDEZVOUS_FILE, Placement


def meet(timeout: timedelta) -> "tuple[Placement, dist.Store | None]":
    """This process's place and the store to meet the others through.

    None stands for a store that torch is to reach through MASTER_ADDR.

    Raises:
        UsageError: the launcher's variables do not make sense.
    """
    if environment.launcher() == "mpirun":
        # Here and not above: it starts MPI, which only the mpi backend and mpirun's ranks may do.
        from ddp_from_scratch import mpi

        # MPI knows the place, and carries the store's address.
        placement = mpi.placement()
        return placement, mpi.store(placement, timeout)
    placement = environment.placement()
    if placement.launcher == "none":
        return placement, dist.HashStore()
    # On one machine, a file that only this user can read: no port is opened.
    if RENDEZVOUS_FILE in os.environ:
        return placement, _file_store(os.environ[RENDEZVOUS_FILE], placement.world_size)
    if placement.launcher == "torchrun":
        return placement, _torchrun_store(placement, timeout)
    # srun's, on one machine.
    if placement.one_machine:
        return placement, _file_store(str(_slurm_file()), placement.world_size)
    # On several, the first one, and a port that another job or step there seldom has.
    nodes = os.environ.get("SLURM_STEP_NODELIST", os.environ.get("SLURM_NODELIST", ""))
    job, step = (environment.number(os.environ, f"SLURM_{name}_ID") for name in ("JOB", "STEP"))
    os.environ.setdefault("MASTER_ADDR", environment.slurm_first_host(nodes))
    os.environ.setdefault("MASTER_PORT", str(20000 + (31 * job + step) % 20000))
    return placement, None


# One for each process: the last one to go removes the file, under those that come again.
@cache
def _file_store(file: str, world_size: int) -> dist.Store:
    return dist.FileStore(file, world_size)


def _torchrun_store(placement: Placement, timeout: timedelta) -> "dist.Store | None":
    """The store of torchrun or `start_ranks`; None where torch is to make it of MASTER_ADDR."""
    address, port = os.environ.get("MASTER_ADDR"), environment.number(os.environ, "MASTER_PORT")
    if not address:
        raise UsageError("MASTER_ADDR is not set: it is the address of rank 0's machine")
    # Not torchrun's on several machines, each of which counts its restarts by itself (pytorch
    # #135712): there TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 has it bring a new store each time.
    known = placement.one_machine or MACHINE_0 in os.environ
    if not known or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    store = dist.TCPStore(address, port, is_master=False, timeout=timeout)
    # Ranks that torchrun starts again find the same store, with the addresses of those before them:
    # each start gets a part of its own. `start_ranks` never starts a rank again.
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"start {restarts}", store)


def _slurm_file() -> Path:
    """A file that all tasks of this job step, and no other step, name alike."""
    folder = _private_folder()
    # The port differs between steps of one number, should job numbers start over: a file that an
    # earlier, killed step left behind would confuse this one.
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "SLURM_SRUN_COMM_PORT")
    return folder / "-".join(["slurm", *(os.environ.get(name, "0") for name in names)])


def _private_folder() -> Path:
    """This user's folder for temporary files that others must not touch.

    Raises:
        UsageError: it is not this user's alone.
    """
    folder = Path(tempfile.gettempdir()) / f"ddp-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    # Its name is known, and in a folder for all somebody else may have been there first, with a
    # folder of theirs or a link to one (`lstat` does not follow it). Once it is this user's, the
    # sticky bit of the folder around keeps it in its place.
    found, around = folder.lstat(), folder.parent.stat()
    if (
        not stat.S_ISDIR(found.st_mode)
        or found.st_uid != os.getuid()
        or found.st_mode & 0o077
        or (around.st_mode & 0o022 and not around.st_mode & stat.S_ISVTX)
    ):
        raise UsageError(
            f"{folder} is a link, belongs to somebody else, or it or the folder around it is open "
            f"to others: remove it, or set TMPDIR to a folder of your own"
        )
    return folder
