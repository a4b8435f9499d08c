"""Where the ranks of a gloo or nccl group find each other, and over which interface they speak."""

import atexit
import fcntl
import os
import shutil
import socket
import struct
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from . import launch
from .errors import UsageError
from .launch import Placement
from .supervisor import RENDEZVOUS_FILE


def meet(timeout: timedelta) -> "tuple[Placement, dist.Store | None]":
    """This process's place and the store to meet the others through.

    Without a launcher that is this process alone. On one machine it is a file that only this user
    can read (torchrun brings a store of its own, reached through MASTER_ADDR: None stands for it).

    Raises:
        UsageError: the launcher's variables do not make sense.
    """
    if launch.launcher() == "mpirun":
        return _meet_through_mpi(timeout)
    placement = launch.placement()
    if placement.launcher == "none":
        return placement, dist.HashStore()
    if RENDEZVOUS_FILE in os.environ:
        return placement, dist.FileStore(os.environ[RENDEZVOUS_FILE], placement.world_size)
    if placement.launcher == "srun" and placement.one_machine:
        return placement, dist.FileStore(str(_slurm_file()), placement.world_size)
    if placement.launcher == "srun":
        nodes = os.environ.get("SLURM_STEP_NODELIST", os.environ.get("SLURM_NODELIST", ""))
        job, step = int(os.environ["SLURM_JOB_ID"]), int(os.environ["SLURM_STEP_ID"])
        os.environ.setdefault("MASTER_ADDR", launch.slurm_first_host(nodes))
        os.environ.setdefault("MASTER_PORT", str(20000 + (31 * job + step) % 20000))
    return placement, None


def _slurm_file() -> Path:
    """A file that all tasks of this job step, and no other step, name alike."""
    folder = Path(tempfile.gettempdir()) / f"ddp-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o077:
        raise UsageError(f"{folder} belongs to somebody else or is open to others: remove it")
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return folder / "-".join(["slurm", *(os.environ.get(name, "0") for name in names)])


def _meet_through_mpi(timeout: timedelta) -> "tuple[Placement, dist.Store]":
    """Under mpirun, gloo and nccl: MPI knows the ranks, and tells them where the store is."""
    from . import mpi

    placement = mpi.placement()
    if placement.one_machine:
        folder = mpi.share(tempfile.mkdtemp(prefix="ddp-") if placement.rank == 0 else None)
        if placement.rank == 0:
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return placement, dist.FileStore(f"{folder}/rendezvous", placement.world_size)
    if placement.rank == 0:
        server = dist.TCPStore(
            socket.getfqdn(), 0, is_master=True, timeout=timeout, wait_for_workers=False
        )
        mpi.share((socket.getfqdn(), server.port))
        return placement, server
    host, port = mpi.share(None)
    return placement, dist.TCPStore(host, port, is_master=False, timeout=timeout)


def choose_interface(placement: Placement) -> None:
    """Keeps one machine's traffic on loopback, and several machines' on the way to the master.

    gloo would take the interface that the host's name resolves to: on one machine a port open to
    others, on several often the wrong one.
    """
    names = [name for _, name in socket.if_nameindex()]
    if placement.one_machine:
        loopback = next((name for name in names if name.startswith("lo")), None)
        if loopback is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    elif "MASTER_ADDR" in os.environ and sys.platform.startswith("linux"):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((os.environ["MASTER_ADDR"], 1))  # sends nothing, asks for the route
            address = probe.getsockname()[0]
        found = next((name for name in names if _address(name) == address), None)
        if found is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", found)


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
