"""python -m benchmarks.start_time: measures the time from a command to the end of one epoch.

Examples:
    python -m benchmarks.start_time                 1, 2, 8 and 16 ranks, 5 rounds
    python -m benchmarks.start_time --ranks 2 --rounds 20

A round runs every command once, in an order drawn for the round, and divides its time by that of
`python -c "import torch"` in the same round: the multiple holds on a busy machine, too. The epoch
itself, on the shipped digits, is a small part. torchrun runs the same program; each of its ranks is
a new Python.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np
from tqdm import tqdm

from benchmarks.harness.report import make_parser, write
from ddp_from_scratch import UsageError
from ddp_from_scratch.bench.results import Samples, text_table
from ddp_from_scratch.launch.environment import mpirun_command
from ddp_from_scratch.launch.rank_process import run_to_exit
from ddp_from_scratch.training.settings import MOST_HERE

REFERENCE = 'python -c "import torch"'
_TRAIN = ["-m", "ddp_from_scratch", "--epochs", "1", "--quiet"]


def main() -> int:
    parser = make_parser("benchmarks.start_time", __doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 8, 16], metavar="N")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of all commands (default: 5)")
    options = parser.parse_args()
    if options.rounds < 1 or not all(1 <= ranks <= MOST_HERE for ranks in options.ranks):
        raise UsageError(f"--rounds must be 1 or more, and --ranks 1 to {MOST_HERE}")
    measured = measure(commands(options.ranks), options.rounds)
    print(table(measured))
    title = "From the command to the end of one epoch"
    samples = [{"name": s.name, "milliseconds": s.milliseconds} for s in measured]
    settings = {"benchmark": "start_time", "ranks": options.ranks, "rounds": options.rounds}
    write("start_time", title, samples, options.results, **settings)
    return 0


def commands(ranks: Sequence[int]) -> dict[str, list[str]]:
    python = sys.executable
    found = {
        REFERENCE: [python, "-c", "import torch"],
        "run.py --help": [python, "-m", "ddp_from_scratch", "--help"],
    }
    for count in ranks:
        found[f"run.py, {count} ranks"] = [python, *_TRAIN, "--nproc", str(count)]
        torchrun = [python, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
        found[f"torchrun, {count} ranks"] = [*torchrun, *_TRAIN]
    found["mpirun -n 2"] = ["mpirun", "-n", "2", python, *_TRAIN, "--backend", "mpi"]
    return found


def measure(commands: dict[str, list[str]], rounds: int) -> list[Samples]:
    """Times each command once per round, in a changing order, after a warm-up of the reference."""
    mpirun, defaults = mpirun_command(2, [])
    environ = defaults | os.environ | {"OMP_NUM_THREADS": "1"}
    environ["PATH"] = os.pathsep.join([os.path.dirname(mpirun[0]), environ["PATH"]])
    order = np.random.default_rng(0)
    times: dict[str, list[float]] = {name: [] for name in commands}
    _time(commands[REFERENCE], environ)  # reads torch's files into the page cache
    for _ in tqdm(range(rounds), unit="round", disable=None, leave=False):
        for name in order.permutation(list(commands)):
            times[name].append(_time(commands[name], environ))
    return [Samples(name, milliseconds) for name, milliseconds in times.items()]


def _time(command: Sequence[str], environ: dict[str, str]) -> float:
    began = time.perf_counter()
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return 1e3 * (time.perf_counter() - began)


def table(measured: Sequence[Samples]) -> str:
    reference = next(samples for samples in measured if samples.name == REFERENCE)
    rows = []
    for samples in measured:
        ratio, low, high = samples.ratio_to(reference)
        seconds = f"{samples.quartiles[1] / 1e3:.2f}"
        rows.append((samples.name, seconds, f"{ratio:.2f}", f"{low:.2f} to {high:.2f}"))
    return text_table(("command", "seconds", "x import torch", "95 %"), rows)


if __name__ == "__main__":
    run_to_exit(main)
