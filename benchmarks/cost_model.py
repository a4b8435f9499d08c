"""python -m benchmarks.cost_model: predicts a step by the number of ranks from benchmarks.scaling.

Examples:
    python -m benchmarks.cost_model                         after python -m benchmarks.scaling
    python -m benchmarks.cost_model --gbit 25 --latency-us 10 --per-host 8
    python -m benchmarks.cost_model --params 25.6e6 --layers 161 --batch 32

Prints the fitted model with its error on measurements that were held out, and predicts 8 to 4,096
ranks; arithmetic alone, nothing is started. Reads the files of scaling.py in --results, and writes
cost_model.json and .png there.

The model is Hockney's (1994), as used for collectives by Thakur, Rabenseifner and Gropp (2005): a
message of m bytes takes alpha + m beta, and adding m bytes to others takes m gamma. For an
all-reduce of B bytes over n ranks:

                        messages, alpha        bytes sent, beta    bytes added, gamma
    ring                2 (n - 1)              2 (n - 1)/n B       (n - 1)/n B
    halving, doubling   2 log2 n               2 (n - 1)/n B       (n - 1)/n B
    tree                2 log2 n               2 log2 n B          log2 n B
    hierarchical        ring among the ranks of a host that ends before the gathering, a ring among
                        hosts for each rank's 1/p, all p through one wire, gathering in the host

Ring: Patarasuk and Yuan (2009). Halving and doubling: Rabenseifner (2004). Tree: a binomial reduce
and a binomial broadcast. A step computes

    samples x parameters x s1 + parameters x s2 + layers x s3

with s1 for forward and backward, s2 for what passes over the parameters once (the optimizer,
clearing), s3 for what each layer costs however small it is.

More ranks than cores: ranks take turns on the cores, and the same cores copy what travels between
them here. So everything measured with n ranks on c cores is taken to last max(1, n / c) times as
long. The stated error includes this assumption: runs with more than 4 ranks are held out, and have
rows of their own. Predictions are for ranks with a core each, as fast as one here.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.costs import (
    ALGORITHMS,
    Link,
    Measured,
    Model,
    Shape,
    fit_model,
    halving_doubling,
    hierarchical,
    ring,
    tree,
)
from benchmarks.harness.launch import make_parser
from benchmarks.harness.report import draw_lines, write
from ddp_from_scratch import UsageError
from ddp_from_scratch.bench.verdict import text_table
from ddp_from_scratch.launch.rank_process import run_to_exit

RANKS = [2**k for k in range(3, 13)]
NUMBERS = ("gbit", "latency_us", "per_host", "params", "layers", "batch")  # options


@dataclass(frozen=True)
class Prediction:
    """A predicted step; times are in seconds."""

    ranks: int
    compute: float  # the step without communication
    all_reduce: dict[str, float]  # by algorithm

    def efficiency(self, algorithm: str, hidden: bool) -> float:
        """Returns the share of the step that computes.

        `hidden` hides as much communication as fits into backward, two thirds of the computation.
        """
        # Backward does four of a step's six operations.
        travel = self.all_reduce[algorithm]
        if hidden:
            travel = max(0.0, travel - 2 / 3 * self.compute)
        return self.compute / (self.compute + travel)


def predict(
    compute: float, nbytes: float, within: Link, across: Link, per_host: int,
    ranks: Sequence[int] = RANKS,
) -> list[Prediction]:  # fmt: skip
    """Predicts all-reduces of `nbytes` by flat algorithms, all over `across`, and by hierarchy.

    A flat algorithm is as slow as its slowest message, which crosses between hosts.
    """
    return [
        Prediction(
            n,
            compute,
            {
                "ring": across.seconds(ring(n, nbytes)),
                "tree": across.seconds(tree(n, nbytes)),
                "halving, doubling": across.seconds(halving_doubling(n, nbytes)),
                "hierarchical": hierarchical(
                    max(1, n // per_host), min(n, per_host), nbytes, within, across
                ),
            },
        )
        for n in ranks
    ]


def main() -> int:
    options = parse(sys.argv[1:])
    found = {backend: read(backend, options.results) for backend in ALGORITHMS}
    runs = {backend: measured for backend, measured in found.items() if measured}
    if not runs:
        raise UsageError(
            f"no measurements in {options.results}: run python -m benchmarks.scaling first"
        )
    report(runs, options)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("benchmarks.cost_model", __doc__)
    text = "speed of a host's wire in Gbit/s (default: what gloo reached here between ranks)"
    parser.add_argument("--gbit", type=float, help=text)
    text = "of a message between hosts (default: as gloo's here)"
    parser.add_argument("--latency-us", type=float, help=text)
    parser.add_argument("--per-host", type=int, default=8, help="ranks on a host (default: 8)")
    parser.add_argument("--params", type=float, default=16.8e6, help="(default: 16.8e6, 67 MB)")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=16, help="samples of a rank (default: 16)")
    options = parser.parse_args(arguments)
    for name in NUMBERS:
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise UsageError(f"--{name.replace('_', '-')} must be positive, got {value}")
    return options


def read(backend: str, folder: Path) -> list[Measured]:
    """Reads the measurements of scaling.py on a backend from this folder, by ranks."""
    runs = []
    for path in folder.glob(f"scaling-{backend}-*.json"):
        runs.append(measured(json.loads(path.read_text())["samples"]))
    return sorted(runs, key=lambda run: run.ranks)


def measured(samples: Mapping[str, Any]) -> Measured:
    """Returns the medians of one run's samples, in seconds."""
    steps: dict[str, dict[Shape, float]] = {"alone": {}, "averaged": {}}
    for case in samples["cases"]:
        shape = Shape(case["layers"], case["width"], case["batch"])
        for kind, found in steps.items():
            found[shape] = float(np.median(case[kind])) / 1e3
    return Measured(
        samples["ranks"],
        samples["cores"],
        {int(n): float(np.median(s)) for n, s in samples["all_reduce"].items()},
        {int(n): float(np.median(s)) for n, s in samples["add"].items()},
        steps["alone"],
        steps["averaged"] if samples["ranks"] > 1 else {},
    )


def report(runs: Mapping[str, Sequence[Measured]], options: argparse.Namespace) -> None:
    models = {backend: fit_model(of, ALGORITHMS[backend]) for backend, of in runs.items()}
    print("\nfitted, with up to 4 ranks; for a rank that has a core of its own")
    print(model_table(models))
    print("\npredicted, not fitted: median of |predicted / measured - 1|")
    rows = [
        [f"{backend}: {group}", str(errors)]
        for backend, model in models.items()
        for group, errors in model.errors.items()
    ]
    print(text_table(["", "error"], rows), flush=True)
    report_predictions(models, options)


def model_table(models: Mapping[str, Model]) -> str:
    rows = [
        [
            backend,
            f"{1e6 * m.link.alpha:.0f} us",
            _speed(m.link.beta),
            _speed(m.link.gamma),
            f"{_of(1, m.compute[0])} GFLOP/s",
            f"{1e9 * m.compute[1]:.2f} ns",
            f"{1e6 * m.compute[2]:.0f} us",
        ]
        for backend, m in models.items()
    ]
    headers = ["", "alpha", "1 / beta", "1 / gamma", "forward, backward", "a parameter", "a layer"]
    return text_table(headers, rows)


def report_predictions(models: Mapping[str, Model], options: argparse.Namespace) -> None:
    # Hosts use gloo's costs, whose bytes go through sockets on this machine, too.
    base = models.get("gloo") or next(iter(models.values()))
    inside = "mpi" if "mpi" in models else "gloo"
    within = models[inside].link
    across = Link(
        base.link.alpha if options.latency_us is None else options.latency_us / 1e6,
        base.link.beta if options.gbit is None else 8 / (options.gbit * 1e9),
        base.link.gamma,
    )
    compute = base.compute_seconds(options.batch, options.params, options.layers)
    predictions = predict(compute, 4 * options.params, within, across, options.per_host)
    speed = f"{8 / across.beta / 1e9:.3g} Gbit/s" if across.beta else "any speed"
    title = (
        f"{4 * options.params / 1e6:.0f} MB of gradients, {options.per_host} ranks on a host, "
        f"{speed} and {1e6 * across.alpha:.0f} us between hosts"
    )
    print(f"\npredicted all-reduce, ms: {title}, as {inside} in a host")
    print(f"a step alone takes {1e3 * compute:.0f} ms")
    print(prediction_table(predictions), flush=True)
    lines = {
        name: [(p.ranks, 1e3 * p.all_reduce[name]) for p in predictions]
        for name in predictions[0].all_reduce
    }
    lines["step alone"] = [(p.ranks, 1e3 * p.compute) for p in predictions]
    content = {
        "models": {backend: asdict(model) for backend, model in models.items()},
        "predictions": [asdict(p) for p in predictions],
    }
    settings = {name: getattr(options, name) for name in NUMBERS}
    write("cost_model", title, content, options.results, benchmark="cost_model", **settings)
    draw_lines("cost_model", title, ("ranks", "ms, predicted"), lines, options.results)


def prediction_table(predictions: Sequence[Prediction]) -> str:
    names = list(predictions[0].all_reduce)
    rows = []
    for p in predictions:
        row = [f"{p.ranks:,}", *(f"{1e3 * p.all_reduce[name]:,.0f}" for name in names)]
        for name in ("ring", "hierarchical"):
            none, all_of_it = (100 * p.efficiency(name, hidden) for hidden in (False, True))
            row.append(f"{none:.0f} to {all_of_it:.0f} %")
        rows.append(row)
    headers = ["ranks", *names, "efficiency, ring", "efficiency, hierarchical"]
    note = (
        "efficiency: the step alone / the step, from nothing hidden to all that backward can hide"
    )
    return f"{text_table(headers, rows)}\n{note}"


def _speed(seconds_per_byte: float) -> str:
    return f"{1e-9 / seconds_per_byte:.2f} GB/s" if seconds_per_byte else "not seen"


def _of(samples: int, seconds: float) -> str:
    """6 operations for each sample and parameter: 2 in forward, 4 in backward."""
    return f"{6 * samples / seconds / 1e9:.0f}" if seconds else "not seen"


if __name__ == "__main__":
    run_to_exit(main)
