"""python -m benchmarks.host_time: measures what a Reducer's Python costs, on one rank.

Examples:
    python -m benchmarks.host_time                10 seconds for each line of two tables
    python -m benchmarks.host_time --quick        1 second each; the numbers are rough
    python -m benchmarks.host_time --rounds 500

One process, gloo, one thread. All times are process time (CPU), so a busy machine disturbs them
less than a clock. What a line compares takes turns, in a new random order each round, and no other
Reducer is there, since several take care of each other's order. A turn is six passes or steps in a
row, of which the first only warms the caches: training, too, runs one program over and over.
Brackets hold the 95 % bootstrap interval.

The first table: a backward pass of 32 layers of 64 x 64 in 1, 4 and 16 buckets, beyond the same
pass without a Reducer. With nothing to average, a Reducer on one rank neither packs nor launches.
So each of its buckets goes through a comm hook as a program would write it, which all-reduces the
bucket's buffer. "nothing sent" is the same Reducer with a hook that returns a finished future: what
is left without the collective. torch's DDP is measured without a hook, when it launches in C++, and
with torch's own `allreduce_hook`; ratios are to the faster of the two with the same buckets and
views. "a bucket more" is a fifteenth of the difference between 16 buckets and 1.

The second table: a training step of an MLP (batch 64, 784 inputs, 1024 wide) on one rank, and
the same step without a Reducer. torch's optimizer has `fused=True`. "ddp.SGD" steps after
`backward()`, the rows with "backward_and_step" in one call.
"""

import argparse
import gc
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.report import make_parser, write
from ddp_from_scratch import Reducer, UsageError, process_group
from ddp_from_scratch.bench.contenders import (
    NO_COMMUNICATION,
    TORCH_BEST,
    ContenderSpec,
    alone,
    contenders,
    flat,
    reducer,
    torch_ddp,
)
from ddp_from_scratch.bench.results import Samples, median_interval, text_table
from ddp_from_scratch.bench.timing import WARM_UP, rounds_for
from ddp_from_scratch.bench.workloads import Workload
from ddp_from_scratch.launch.rank_process import run_to_exit

IN_A_ROW = 5
LAYERS, WIDTH = 32, 64
BUCKETS = (1, 4, 16)
BYTES = LAYERS * WIDTH * (WIDTH + 1) * 4
OURS, NOTHING_SENT = "Reducer", "Reducer, nothing sent"
TORCHS, TORCHS_HOOKED = "torch DDP", "torch DDP, allreduce_hook"
VIEWS: dict[str, Any] = {"gradient_as_bucket_view": True}

MLP = Workload(
    "MLP, 784 to 1024 to 1024 to 10, batch 64",
    lambda: nn.Sequential(
        *(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    ),
    lambda: (torch.randn(64, 784), torch.randint(10, (64,))),
)
STEPS = [
    ContenderSpec("Reducer", reducer()),
    ContenderSpec("Reducer, views", reducer(**VIEWS)),
    ContenderSpec("ddp.SGD", flat()),
    ContenderSpec("ddp.SGD, backward_and_step", flat(at_once=True)),
    ContenderSpec("ddp.SGD, shard=node, backward_and_step", flat("node", at_once=True)),
    ContenderSpec("ddp.SGD, shard=world, backward_and_step", flat("world", at_once=True)),
    ContenderSpec("torch DDP", torch_ddp()),
    ContenderSpec("torch DDP, views", torch_ddp(**TORCH_BEST)),
]


@dataclass
class Timed:
    """A contender: `prepare` is not timed, `run` is."""

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


def main() -> int:
    options = parse(sys.argv[1:])
    torch.set_num_threads(1)
    with process_group("gloo") as world:
        if world.world_size > 1:
            raise UsageError(f"host_time measures one rank, got {world.world_size}: no launcher")
        title = f"a backward pass of {LAYERS} layers of {WIDTH} x {WIDTH}; gloo, one rank"
        lines = {
            (count, views): measure(make_passes(count, views), options, title)
            for views in (False, True)
            for count in BUCKETS
        }
        print(f"\n{title}\n{table_of_passes(lines)}", flush=True)
        write_samples("host_time-backward", title, lines.values(), options)

        title = f"a training step: {MLP.name}; gloo, one rank"
        pairs = [measure(make_steps(spec, world.device), options, title) for spec in STEPS]
        print(f"\n{title}\n{table_of_steps(pairs)}", flush=True)
        write_samples("host_time-step", title, pairs, options)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("benchmarks.host_time", __doc__)
    parser.add_argument("--rounds", type=int, help="rounds of each line, instead of --seconds")
    parser.add_argument(
        "--seconds", type=float, help="seconds for each line, after warm-up (default: 10)"
    )
    parser.add_argument("--quick", action="store_true", help="1 second for each line")
    options = parser.parse_args(arguments)
    if options.seconds is None:
        options.seconds = 1.0 if options.quick else 10.0
    if not 0 < options.seconds < math.inf:
        raise UsageError(f"--seconds must be more than 0, got {options.seconds:g}")
    if options.rounds is not None and options.rounds < 2:
        raise UsageError(f"--rounds must be 2 or more, got {options.rounds}")
    return options


def measure(compared: Sequence[Timed], options: argparse.Namespace, title: str) -> list[Samples]:
    """Returns the process time of each contender in every round, the mean of a turn."""
    for _ in range(WARM_UP):
        for contender in compared:
            _time(contender)
    order = np.random.default_rng(0)
    times: list[list[float]] = [[] for _ in compared]
    for _ in rounds_for(options.seconds, options.rounds, torch.device("cpu"), title):
        for index in order.permutation(len(compared)):
            _, *turn = [_time(compared[index]) for _ in range(1 + IN_A_ROW)]
            times[index].append(sum(turn) / IN_A_ROW)
    return [Samples(c.name, each) for c, each in zip(compared, times, strict=True)]


def _time(contender: Timed) -> float:
    contender.prepare()
    began = time.process_time()
    contender.run()
    return 1e3 * (time.process_time() - began)


def write_samples(
    name: str, title: str, lines: Iterable[Sequence[Samples]], options: argparse.Namespace
) -> None:
    found = [
        {"line": number, "name": s.name, "milliseconds": s.milliseconds}
        for number, samples in enumerate(lines)
        for s in samples
    ]
    write(name, title, found, options.results, benchmark="host_time", backend="gloo", nproc=1)


# A backward pass --------------------------------------------------------------------------------


def all_reduce(_state: Any, bucket: Any) -> torch.futures.Future[Any]:
    """A comm hook as a program would write it. With one rank there is nothing to divide."""
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future()


def send_nothing(_state: Any, bucket: Any) -> torch.futures.Future[Any]:
    """A comm hook whose average is there at once."""
    future = torch.futures.Future[Any]()
    future.set_result(bucket.buffer())
    return future


all_reduce.one_collective = send_nothing.one_collective = True  # type: ignore[attr-defined]


def make_passes(count: int, views: bool) -> list[Timed]:
    gc.collect()  # the Reducers of the last line
    passes = [_pass(NO_COMMUNICATION, lambda model: model)]
    passes += [
        _pass(name_of(kind, count, views), _wrapper(kind, count, views))
        for kind in (OURS, NOTHING_SENT, TORCHS, TORCHS_HOOKED)
    ]
    return passes


def name_of(kind: str, count: int, views: bool) -> str:
    buckets = "1 bucket" if count == 1 else f"{count} buckets"
    return f"{kind}, {buckets}{', views' if views else ''}"


def _wrapper(kind: str, count: int, views: bool) -> Callable[[nn.Module], nn.Module]:
    def wrap(model: nn.Module) -> nn.Module:
        # A bucket is closed when its size reaches the cap: half a layer less than its layers.
        cap = BYTES / 2**20 * (1 / count - 1 / LAYERS / 2)
        settings: dict[str, Any] = {"bucket_cap_mb": cap}
        if kind in (OURS, NOTHING_SENT):
            ours = Reducer(model, gradient_as_bucket_view=views, **settings)
            ours.register_comm_hook(None, all_reduce if kind == OURS else send_nothing)
            _pass_once(model)  # lays the buckets out in the order of the gradients
            _check_count(len(ours.buckets), kind, count)
            return model
        best = TORCH_BEST | {"gradient_as_bucket_view": views}
        torchs = DistributedDataParallel(model, **settings, **best)
        if kind == TORCHS_HOOKED:
            torchs.register_comm_hook(None, allreduce_hook)
        for _ in range(3):  # the class tells in the third pass what it has laid out in the second
            _pass_once(torchs)
        sizes = torchs._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        _check_count(len(sizes.split(",")), kind, count)
        return torchs

    return wrap


def _pass_once(module: nn.Module) -> None:
    module(torch.ones(1, WIDTH)).sum().backward()


def _check_count(found: int, kind: str, count: int) -> None:
    if found != count:
        raise RuntimeError(f"{kind} has {found} buckets where {count} were to be measured")


def _pass(name: str, wrap: Callable[[nn.Module], nn.Module]) -> Timed:
    torch.manual_seed(0)
    module = wrap(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))))
    inputs, losses = torch.randn(4, WIDTH), list[torch.Tensor]()

    def prepare() -> None:
        module.zero_grad()
        losses.append(module(inputs).sum())

    return Timed(name, lambda: losses.pop().backward(), prepare)


def table_of_passes(lines: dict[tuple[int, bool], list[Samples]]) -> str:
    rows, plain = [], np.concatenate([line[0].milliseconds for line in lines.values()])
    for views in (False, True):
        found = {count: _beyond(lines[count, views]) for count in BUCKETS}
        for count, columns in found.items():
            rows.append([name_of("", count, views)[2:], *map(interval, columns)])
            rows[-1].append(_two_digits(ratio_of_medians(columns[0], best_of(columns[2:]))))
        # Lines may have different numbers of rounds.
        rounds = min(len(columns[0]) for columns in found.values())
        more = [
            (last[:rounds] - first[:rounds]) / (BUCKETS[-1] - BUCKETS[0])
            for first, last in zip(found[BUCKETS[0]], found[BUCKETS[-1]], strict=True)
        ]
        name = f"a bucket more{', views' if views else ''}"
        ratio = _two_digits(ratio_of_medians(more[0], best_of(more[2:])))
        rows.append([name, *map(interval, more), ratio])
    heads = ["us beyond no Reducer", OURS, NOTHING_SENT, TORCHS, TORCHS_HOOKED, "/ torch's best"]
    return f"{text_table(heads, rows)}\nwithout a Reducer: {interval(1e3 * plain)} us"


def _beyond(line: list[Samples]) -> list[NDArray[np.float64]]:
    """Returns microseconds beyond the same pass without a Reducer, for each contender."""
    plain = np.array(line[0].milliseconds)
    return [1e3 * (np.array(samples.milliseconds) - plain) for samples in line[1:]]


def best_of(columns: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    return min(columns, key=lambda column: float(np.median(column)))


def interval(values: NDArray[np.float64]) -> str:
    return "{:.0f} ({:.0f} to {:.0f})".format(*median_interval(values))


def ratio_of_medians(
    some: NDArray[np.float64], others: NDArray[np.float64]
) -> tuple[float, float, float]:
    """Returns the ratio of two medians of paired rounds, with its 95 % bootstrap interval."""
    # Not the median of the rounds' ratios: a difference of two times may come near to 0.
    rounds = np.random.default_rng(0).integers(len(some), size=(2000, len(some)))
    drawn = np.median(some[rounds], axis=1) / np.median(others[rounds], axis=1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(np.median(some) / np.median(others)), float(low), float(high)


# A step -----------------------------------------------------------------------------------------


def make_steps(spec: ContenderSpec, device: torch.device) -> list[Timed]:
    gc.collect()  # the Reducer of the last line
    torch.manual_seed(0)
    pair = [ContenderSpec(NO_COMMUNICATION, alone), spec]
    return [Timed(c.name, c.step) for c in contenders(MLP, device, pair, keep_start=False)]


def table_of_steps(pairs: Sequence[Sequence[Samples]]) -> str:
    rows = []
    for plain, ours in pairs:
        columns = [_two_digits(median_interval(np.array(s.milliseconds))) for s in (plain, ours)]
        rows.append([ours.name, *columns, _two_digits(ours.ratio_to(plain))])
    return text_table(["CPU ms per step", NO_COMMUNICATION, "with it", "ratio"], rows)


def _two_digits(interval: tuple[float, float, float]) -> str:
    return "{:.2f} ({:.2f} to {:.2f})".format(*interval)


if __name__ == "__main__":
    run_to_exit(main)
