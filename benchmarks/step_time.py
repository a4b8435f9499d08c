"""How long a training step takes: the rungs of the ladder beside torch's DDP, in one run.

Examples:
    python -m benchmarks.step_time                    gloo and mpi, two processes
    python -m benchmarks.step_time --backend gloo --nproc 4
    python -m benchmarks.step_time --quick            fewer rounds

Prints a table for each backend and model; writes every sample, the versions and the machine to
benchmarks/results/.
"""

import argparse
import sys
from dataclasses import asdict

import torch
from tabulate import tabulate
from tqdm import tqdm

from benchmarks.measure import Samples, check_equal, interleave
from benchmarks.report import on_terminal, write
from benchmarks.strategies import NO_COMMUNICATION, REFERENCES, WORKLOADS, contenders
from ddp_from_scratch import UsageError, launch, process_group, start_ranks
from ddp_from_scratch.exit import run_to_exit
from ddp_from_scratch.supervisor import start_mpirun


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--backend", nargs="+", choices=("gloo", "mpi", "nccl"))
    parser.add_argument("--nproc", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--model", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=60, help="timed steps (default: 60)")
    parser.add_argument("--quick", action="store_true", help="10 rounds")
    options = parser.parse_args()
    if options.nproc < 1 or options.rounds < 2:
        raise UsageError("--nproc must be 1 or more and --rounds 2 or more")
    if options.quick:
        options.rounds = 10
    if launch.launcher() != "none":
        measure(options)
        return 0
    backends = options.backend or (["nccl"] if torch.cuda.is_available() else ["gloo", "mpi"])
    for backend in backends:
        rank = [sys.executable, "-m", "benchmarks.step_time", "--backend", backend]
        rank += ["--model", *options.model, "--rounds", str(options.rounds)]
        if backend == "mpi":
            code = start_mpirun(options.nproc, rank)
        else:
            code = start_ranks(rank, (options.nproc,))
        if code:
            return code
    return 0


def measure(options: argparse.Namespace) -> None:
    """A rank's part: times every model and, on rank 0, prints and writes."""
    (backend,) = options.backend
    torch.set_num_threads(1)
    with process_group(backend) as world:
        for name in options.model:
            workload = WORKLOADS[name]
            torch.manual_seed(world.rank)
            compared = contenders(workload, world.device)
            rounds = tqdm(
                range(options.rounds),
                desc=f"{backend}, {workload.name}",
                disable=world.rank != 0 or not on_terminal(),
                leave=False,
            )
            samples = interleave(compared, rounds, world.device)
            check_equal(compared)
            if world.rank == 0:
                title = f"{workload.name}; {backend}, {world.world_size} ranks"
                print(f"\n{title}, {options.rounds} steps each\n{table(samples)}", flush=True)
                file = f"step_time-{name}-{backend}-{world.world_size}"
                write(file, title, [asdict(s) for s in samples])


def table(samples: list[Samples]) -> str:
    """Median, quartiles, ratios to torch's DDP (its faster setting) and to no communication."""
    by_name = {s.name: s for s in samples}
    reference = min((by_name[name] for name in REFERENCES), key=lambda s: s.quartiles[1])
    rows = []
    for s in samples:
        low, median, high = s.quartiles
        ratio, ratio_low, ratio_high = s.ratio_to(reference)
        bare, _, _ = s.ratio_to(by_name[NO_COMMUNICATION])
        exposed = median - by_name[NO_COMMUNICATION].quartiles[1]
        rows.append(
            [
                s.name,
                f"{median:.1f}",
                f"{low:.1f} to {high:.1f}",
                f"{ratio:.2f}",
                f"{ratio_low:.2f} to {ratio_high:.2f}",
                f"{bare:.2f}",
                f"{exposed:.1f}",
            ]
        )
    headers = ["", "ms", "quartiles", "/ torch DDP", "95 %", "/ no comm.", "exposed ms"]
    return tabulate(rows, headers, disable_numparse=True, colalign=("left", *["right"] * 6))


if __name__ == "__main__":
    run_to_exit(main)
