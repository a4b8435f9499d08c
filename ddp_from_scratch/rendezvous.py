"""Where the ranks of a gloo or nccl group find each other, and over which interface they speak."""

import fcntl
import os
import socket
import stat
import struct
import sys
import tempfile
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch.distributed as dist

from . import launch
from .errors import UsageError
from .launch import Placement
from .parent import MACHINE_0, RENDEZVOUS_FILE


def meet(timeout: timedelta) -> "tuple[Placement, dist.Store | None]":
    """This process's place and the store to meet the others through.

    Without a launcher that is this process alone. On one machine it is a file that only this user
    can read. torchrun and `start_ranks` on several machines bring a store of their own; None stands
    for one that torch is to reach through MASTER_ADDR.

    Raises:
        UsageError: the launcher's variables do not make sense.
    """
    if launch.launcher() == "mpirun":
        return _meet_through_mpi(timeout)
    placement = launch.placement()
    if placement.launcher == "none":
        return placement, dist.HashStore()
    if RENDEZVOUS_FILE in os.environ:
        return placement, _file_store(os.environ[RENDEZVOUS_FILE], placement.world_size)
    if placement.launcher == "torchrun":
        return placement, _torchrun_store(placement, timeout)
    if placement.launcher == "srun" and placement.one_machine:
        return placement, _file_store(str(_slurm_file()), placement.world_size)
    if placement.launcher == "srun":
        nodes = os.environ.get("SLURM_STEP_NODELIST", os.environ.get("SLURM_NODELIST", ""))
        job, step = (launch.number(os.environ, f"SLURM_{name}_ID") for name in ("JOB", "STEP"))
        os.environ.setdefault("MASTER_ADDR", launch.slurm_first_host(nodes))
        os.environ.setdefault("MASTER_PORT", str(20000 + (31 * job + step) % 20000))
    return placement, None


@cache
def _file_store(file: str, world_size: int) -> dist.Store:
    """One for each process: the last one to go removes the file, under those that come again."""
    return dist.FileStore(file, world_size)


def _torchrun_store(placement: Placement, timeout: timedelta) -> "dist.Store | None":
    """The store of torchrun or `start_ranks`; None where torch is to make it of MASTER_ADDR.

    Ranks that torchrun starts again meet in the same store, where the addresses of those before
    them still are, so each start gets a part of its own. Not on several machines, as each counts
    its restarts by itself (pytorch #135712): there TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 makes
    torchrun bring a new store each time. `start_ranks` never starts a rank again.
    """
    address, port = os.environ.get("MASTER_ADDR"), launch.number(os.environ, "MASTER_PORT")
    if not address:
        raise UsageError("MASTER_ADDR is not set: it is the address of rank 0's machine")
    known = placement.one_machine or MACHINE_0 in os.environ  # or else torchrun's, on several
    if not known or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    store = dist.TCPStore(address, port, is_master=False, timeout=timeout)
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"start {restarts}", store)


def _slurm_file() -> Path:
    """A file that all tasks of this job step, and no other step, name alike."""
    folder = _private_folder()
    # The port tells apart steps of one number, should job numbers begin anew: a file that an
    # earlier, killed step left behind would confuse this one.
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "SLURM_SRUN_COMM_PORT")
    return folder / "-".join(["slurm", *(os.environ.get(name, "0") for name in names)])


def _private_folder() -> Path:
    """This user's folder for temporary files that others must not touch.

    Its name is known, and in a folder for all somebody else may have been there first, with a
    folder of theirs or a link to one. Once it is ours, the sticky bit keeps it in its place.

    Raises:
        UsageError: it is not ours alone.
    """
    folder = Path(tempfile.gettempdir()) / f"ddp-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found, around = folder.lstat(), folder.parent.stat()  # of a link, and not of what it leads to
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


def _meet_through_mpi(timeout: timedelta) -> "tuple[Placement, dist.Store]":
    """Under mpirun, gloo and nccl: MPI knows the ranks, and tells them where the store is."""
    from . import mpi  # starts MPI, which only the mpi backend and mpirun's ranks may do

    mpi.check_launcher()
    placement = mpi.placement()
    return placement, mpi.store(placement, timeout)


def choose_interface(placement: Placement) -> None:
    """Keeps one machine's traffic on loopback, and several machines' on the way to the master.

    gloo would take the interface that the host's name resolves to, nccl the first: on one machine a
    port open to others, on several often the wrong one.
    """
    names = [name for _, name in socket.if_nameindex()]
    if placement.one_machine:
        loopback = _loopback(names)
        if loopback is not None:
            if "GLOO_SOCKET_IFNAME" not in os.environ:
                require_loopback()
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    elif "MASTER_ADDR" in os.environ and sys.platform.startswith("linux"):
        master = os.environ.get(MACHINE_0, os.environ["MASTER_ADDR"])
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((master, 1))  # sends nothing, asks for the route
                address = probe.getsockname()[0]
        except OSError:  # an IPv6 address or a wrong name: left to the connection itself
            return
        found = next((name for name in names if _address(name) == address), None)
        if found is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", found)
            # Where NCCL's ranks meet; data goes by InfiniBand all the same, where there is any. It
            # takes a name for the beginning of one, unless it comes after "=".
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={found}")


def _loopback(names: list[str]) -> str | None:
    return next((name for name in names if name.startswith("lo")), None)


def require_loopback() -> None:
    """Raises where a machine's own interface is down, as in a new network namespace. Linux only.

    Raises:
        UsageError: it is; ranks of one machine, and mpirun, speak through it.
    """
    siocgifflags, iff_up = 0x8913, 1
    name = _loopback([name for _, name in socket.if_nameindex()])
    if name is None or not sys.platform.startswith("linux"):
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        reply = fcntl.ioctl(probe.fileno(), siocgifflags, struct.pack("256s", name.encode()[:15]))
    if not struct.unpack_from("16xH", reply)[0] & iff_up:
        raise UsageError(
            f"the loopback interface {name} is down, and ranks of one machine need it: "
            f"ip link set {name} up"
        )


def _address(interface: str) -> str | None:
    """The interface's IPv4 address (Linux)."""
    siocgifaddr = 0x8915
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe.fileno(), siocgifaddr, request)
        except OSError:
            return None
    return socket.inet_ntoa(reply[20:24])
