"""python -m benchmarks.survive: kills ranks of a run at random moments, and compares the bits.

Examples:
    python -m benchmarks.survive                          20 kills of 4 ranks, also under torchrun
    python -m benchmarks.survive --kills 5 --no-torchrun  a drill of half a minute
    python -m benchmarks.survive --kills 5 --every 8 --epochs 300    the picture: some minutes
    python -m benchmarks.survive --kills 300 --epochs 2000 --no-torchrun    a soak

One run is undisturbed. Another one (`run.py --elastic`) loses ranks: kill -9 hits a random rank,
which may be rank 0, at random moments. Both must end with bit-identical checkpoints, or the exit
code is 1. The same kills then hit `torchrun --max-restarts`, which restarts all ranks from the
newest checkpoint. How to read the table, medians and the worst in ms:

    noticed     from the kill until the other ranks have left their group
    group       until they have a new one
    step        until the remaining ranks have finished the interrupted step
    together    the sum, which is the cost of a kill for the others
    joined      from the kill until as many ranks train as before
    kept        the virtual ranks of the interrupted step that need not run again
    a kill      how much longer the whole run took, per kill

If a second kill comes before the others continue, the first rows count only the second one.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import torch

from benchmarks.harness.report import draw_progress, make_parser, write
from ddp_from_scratch import UsageError
from ddp_from_scratch.bench.results import text_table
from ddp_from_scratch.launch.rank_process import run_to_exit
from ddp_from_scratch.training.settings import MOST_HERE

_CONTINUING = re.compile(
    r"continuing with (\d+) ranks .* after (\d+) ms, step completed (\d+) ms later(?: \((\d+) of)?"
)
_EPOCH = re.compile(r"epoch +(\d+)/")
_PARTS = ("noticed", "group", "step", "together", "kept")


@dataclass
class Run:
    """A run, as seen from outside: seconds from its start."""

    began: float = field(default_factory=time.monotonic)
    faults: list[tuple[float, str]] = field(default_factory=list)  # when, and what it was
    lines: list[tuple[float, str]] = field(default_factory=list)  # what it has printed, and when
    # When a new group had finished a step; its ranks; the ms of group and step; what was kept.
    regroupings: list[tuple[float, int, float, float, int]] = field(default_factory=list)
    epochs: list[tuple[float, int]] = field(default_factory=list)  # when each ended
    seconds: float = 0.0  # until its end
    state: dict[str, Any] = field(default_factory=dict)  # the last checkpoint

    def now(self) -> float:
        return time.monotonic() - self.began

    @property
    def kills(self) -> list[float]:
        return [at for at, _ in self.faults]


def main() -> int:
    options = parse(sys.argv[1:])
    train = ["--virtual-ranks", str(options.virtual_ranks), "--epochs", str(options.epochs)]
    ours = [*train, "--nproc", str(options.nproc), "--elastic"]
    ours += ["--max-restarts", str(2 * options.kills)]
    python = [sys.executable, "-m", "ddp_from_scratch"]
    kill = partial(kill_ranks, options.kills, options.every, options.seed)
    alone = observe([*python, *ours])
    killed = observe([*python, *ours], kill)
    different = differences(alone.state, killed.state)
    rows = list(table(killed, alone, options.nproc))
    if options.torchrun:
        launcher = ["torch.distributed.run", "--nproc-per-node", str(options.nproc)]
        launcher = [sys.executable, "-m", *launcher, "--max-restarts", str(2 * options.kills)]
        torchrun = [*launcher, "-m", "ddp_from_scratch", *train, "--resume", "auto"]
        rival_alone = observe(torchrun)
        rival = observe(torchrun, kill)
        rows.append(("a kill, torchrun", _per_kill(rival, rival_alone), None))
        if rival.state:
            different += [f"torchrun: {name}" for name in differences(alone.state, rival.state)]
        draw_progress(
            f"survive-{options.kills}",
            f"{options.kills} kills of {options.nproc} ranks",
            {
                "this library, --elastic": (killed.epochs, killed.faults),
                "torchrun, --max-restarts": (rival.epochs, rival.faults),
            },
            options.results,
        )
    cells = [[name, *("" if v is None else f"{v:,.0f}" for v in values)] for name, *values in rows]
    print(text_table(("", "median", "worst"), cells))
    for name in different:
        print(f"not the same bits: {name}")
    if not different:
        count = len(list(tensors(alone.state)))
        print(
            f"{len(killed.kills)} kills: all {count} tensors of the checkpoint have the same bits"
        )
    settings = {name: value for name, value in vars(options).items() if name != "results"}
    write(
        f"survive-{options.kills}",
        "Runs of which ranks were killed",
        [{"name": name, "median": middle, "worst": worst} for name, middle, worst in rows],
        options.results,
        benchmark="survive",
        **settings,
    )
    return 1 if different else 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("benchmarks.survive", __doc__)
    parser.add_argument("--kills", type=int, default=20, help="kills (default: 20)")
    parser.add_argument(
        "--every",
        type=float,
        default=1.5,
        help="mean seconds between two kills; a rank takes up to 2 to join (default: 1.5)",
    )
    parser.add_argument("--nproc", type=int, default=4, help="ranks (default: 4)")
    parser.add_argument("--virtual-ranks", type=int, default=8, help="default: 8")
    parser.add_argument("--epochs", type=int, default=150, help="default: 150")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random kills (default: 0)")
    parser.add_argument(
        "--no-torchrun", dest="torchrun", action="store_false", help="leave torchrun out"
    )
    options = parser.parse_args(arguments)
    if not 1 <= options.nproc <= MOST_HERE or min(options.kills, options.epochs) < 1:
        raise UsageError("--nproc, --kills and --epochs must be 1 or more")
    if not options.every > 0:
        raise UsageError(f"--every must be more than 0 seconds, got {options.every:g}")
    return options


def observe(
    command: Sequence[str],
    disturb: Callable[[Run, int], None] | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Run:
    """Runs a command, and reads its last checkpoint.

    `disturb` runs beside it in a thread, with what is known of the run and the command's process.

    Raises:
        RuntimeError: the command failed.
    """
    run = Run()
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [*command, "--checkpoint-dir", folder],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        )
        beside = threading.Thread(target=disturb or (lambda *_: None), args=[run, process.pid])
        beside.start()
        assert process.stdout is not None, "a pipe"
        for line in process.stdout:
            run.lines.append((run.now(), line))
            if found := _CONTINUING.search(line):
                ranks, group, step, kept = map(int, found.groups("0"))
                run.regroupings.append((run.now(), ranks, group, step, kept))
            if found := _EPOCH.match(line):
                run.epochs.append((run.now(), int(found[1])))
        code = process.wait()
        run.seconds = run.now()
        beside.join()
        if code:
            last = "".join(line for _, line in run.lines[-40:])
            raise RuntimeError(f"{' '.join(command)} ended with {code}:\n{last}")
        newest = max(Path(folder).glob("checkpoint-*.pt"))
        run.state = torch.load(newest, weights_only=True)
    return run


def kill_ranks(kills: int, every: float, seed: int, run: Run, process: int) -> None:
    """Kills ranks at random moments, from the end of the first epoch until the run ends."""
    dice = random.Random(seed)
    while not run.epochs and is_there(process):
        time.sleep(0.05)
    while len(run.faults) < kills and is_there(process):
        time.sleep(dice.uniform(0.2 * every, 1.8 * every))
        if ranks := sorted(_ranks(process)):
            with suppress(ProcessLookupError):
                victim = dice.choice(ranks)
                run.faults.append((run.now(), "kill -9 of a rank"))
                os.kill(victim, signal.SIGKILL)


def is_there(process: int) -> bool:
    """True until the process has ended."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _ranks(process: int) -> Iterator[int]:
    """Yields the pids of ranks, the leaves of the process tree."""
    for child in _children(process):
        # torchrun's ranks are its children; ours are children of the process that forks them.
        of_torchrun = "torch.distributed.run" in _command(process)
        ranks = [child] if of_torchrun else _children(child)
        yield from filter(is_there, ranks)


def _children(process: int) -> Iterator[int]:
    try:
        for thread in Path(f"/proc/{process}/task").iterdir():
            yield from map(int, (thread / "children").read_text().split())
    except OSError:
        return


def _command(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return ""


def tensors(state: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yields all tensors of a checkpoint with their paths in it."""
    if isinstance(state, torch.Tensor):
        yield name, state
    elif isinstance(state, (dict, list, tuple)):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        for key, value in items:
            yield from tensors(value, f"{name}/{key}")


def differences(one: Any, other: Any) -> list[str]:
    """Returns the names of tensors that are not bit-identical in both."""
    left, right = dict(tensors(one)), dict(tensors(other))
    bits = {
        name: name in left and name in right and _bits(left[name]) == _bits(right[name])
        for name in left | right
    }
    return [name for name, same in bits.items() if not same]


def _bits(tensor: torch.Tensor) -> tuple[torch.Size, bytes]:
    return tensor.shape, tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


# A row of the table: its name, median and worst.
Row = tuple[str, float, float | None]


def table(run: Run, alone: Run, nproc: int) -> Iterator[Row]:
    lost, joined = [], []
    ends = [*run.kills[1:], run.seconds]
    for killed, end in zip(run.kills, ends, strict=True):
        events = [event for event in run.regroupings if killed < event[0] < end]
        for at, ranks, group, step, kept in events:
            if ranks < nproc:
                together = 1e3 * (at - killed)
                lost.append((together - group - step, group, step, together, kept))
                break
        if back := next((event[0] for event in events if event[1] == nproc), None):
            joined.append(1e3 * (back - killed))
    for name, column in zip(_PARTS, zip(*lost, strict=True), strict=False):
        yield name, median(column), min(column) if name == "kept" else max(column)
    if joined:
        yield "joined", median(joined), max(joined)
    yield "a kill", _per_kill(run, alone), None


def _per_kill(run: Run, alone: Run) -> float:
    """The mean, since only the whole run was timed."""
    return 1e3 * (run.seconds - alone.seconds) / max(len(run.kills), 1)


if __name__ == "__main__":
    run_to_exit(main)
