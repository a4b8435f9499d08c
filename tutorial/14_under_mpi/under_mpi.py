"""Trains with the loop of chapter 4 on the ranks that any launcher has started.

python -m tutorial.14_under_mpi.under_mpi
"""

import os
import socket
import sys
from importlib import import_module

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group opens: it would keep the group alive until exit

from tutorial.options import read_options
from tutorial.ranks import LOOPBACK
from tutorial.show.under_mpi import show

naive = import_module("tutorial.04_naive.naive")

# How each launcher tells a process its rank, the world size and its rank on its own machine.
VARIABLES = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
}


def find_place(environ):
    """Returns the launcher, and this process's rank, world size and local rank."""
    for launcher, names in VARIABLES.items():
        if all(name in environ for name in names):
            return launcher, *(int(environ[name]) for name in names)
    return "no launcher", 0, 1, 0


def join(launcher, rank, nproc):
    """Opens the process group: through MPI, or through a port of rank 0's machine."""
    if launcher == "mpirun":
        import ddp_from_scratch.mpi as mpi  # registers the backend: torch has no MPI of its own

        dist.init_process_group(mpi.BACKEND, init_method="mpi://")
        return
    # torchrun sets the address. With srun the job script does, and the job number gives the port.
    job = int(os.environ.get("SLURM_JOB_ID", "0"))
    address = os.environ.setdefault("MASTER_ADDR", "localhost")
    port = os.environ.setdefault("MASTER_PORT", str(20000 + job % 20000))
    if address == "localhost":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    store = dist.HashStore() if launcher == "no launcher" else None  # None: a store at that address
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=nproc)
    except dist.DistNetworkError:
        sys.exit(f"rank {rank}: cannot use port {port} of {address}; set MASTER_PORT to another")


def main():
    """Joins the others, trains, and gathers all ranks' results on rank 0, which shows them."""
    options = read_options(__doc__)
    launcher, rank, nproc, local_rank = find_place(os.environ)
    if nproc > 1:
        torch.set_num_threads(1)
    join(launcher, rank, nproc)
    steps, _, parameters = naive.train(late=0)
    mine = (launcher, rank, nproc, local_rank, socket.gethostname()), steps, parameters
    of_all = [None] * nproc
    dist.all_gather_object(of_all, mine)
    if rank == 0:
        show(naive.PHASES, of_all, options.picture)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
