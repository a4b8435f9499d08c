"""python -m benchmarks.allreduce: times an all-reduce by size; compares plain MPI and a copy.

Examples:
    python -m benchmarks.allreduce                     2 ranks, float32, 256 B to 64 MB
    python -m benchmarks.allreduce --nproc 2 4 --dtype float32 bfloat16
    python -m benchmarks.allreduce --quick             fewer sizes and rounds
    python -m benchmarks.allreduce --collective all_gather reduce_scatter
                                                       other collectives: gloo, mpi and mpi4py

One MPI job holds all contenders, which take turns: gloo (a group beside the mpi group), mpi with
an ordinary tensor, mpi with a tensor from `mpi.empty`, and mpi4py's blocking Allreduce as it is and
with the allocator told to keep its pages (glibc). With a GPU for each rank nccl is measured, too. A
turn is a single call from 1 MB on, and up to 50 in a row below. The slowest rank counts.

Bus bandwidth is that of nccl-tests: a factor x bytes / time. For the collectives that gather or
scatter, bytes are those of all ranks' parts together. The factor is 2 (n - 1) / n for an
all-reduce, 1 for a broadcast or a copy, and (n - 1) / n for the others.
"""

import argparse
import ctypes
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from benchmarks.harness.report import draw_curves, make_parser, write
from ddp_from_scratch import UsageError, process_group, start_ranks
from ddp_from_scratch.bench.results import text_table
from ddp_from_scratch.launch import environment
from ddp_from_scratch.launch.rank_process import run_to_exit
from ddp_from_scratch.launch.start import start_mpirun

SIZES = [4**k for k in range(4, 14)]
DTYPES = ("float32", "bfloat16", "float16", "float64")
COPY = "memory copy"
PLAIN = "mpi4py"
ALL_REDUCE = "all_reduce"
# By collective, bus bandwidth as a multiple of bytes / time.
FACTORS: dict[str, Callable[[int], float]] = {
    ALL_REDUCE: lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "all_to_all": lambda ranks: (ranks - 1) / ranks,
    "gather": lambda ranks: (ranks - 1) / ranks,
    "broadcast": lambda ranks: 1.0,
}


@dataclass(frozen=True)
class Contender:
    """A way to call a collective. `before` and `after` are not timed."""

    call: Callable[[], Any]
    before: Callable[[], Any] = lambda: None
    after: Callable[[], Any] = lambda: None


def main() -> int:
    parser = make_parser("benchmarks.allreduce", __doc__)
    parser.add_argument("--nproc", type=int, nargs="+", default=[2], help="ranks (default: 2)")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32"])
    text = f"default: {ALL_REDUCE}"
    parser.add_argument("--collective", nargs="+", choices=FACTORS, default=[ALL_REDUCE], help=text)
    text = "default: 4^4 to 4^13"
    parser.add_argument("--bytes", type=int, nargs="+", default=SIZES, metavar="N", help=text)
    parser.add_argument(
        "--quick", action="store_true", help="half of the sizes, a third of the rounds"
    )
    options = parser.parse_args()
    if min(options.nproc) < 2 or min(options.bytes) < 8:
        raise UsageError("--nproc must be 2 or more and --bytes 8 or more")
    if environment.launcher() != "none":
        measure(options)
        return 0
    for count in options.nproc:
        rank = [sys.executable, "-m", "benchmarks.allreduce", *sys.argv[1:]]
        if code := start_mpirun(count, rank):
            return code
        if torch.cuda.device_count() >= count and (code := start_ranks(rank, (count,))):
            return code
    return 0


def measure(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)  # a rank has one core, as in training
    backend = "mpi" if environment.launcher() == "mpirun" else "nccl"
    with process_group(backend) as world:
        for collective, dtype in product(options.collective, options.dtype):
            sizes = sorted(options.bytes)[:: 2 if options.quick else 1]
            title = f"{collective}, {backend}, {dtype}"
            times: dict[int, dict[str, list[float]]] = {}
            for nbytes in tqdm(sizes, title, disable=world.rank != 0 or None, leave=False):
                numel = nbytes // getattr(torch, dtype).itemsize
                tensor = torch.zeros(numel, dtype=getattr(torch, dtype), device=world.device)
                if collective != ALL_REDUCE:
                    compared = other_contenders(collective, backend, tensor)
                elif backend == "mpi":
                    compared = contenders_on_cpu(tensor)
                else:
                    compared = contenders_on_gpu(tensor)
                # Small calls are noisy and cheap, so they get more rounds, with many calls each.
                rounds = max(5, min(200, 2**29 // nbytes)) // (3 if options.quick else 1)
                calls = max(1, min(50, 2**20 // nbytes))
                times[nbytes] = take_turns(compared, max(rounds, 3), calls, world.device)
            if world.rank == 0:
                report(collective, backend, dtype, world.world_size, times, options.results)


@cache
def gloo() -> dist.ProcessGroup:
    """Makes a gloo group of all ranks, only once, since it costs a thread and connections."""
    return cast(dist.ProcessGroup, dist.new_group(backend="gloo"))


def contenders_on_cpu(tensor: torch.Tensor) -> dict[str, Contender]:
    from ddp_from_scratch import mpi
    from ddp_from_scratch.backend.mpi_group import MPI

    beside, other = gloo(), tensor.clone()
    window = mpi.empty(tensor.numel(), tensor.dtype)
    window.zero_()  # also touches its pages, which exist only then
    contenders: dict[str, Contender] = {
        "gloo": Contender(lambda: dist.all_reduce(tensor, group=beside)),
        "mpi": Contender(lambda: dist.all_reduce(tensor)),
        "mpi, window": Contender(lambda: dist.all_reduce(window)),
        COPY: Contender(lambda: other.copy_(tensor)),
    }
    if tensor.itemsize > 2:  # MPI itself has no 16-bit floats
        flat, world = tensor.numpy(), MPI.COMM_WORLD

        def plain() -> None:
            world.Allreduce(MPI.IN_PLACE, flat)

        def keep_pages() -> None:
            set_thresholds(2**30)
            plain()  # untimed: leaves the pages that the next call finds

        contenders[PLAIN] = Contender(plain)
        if sys.platform.startswith("linux"):
            contenders["mpi4py, pages kept"] = Contender(
                plain, before=keep_pages, after=lambda: set_thresholds(128 * 1024)
            )
    return contenders


def other_contenders(collective: str, backend: str, tensor: torch.Tensor) -> dict[str, Contender]:
    """Returns the ways to call another collective, with a part per rank, and the copy."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole = tensor[: tensor.numel() // ranks * ranks]  # equal parts
    other, part = whole.clone(), whole.tensor_split(ranks)[rank].clone()
    parts = list(other.tensor_split(ranks)) if rank == 0 else None
    of_torch: dict[str, Callable[[Any], Any]] = {
        "all_gather": lambda group: dist.all_gather_into_tensor(other, part, group=group),
        "reduce_scatter": lambda group: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_to_all": lambda group: dist.all_to_all_single(other, whole, group=group),
        "gather": lambda group: dist.gather(part, parts, 0, group=group),
        "broadcast": lambda group: dist.broadcast(whole, 0, group=group),
    }
    call = of_torch[collective]
    contenders = {
        backend: Contender(partial(call, dist.group.WORLD)),
        COPY: Contender(lambda: other.copy_(whole)),
    }
    if backend == "mpi":
        contenders["gloo"] = Contender(partial(call, gloo()))
    if backend == "mpi" and tensor.itemsize > 2:  # MPI itself has no 16-bit floats
        from ddp_from_scratch.backend.mpi_group import MPI

        world, send, receive = MPI.COMM_WORLD, whole.numpy(), other.numpy()
        of_mpi: dict[str, Callable[[], Any]] = {
            "all_gather": lambda: world.Allgather(part.numpy(), receive),
            "reduce_scatter": lambda: world.Reduce_scatter_block(send, part.numpy()),
            "all_to_all": lambda: world.Alltoall(send, receive),
            "gather": lambda: world.Gather(part.numpy(), receive if rank == 0 else None),
            "broadcast": lambda: world.Bcast(send),
        }
        contenders[PLAIN] = Contender(of_mpi[collective])
    return contenders


def contenders_on_gpu(tensor: torch.Tensor) -> dict[str, Contender]:
    other = tensor.clone()
    return {
        "nccl": Contender(lambda: dist.all_reduce(tensor)),
        COPY: Contender(lambda: other.copy_(tensor)),
    }


def set_thresholds(nbytes: int) -> None:
    """Makes glibc return freed memory to the system only from `nbytes` on.

    Open MPI's ring allocates a buffer in every call, whose pages the system would zero each time.
    """
    libc = ctypes.CDLL(None)
    m_trim_threshold, m_mmap_threshold = -1, -3
    libc.mallopt(m_mmap_threshold, nbytes)
    libc.mallopt(m_trim_threshold, nbytes)


def take_turns(
    contenders: dict[str, Contender], rounds: int, calls: int, device: torch.device
) -> dict[str, list[float]]:
    """Returns the seconds of a call on the slowest rank, by contender and round.

    A round is `calls` consecutive calls of each contender, since the time of a single call of a few
    microseconds depends on the call before. Three rounds before the first are not counted.
    """
    # Contenders take turns, so whatever slows the machine down slows all of them down.
    order = np.random.default_rng(0)  # the same on every rank, since calls are collective
    ways = list(contenders.values())
    times = torch.zeros(len(ways), rounds + 3, dtype=torch.float64, device=device)
    for turn in range(rounds + 3):
        for index in order.permutation(len(ways)):
            ways[index].before()
            dist.barrier()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            began = time.perf_counter()
            for _ in range(calls):
                ways[index].call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times[index, turn] = (time.perf_counter() - began) / calls
            ways[index].after()
    dist.all_reduce(times, dist.ReduceOp.MAX)  # a collective ends when it has ended on all ranks
    return dict(zip(contenders, times[:, 3:].tolist(), strict=True))


def report(
    collective: str,
    backend: str,
    dtype: str,
    ranks: int,
    times: dict[int, dict[str, list[float]]],
    folder: Path,
) -> None:
    names = list(next(iter(times.values())))
    rows = []
    for nbytes, of_size in times.items():
        row = [f"{nbytes:,}"]
        for name in names:
            bandwidth = bus_bandwidth(collective, name, ranks, nbytes, of_size[name])
            row.append(f"{1e6 * float(np.median(of_size[name])):,.0f} us {bandwidth:6.2f}")
        if "gloo" in names:
            row.append(f"{np.median(of_size[backend]) / np.median(of_size['gloo']):.2f}")
        rows.append(row)
    title = f"{collective}, {ranks} ranks, {dtype}"
    print(f"\n{title}: median time, and bus bandwidth in GB/s")
    last = [f"{backend} / gloo"] if "gloo" in names else []
    print(text_table(["bytes", *names, *last], rows), flush=True)
    name = f"{collective}-{backend}-{dtype}-{ranks}"
    settings: dict[str, Any] = {"benchmark": "allreduce", "collective": collective}
    settings |= {"backend": backend, "dtype": dtype, "nproc": ranks}
    write(name, f"{title}; seconds by bytes and contender", times, folder, **settings)
    lines: dict[str, list[tuple[float, float]]] = {}
    for nbytes, of_size in times.items():
        for contender, seconds in of_size.items():
            bandwidth = bus_bandwidth(collective, contender, ranks, nbytes, seconds)
            lines.setdefault(contender, []).append((nbytes, bandwidth))
    curves = {name: tuple(zip(*points, strict=True)) for name, points in lines.items()}
    draw_curves(name, title, "bus bandwidth, GB/s", {"bytes": curves}, folder, scale="log")


def bus_bandwidth(
    collective: str, name: str, ranks: int, nbytes: int, seconds: Sequence[float]
) -> float:
    """Returns GB/s for the median time."""
    # The factor makes numbers of ranks comparable, by the bytes that a ring sends per element. A
    # copy has the memory's own speed.
    factor = 1.0 if name == COPY else FACTORS[collective](ranks)
    return factor * nbytes / float(np.median(seconds)) / 1e9


if __name__ == "__main__":
    run_to_exit(main)
