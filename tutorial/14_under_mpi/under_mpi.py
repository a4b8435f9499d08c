"""Trains with the loop of chapter 4 on the ranks that any launcher has started.

python -m tutorial.14_under_mpi.under_mpi
"""

import os
import socket
import sys
from itertools import pairwise
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group opens: it would keep the group alive until exit

from tutorial import pictures
from tutorial.options import read_options
from tutorial.ranks import LOOPBACK

WIDTH, LAYERS, BATCH, STEPS = 512, 8, 120, 15
PHASES = "forward", "backward", "wait", "update"

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


def train():
    """Returns the start and end of each phase of each step, and a sum of all parameters."""
    rank, nproc = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.ReLU())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    steps = []
    for step in range(STEPS):
        batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        x = batch.tensor_split(nproc)[rank]
        dist.barrier()
        marks = [perf_counter()]
        loss = (model(x) - 1).square().mean()
        marks.append(perf_counter())
        optimizer.zero_grad()
        loss.backward()
        marks.append(perf_counter())
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= nproc
        marks.append(perf_counter())
        optimizer.step()
        marks.append(perf_counter())
        steps.append(marks)
    return steps, sum(parameter.double().sum().item() for parameter in model.parameters())


def report(picture, places, results):
    """On rank 0: prints each rank's medians, and draws the middle step."""
    for (launcher, rank, nproc, local_rank, _), (steps, _) in zip(places, results, strict=True):
        spans = [[1000 * (end - begin) for begin, end in pairwise(marks)] for marks in steps]
        times = zip(PHASES, map(median, zip(*spans, strict=True)), strict=True)
        print(f"rank {rank} of {nproc}, by {launcher}: number {local_rank} on its machine")
        print("    " + ", ".join(f"{name} {ms:.1f}" for name, ms in times), "ms")
    print(f"machines: {len({place[-1] for place in places})}")
    same = len({total for _, total in results}) == 1
    print(f"parameters are {'the same' if same else 'NOT the same'} on all ranks")
    step = STEPS // 2
    rows = {}
    for rank, (steps, _) in enumerate(results):
        # Clocks of two machines differ, so each rank's step begins at its own 0.
        spans = pairwise(1000 * (mark - steps[step][0]) for mark in steps[step])
        rows[f"rank {rank}"] = [(name, *s) for name, s in zip(PHASES, spans, strict=True)]
    pictures.timelines(picture, {"one step": rows})


def main():
    """Joins the others, trains, and gathers all ranks' results on rank 0."""
    options = read_options(__doc__)
    launcher, rank, nproc, local_rank = find_place(os.environ)
    if nproc > 1:
        torch.set_num_threads(1)
    join(launcher, rank, nproc)
    mine = (launcher, rank, nproc, local_rank, socket.gethostname()), train()
    of_all = [None] * nproc
    dist.all_gather_object(of_all, mine)
    if rank == 0:
        report(options.picture, *zip(*of_all, strict=True))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
