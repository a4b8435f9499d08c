"""python -m benchmarks.drill: ranks are lost, slow and wrong in one run; the bits stay the same.

Examples:
    python -m benchmarks.drill                some minutes
    python -m benchmarks.drill --every 10     the same in less time

A run of four ranks with virtual ranks (`run.py --elastic --balance --recheck 1`) has five faults,
one after another: kill -9 of a rank; a rank sleeps in each of its virtual ranks, until the next
fault; kill -9 of rank 0; a rank computes wrongly; a rank is stopped (SIGSTOP). At its end a process
that has replaced another is on each rank. The same run on one rank, without a fault, must end with
the same bits, or the exit code is 1. The table shows when, what followed, and what it cost: how
much longer the run took until the next fault than at its median speed. On a busy machine the costs
mean nothing.
"""

import argparse
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.harness.faulty_run import FAULTS
from benchmarks.harness.report import draw_progress, make_parser, write
from benchmarks.survive import Run, differences, is_there, observe, tensors
from ddp_from_scratch import UsageError
from ddp_from_scratch.bench.results import text_table
from ddp_from_scratch.launch.rank_process import run_to_exit

NPROC, VIRTUAL_RANKS = 4, 8
Fault = tuple[str, Callable[[Path], None]]
_NAMED = re.compile(r"rank \d+ on \S+ computes wrongly")
_DEALT = re.compile(r"virtual ranks are assigned by speed: (.*); the last")


def main() -> int:
    options = parse(sys.argv[1:])
    epochs = (1 + len(list(faults()))) * options.every
    train = ["--virtual-ranks", str(VIRTUAL_RANKS), "--epochs", str(epochs)]
    elastic = ["--nproc", str(NPROC), "--elastic", "--max-restarts", "9"]
    elastic += ["--balance", "--recheck", "1"]
    program = [sys.executable, "-m", "benchmarks.harness.faulty_run"]
    with tempfile.TemporaryDirectory() as folder:
        act = partial(disturb, Path(folder), options.every)
        drilled = observe([*program, *train, *elastic], act, {FAULTS: folder})
    one = observe([sys.executable, "-m", "ddp_from_scratch", *train, "--nproc", "1"])
    rows = list(table(drilled))
    cells = [[f"{at:.1f}", fault, followed, f"{cost:.1f}"] for at, fault, followed, cost in rows]
    print(text_table(("at s", "", "what followed", "cost s"), cells))
    different = differences(one.state, drilled.state)
    for name in different:
        print(f"not the same bits: {name}")
    if not different:
        count = len(list(tensors(one.state)))
        print(f"all {count} tensors of the checkpoint have the bits of one rank without a fault")
    title = f"{NPROC} ranks of which some are lost, slow and wrong, and one rank without a fault"
    lines = {
        f"{NPROC} ranks, with faults": (drilled.epochs, drilled.faults),
        "1 rank": (one.epochs, []),
    }
    draw_progress("drill", title, lines, options.results, ("ours", "reference"))
    samples = [
        {"at_s": at, "fault": fault, "followed": followed, "cost_s": cost}
        for at, fault, followed, cost in rows
    ]
    settings = {"every": options.every, "nproc": NPROC, "virtual_ranks": VIRTUAL_RANKS}
    write("drill", title, samples, options.results, benchmark="drill", **settings)
    return 1 if different else 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("benchmarks.drill", __doc__)
    text = "epochs between two faults, and before and after all of them (default: 20)"
    parser.add_argument("--every", type=int, default=20, metavar="N", help=text)
    options = parser.parse_args(arguments)
    if options.every < 1:
        raise UsageError(f"--every must be 1 or more, got {options.every}")
    return options


def faults() -> Iterator[Fault]:
    """Yields names of faults, and what brings each about. Each hits another process of the first.

    The second ends the slowness before it kills; the numbers are those of processes of the job.
    """

    def send(number: signal.Signals, member: int, folder: Path) -> None:
        (folder / "slow-2").unlink(missing_ok=True)
        os.kill(int((folder / f"pid-{member}").read_text()), number)

    def tell(file: str, folder: Path) -> None:
        (folder / file).touch()

    yield "kill -9 of process 1", partial(send, signal.SIGKILL, 1)
    yield "process 2 is slow", partial(tell, "slow-2")
    yield "kill -9 of process 0", partial(send, signal.SIGKILL, 0)
    yield "process 3 computes wrongly", partial(tell, "wrong-3")
    yield "SIGSTOP of process 2", partial(send, signal.SIGSTOP, 2)


def disturb(folder: Path, every: int, run: Run, process: int) -> None:
    """Brings about a fault after so many epochs each, once all ranks train."""
    for number, (name, fault) in enumerate(faults(), 1):
        while not (_epoch(run) >= number * every and _is_complete(run)):
            if not is_there(process):
                return
            time.sleep(0.01)
        run.faults.append((run.now(), name))
        fault(folder)


def _epoch(run: Run) -> int:
    return run.epochs[-1][1] if run.epochs else 0


def _is_complete(run: Run) -> bool:
    return not run.regroupings or run.regroupings[-1][1] == NPROC


def table(run: Run) -> Iterator[tuple[float, str, str, float]]:
    """Yields when a fault was, its name, what followed, and its cost in seconds.

    Raises:
        UsageError: the run was over before the last fault.
    """
    if len(run.faults) < len(list(faults())):
        raise UsageError("the run ended before the last fault: give a larger --every")
    seconds, numbers = np.array(run.epochs).T

    def epochs_between(begin: float, end: float) -> float:
        return float(np.diff(np.interp([begin, end], seconds, numbers))[0])

    pace = np.median(np.diff(seconds))
    ends = [*(at for at, _ in run.faults[1:]), seconds[-1]]
    for (at, fault), end in zip(run.faults, ends, strict=True):
        cost = float(end - at - epochs_between(at, end) * pace)
        yield at, fault, ", ".join(what_followed(run, at, end)), cost


def what_followed(run: Run, at: float, end: float) -> Iterator[str]:
    """Yields what the run said between two moments, and when after the first."""
    lines = [(when - at, line) for when, line in run.lines if at < when < end]
    yield from (f"named after {s:.1f} s" for s, line in lines if _NAMED.search(line))
    groups = {ranks: when - at for when, ranks, *_ in run.regroupings if at < when < end}
    yield from (f"{ranks} ranks after {s:.1f} s" for ranks, s in groups.items())
    deals = [(s, found[1]) for s, line in lines if (found := _DEALT.search(line))]
    if deals and not groups:
        s, deal = deals[-1]
        counts = ", ".join(re.findall(r"runs (\d+)", deal))
        yield f"they run {counts} virtual ranks after {s:.1f} s"


if __name__ == "__main__":
    run_to_exit(main)
