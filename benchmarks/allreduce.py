"""python -m benchmarks.allreduce: times an all-reduce by size, beside plain MPI and a memory copy.

Examples:
    python -m benchmarks.allreduce                     2 ranks, float32, 256 B to 64 MB
    python -m benchmarks.allreduce --nproc 2 4 --dtype float32 bfloat16
    python -m benchmarks.allreduce --quick             fewer sizes and rounds

One MPI job holds all contenders, which take turns: gloo (a group beside the mpi group), mpi with
an ordinary tensor, mpi with a tensor from `mpi.empty`, and mpi4py's blocking Allreduce as it is, a
megabyte at a time, and with the allocator told to keep its pages (glibc). Where `deepspeed` can be
imported and built (a C++ compiler and ninja), its all-reduce in shared memory is one of them:
"DeepSpeed", whose ranks wait without giving up their cores. "mpi, alone" is the same
call in a group of one rank, which meets no other: for small tensors the time of torch's and this
library's Python. With a GPU for each rank nccl is measured, too. A turn is a single call from
1 MB on, and up to 50 in a row below. Bus bandwidth is 2 (n - 1) / n x bytes / time, as in
nccl-tests; for the copy of the same buffer it is bytes / time; a group of one has none. The slowest
rank counts.
"""

import argparse
import ctypes
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from benchmarks.harness import deepspeed, make_parser
from benchmarks.harness.launch import add_results_option
from benchmarks.harness.report import draw_lines
from ddp_from_scratch import UsageError, process_group, start_ranks
from ddp_from_scratch.bench.machine import on_terminal, write
from ddp_from_scratch.bench.verdict import text_table
from ddp_from_scratch.launch import environment
from ddp_from_scratch.launch.rank_process import run_to_exit
from ddp_from_scratch.launch.start import start_mpirun

SIZES = [4**k for k in range(4, 14)]
DTYPES = ("float32", "bfloat16", "float16", "float64")
COPY = "memory copy"
PLAIN = "mpi4py"
ALONE = "mpi, alone"


@dataclass(frozen=True)
class Contender:
    """A way to all-reduce.

    Attributes:
        call: timed.
        before, after: not timed.
    """

    call: Callable[[], Any]
    before: Callable[[], Any] = lambda: None
    after: Callable[[], Any] = lambda: None


def main() -> int:
    parser = make_parser("benchmarks.allreduce", __doc__)
    parser.add_argument("--nproc", type=int, nargs="+", default=[2], help="ranks (default: 2)")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32"])
    parser.add_argument(
        "--bytes",
        type=int,
        nargs="+",
        default=SIZES,
        metavar="N",
        help="default: 4^4 to 4^13",
    )
    parser.add_argument("--quick", action="store_true", help="every other size, a third the rounds")
    parser.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)  # for ranks
    add_results_option(parser)
    options = parser.parse_args()
    if min(options.nproc) < 2 or min(options.bytes) < 8:
        raise UsageError("--nproc must be 2 or more and --bytes 8 or more")
    if environment.launcher() != "none":
        measure(options)
        return 0
    for count in options.nproc:
        rank = [sys.executable, "-m", "benchmarks.allreduce", "--nproc", str(count)]
        rank += ["--dtype", *options.dtype, "--bytes", *map(str, options.bytes)]
        rank += ["--quick"] * options.quick + ["--results", str(options.results)]
        if reason := deepspeed.missing(count):
            print(f"without {deepspeed.NAME}: {reason}", flush=True)
        else:
            rank.append("--deepspeed")
        if code := start_mpirun(count, rank):
            return code
        if torch.cuda.device_count() >= count and (code := start_ranks(rank, (count,))):
            return code
    return 0


def measure(options: argparse.Namespace) -> None:
    """A rank's part: times every dtype and size and, on rank 0, prints, writes and draws."""
    torch.set_num_threads(1)  # a rank has one core, as in training
    backend = "mpi" if environment.launcher() == "mpirun" else "nccl"
    with process_group(backend) as world:
        rival = deepspeed.SharedMemory() if options.deepspeed and backend == "mpi" else None
        for dtype in options.dtype:
            sizes = sorted(options.bytes)[:: 2 if options.quick else 1]
            watched = world.rank == 0 and on_terminal()
            progress = tqdm(sizes, f"{backend}, {dtype}", disable=not watched, leave=False)
            make = contenders_on_cpu if backend == "mpi" else contenders_on_gpu
            times: dict[int, dict[str, list[float]]] = {}
            for nbytes in progress:
                compared = make(nbytes, getattr(torch, dtype), world.device)
                if rival is not None:
                    compared |= contender_of(rival, nbytes, getattr(torch, dtype))
                # Small calls are noisy and cheap: more rounds for them, many in a row.
                rounds = max(5, min(200, 2**29 // nbytes)) // (3 if options.quick else 1)
                calls = max(1, min(50, 2**20 // nbytes))
                times[nbytes] = take_turns(compared, max(rounds, 3), calls, world.device)
            if world.rank == 0:
                report(backend, dtype, world.world_size, times, options.results)


def contenders_on_cpu(
    nbytes: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Contender]:
    """Every way to all-reduce a tensor of zeros, and the copy."""
    from ddp_from_scratch import mpi
    from ddp_from_scratch.backend.mpi_transport import MPI

    # Once for all sizes: a group costs a thread and connections.
    if "gloo" not in _groups:
        _groups["gloo"] = dist.new_group(backend="gloo")
        ranks = range(dist.get_world_size())
        _groups["alone"] = [dist.new_group([rank]) for rank in ranks][dist.get_rank()]
    numel = nbytes // dtype.itemsize
    tensor, other, window = torch.zeros(numel, dtype=dtype), torch.zeros(numel, dtype=dtype), None
    window = mpi.empty(numel, dtype)
    window.zero_()  # also touches its pages, which exist only then
    contenders: dict[str, Contender] = {
        "gloo": Contender(lambda: dist.all_reduce(tensor, group=_groups["gloo"])),
        "mpi": Contender(lambda: dist.all_reduce(tensor)),
        "mpi, async": Contender(lambda: dist.all_reduce(tensor, async_op=True).wait()),
        "mpi, window": Contender(lambda: dist.all_reduce(window)),
        # A group of one meets nobody: what is left is torch's and this library's Python.
        ALONE: Contender(lambda: dist.all_reduce(tensor, group=_groups["alone"])),
        COPY: Contender(lambda: other.copy_(tensor)),
    }
    if dtype.itemsize > 2:  # MPI itself has no 16-bit floats
        flat, world = tensor.numpy(), MPI.COMM_WORLD
        # Pieces that stay in the cache, as in this library's own all-reduce.
        pieces = np.array_split(flat, max(1, nbytes // 2**20))

        def plain() -> None:
            world.Allreduce(MPI.IN_PLACE, flat)

        def in_pieces() -> None:
            for piece in pieces:
                world.Allreduce(MPI.IN_PLACE, piece)

        def keep_pages() -> None:
            set_thresholds(2**30)
            plain()  # untimed: leaves the pages that the next call finds

        contenders[PLAIN] = Contender(plain)
        contenders["mpi4py, 1 MB at a time"] = Contender(in_pieces)
        if sys.platform.startswith("linux"):
            contenders["mpi4py, pages kept"] = Contender(
                plain, before=keep_pages, after=lambda: set_thresholds(128 * 1024)
            )
    return contenders


_groups: dict[str, dist.ProcessGroup] = {}


def contender_of(
    rival: deepspeed.SharedMemory, nbytes: int, dtype: torch.dtype
) -> dict[str, Contender]:
    """DeepSpeed's all-reduce; empty where it has none of this dtype."""
    tensor = torch.zeros(nbytes // dtype.itemsize, dtype=dtype)
    call = Contender(lambda: rival.all_reduce(tensor))
    return {deepspeed.NAME: call} if rival.has(dtype) else {}


def contenders_on_gpu(
    nbytes: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Contender]:
    tensor = torch.zeros(nbytes // dtype.itemsize, dtype=dtype, device=device)
    other = tensor.clone()
    return {
        "nccl": Contender(lambda: dist.all_reduce(tensor)),
        COPY: Contender(lambda: other.copy_(tensor)),
    }


def set_thresholds(nbytes: int) -> None:
    """Sets the bytes from which on glibc gives freed memory back to the system.

    Open MPI's ring allocates a buffer on every call, and the system would fill its pages with zeros
    each time.
    """
    libc = ctypes.CDLL(None)
    m_trim_threshold, m_mmap_threshold = -1, -3
    libc.mallopt(m_mmap_threshold, nbytes)
    libc.mallopt(m_trim_threshold, nbytes)


def take_turns(
    contenders: dict[str, Contender], rounds: int, calls: int, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of a call in every round, of the slowest rank.

    A round is `calls` calls of each contender, one after another: the time of a single one of a few
    microseconds depends on the call before it. Three rounds before the first do not count.
    """
    # Interleaved as steps are: whatever slows the machine for a while slows all alike.
    order = np.random.default_rng(0)  # the same on every rank, or they would deadlock
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
    dist.all_reduce(times, dist.ReduceOp.MAX)  # an all-reduce has ended when it has on all ranks
    return dict(zip(contenders, times[:, 3:].tolist(), strict=True))


def report(
    backend: str, dtype: str, ranks: int, times: dict[int, dict[str, list[float]]], folder: Path
) -> None:
    """Prints the medians, writes all samples, draws bus bandwidth by size."""
    names = list(next(iter(times.values())))
    rows = []
    for nbytes, of_size in times.items():
        row = [f"{nbytes:,}"]
        for name in names:
            bandwidth = bus_bandwidth(name, ranks, nbytes, of_size[name])
            speed = "" if bandwidth is None else f" {bandwidth:6.2f}"
            row.append(f"{1e6 * float(np.median(of_size[name])):,.0f} us{speed}")
        rows.append(row)
    title = f"all-reduce, {ranks} ranks, {dtype}"
    print(f"\n{title}: median time, and bus bandwidth in GB/s")
    print(text_table(["bytes", *names], rows), flush=True)
    name = f"allreduce-{backend}-{dtype}-{ranks}"
    settings = {"benchmark": "allreduce", "backend": backend, "dtype": dtype, "nproc": ranks}
    write(name, f"{title}; seconds by bytes and contender", times, settings=settings, folder=folder)
    draw(name, title, ranks, times, folder)


def bus_bandwidth(name: str, ranks: int, nbytes: int, seconds: Sequence[float]) -> float | None:
    """GB/s, of the median; None for a group of one rank, which has no bus."""
    if name == ALONE:
        return None
    # As in nccl-tests: the bytes that a ring sends for each element, so that it compares over
    # numbers of ranks. A copy reads and writes each once: the memory's own speed.
    factor = 1.0 if name == COPY else 2 * (ranks - 1) / ranks
    return factor * nbytes / float(np.median(seconds)) / 1e9


def draw(
    name: str, title: str, ranks: int, times: Mapping[int, Mapping[str, list[float]]], folder: Path
) -> None:
    """Bus bandwidth by size, one line for each contender that has one."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for nbytes, of_size in times.items():
        for contender, seconds in of_size.items():
            bandwidth = bus_bandwidth(contender, ranks, nbytes, seconds)
            if bandwidth is not None:
                lines.setdefault(contender, []).append((nbytes, bandwidth))
    draw_lines(name, title, ("bytes", "bus bandwidth, GB/s"), lines, folder=folder)


if __name__ == "__main__":
    run_to_exit(main)
