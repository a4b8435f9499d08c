"""What a step costs by the number of ranks: a model fitted to benchmarks/scaling.py.

Examples:
    python -m benchmarks.cost_model                         after python -m benchmarks.scaling
    python -m benchmarks.cost_model --gbit 25 --latency-us 10 --per-host 8
    python -m benchmarks.cost_model --params 25.6e6 --layers 161 --batch 32

Prints what was fitted with its error on measurements that were held out, and predicts 8 to 4,096
ranks; arithmetic alone, nothing is started. Writes benchmarks/results/cost_model.json and .png.

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

More ranks than cores: ranks take turns on the cores, and what travels between them here is copied
by the same cores. So everything measured with n ranks on c cores is taken to last max(1, n / c)
times as long. Whether that holds is part of the error that is stated: runs with more than 4 ranks
are held out, and told apart. Predictions are for ranks with a core each, as fast as one here.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
from tabulate import tabulate

from benchmarks.report import RESULTS, draw_lines, write
from ddp_from_scratch import UsageError
from ddp_from_scratch.exit import run_to_exit
from ddp_from_scratch.layout import Gradient, assign_buckets, bucket_caps

RANKS = [2**k for k in range(3, 13)]


# Arithmetic -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Terms:
    """What an all-reduce consists of, on the rank that does most.

    Attributes:
        messages: one after another.
        sent: bytes, one after another.
        added: bytes that are added to others.
    """

    messages: float
    sent: float
    added: float

    def __mul__(self, factor: float) -> "Terms":
        return Terms(self.messages * factor, self.sent * factor, self.added * factor)

    def __add__(self, other: "Terms") -> "Terms":
        return Terms(
            self.messages + other.messages, self.sent + other.sent, self.added + other.added
        )


@dataclass(frozen=True)
class Link:
    """Between two ranks, or two hosts.

    Attributes:
        alpha: seconds a message, however small.
        beta: seconds a byte.
        gamma: seconds to add a byte to another.
    """

    alpha: float
    beta: float
    gamma: float

    def seconds(self, terms: Terms) -> float:
        """How long so much takes."""
        return terms.messages * self.alpha + terms.sent * self.beta + terms.added * self.gamma


def ring(ranks: int, nbytes: float) -> Terms:
    """Reduce-scatter and all-gather around a ring, 1/n of the bytes at a time."""
    part = (ranks - 1) / ranks * nbytes
    return Terms(2 * (ranks - 1), 2 * part, part)


def halving_doubling(ranks: int, nbytes: float) -> Terms:
    """Recursive halving, then recursive doubling (Rabenseifner).

    Where n is no power of two the ranks beyond hand their elements to others first and get the
    result last: two messages of B more.
    """
    whole = 2 ** (ranks.bit_length() - 1)
    part = (whole - 1) / whole * nbytes
    terms = Terms(2 * math.log2(whole), 2 * part, part)
    return terms if whole == ranks else terms + Terms(2, 2 * nbytes, nbytes)


def tree(ranks: int, nbytes: float) -> Terms:
    """A binomial tree to one rank, and back."""
    rounds = (ranks - 1).bit_length()
    return Terms(2 * rounds, 2 * rounds * nbytes, rounds * nbytes)


def shared_memory(ranks: int, nbytes: float) -> Terms:
    """This library's mpi backend on one machine, for a tensor that is not in shared memory.

    A megabyte at a time: copy in, meet, each rank adds its 1/n of everybody's, meet, copy out.
    Messages are the rounds of the meetings' dissemination barriers.
    """
    if ranks == 1:
        return Terms(0, 0, 0)
    pieces = max(1, math.ceil(nbytes / 2**20))
    meetings = 2 * pieces * (ranks - 1).bit_length()
    return Terms(meetings, 2 * nbytes, (ranks - 1) / ranks * nbytes)


def hierarchical(hosts: int, per_host: int, nbytes: float, within: Link, across: Link) -> float:
    """Seconds of an all-reduce that crosses the wire once for each host, not for each rank.

    1. Reduce-scatter in each host: its p ranks hold 1/p of the host's sum each.
    2. A ring over the hosts for each of the p parts, at a time and through the host's one wire.
    3. All-gather in each host.
    """
    in_host = within.seconds(ring(per_host, nbytes))
    part = ring(hosts, nbytes / per_host)
    shared = Terms(part.messages, part.sent * per_host, part.added)
    return in_host + across.seconds(shared)


def oversubscribed(ranks: int, cores: int) -> float:
    """How much longer everything takes where ranks share cores."""
    return max(1.0, ranks / cores)


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> np.ndarray:
    """Coefficients, 0 or more, of the least squares of relative errors.

    With few coefficients every set of them that may be zero is tried.

    Args:
        rows: for each measurement, how often each coefficient counts.
        seconds: what was measured.

    Raises:
        ValueError: fewer measurements than coefficients, or one that took no time.
    """
    design, measured = np.array(rows, dtype=float), np.array(seconds, dtype=float)
    if design.ndim != 2 or len(design) < design.shape[1] or (measured <= 0).any():
        raise ValueError(
            f"the fit needs at least as many measurements as coefficients, all longer than 0 s; "
            f"got a table of shape {design.shape}"
        )
    relative = design / measured[:, None]
    # Columns of like size, or the smallest coefficients are lost to rounding.
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0] = 1.0
    best, least = np.zeros(design.shape[1]), np.inf
    for count in range(1, design.shape[1] + 1):
        for kept in combinations(range(design.shape[1]), count):
            columns = (relative / scale)[:, kept]
            found = np.linalg.lstsq(columns, np.ones(len(measured)), rcond=None)[0]
            error = float(np.square(columns @ found - 1).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(design.shape[1]), error
                best[list(kept)] = found
    return best / scale


@dataclass(frozen=True)
class Errors:
    """Relative errors of predictions, |predicted / measured - 1|.

    Attributes:
        count: of measurements.
        median, worst: as shares, 0.1 is ten percent.
    """

    count: int
    median: float
    worst: float

    @staticmethod
    def of(predicted: Sequence[float], measured: Sequence[float]) -> "Errors":
        """Those of predictions and what was measured, in the same order."""
        if not measured:
            return Errors(0, math.nan, math.nan)
        off = np.abs(np.array(predicted) / np.array(measured) - 1)
        return Errors(len(off), float(np.median(off)), float(off.max()))

    def __str__(self) -> str:
        if not self.count:
            return "nothing"
        return f"{100 * self.median:.0f} % (worst {100 * self.worst:.0f} %, {self.count} measured)"


# Measurements ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A model of equal layers, Linear(width, width), and the batch of each rank."""

    layers: int
    width: int
    batch: int

    @property
    def parameters(self) -> int:
        """Their number."""
        return self.layers * self.width * (self.width + 1)

    def buckets(self) -> list[int]:
        """Bytes of each bucket of a Reducer with its default caps."""
        gradients = [
            Gradient(numel, 4 * numel, "float32")
            for _ in range(self.layers)
            for numel in (self.width, self.width**2)
        ]
        layouts = assign_buckets(gradients, range(len(gradients)), bucket_caps(None))
        return [4 * layout.numel for layout in layouts]


@dataclass(frozen=True)
class Measured:
    """What one run of scaling.py has measured, with so many ranks; times in seconds.

    Attributes:
        ranks, cores: of the run.
        all_reduce: by bytes.
        add: by bytes, of adding them to others.
        alone: steps without communication.
        averaged: steps with a Reducer.
    """

    ranks: int
    cores: int
    all_reduce: dict[int, float]
    add: dict[int, float]
    alone: dict[Shape, float] = field(default_factory=dict)
    averaged: dict[Shape, float] = field(default_factory=dict)


Algorithm = Callable[[int, float], Terms]
ALGORITHMS: Mapping[str, Algorithm] = {"gloo": ring, "mpi": shared_memory}


@dataclass(frozen=True)
class Model:
    """What was fitted to one backend's runs.

    Attributes:
        link: of the backend's all-reduce.
        compute: seconds for each sample x parameter, parameter, layer.
        errors: by what was held out.
    """

    link: Link
    compute: tuple[float, float, float]
    errors: dict[str, Errors]

    def compute_seconds(self, samples: float, parameters: float, layers: float) -> float:
        """A step of one rank by itself."""
        per_sample, per_parameter, per_layer = self.compute
        return parameters * (samples * per_sample + per_parameter) + layers * per_layer


def held_out(position: int) -> bool:
    """Every third is not fitted, but predicted."""
    return position % 3 == 1


def fit_model(runs: Sequence[Measured], algorithm: Algorithm, most: int = 4) -> Model:
    """Fits to runs of up to `most` ranks, less every third measurement, and predicts the rest.

    Raises:
        ValueError: too few measurements.
    """
    fitted_terms, held_terms = [], []  # (group, row, seconds)
    fitted_steps, held_steps = [], []
    for run in runs:
        slower = oversubscribed(run.ranks, run.cores)
        beyond = run.ranks > most
        group = f"{run.ranks} ranks" if beyond else "held-out sizes"
        for position, (nbytes, seconds) in enumerate(sorted(run.all_reduce.items())):
            if run.ranks > 1:
                terms = algorithm(run.ranks, nbytes) * slower
                entry = (f"all-reduce, {group}", _row(terms), seconds)
                (held_terms if beyond or held_out(position) else fitted_terms).append(entry)
        for nbytes, seconds in run.add.items():
            if not beyond:
                fitted_terms.append(("", _row(Terms(0, 0, nbytes) * slower), seconds))
        for position, (shape, seconds) in enumerate(sorted(run.alone.items(), key=_by_shape)):
            row = [slower * part for part in _step_row(shape)]
            kind = f"{run.ranks} ranks" if beyond else "held-out models"
            entry = (f"step alone, {kind}", row, seconds)
            (held_steps if beyond or held_out(position) else fitted_steps).append(entry)
    link = Link(*fit([row for _, row, _ in fitted_terms], [s for *_, s in fitted_terms]))
    compute = fit([row for _, row, _ in fitted_steps], [s for *_, s in fitted_steps])
    pairs: dict[str, list[tuple[float, float]]] = {}
    known = np.array([link.alpha, link.beta, link.gamma])
    for (group, row, seconds), coefficients in [
        *((entry, known) for entry in held_terms),
        *((entry, compute) for entry in held_steps),
    ]:
        pairs.setdefault(group, []).append((float(np.dot(row, coefficients)), seconds))
    for run in runs:  # none of these was fitted
        slower = oversubscribed(run.ranks, run.cores)
        for shape, seconds in run.averaged.items():
            terms = sum((algorithm(run.ranks, b) for b in shape.buckets()), Terms(0, 0, 0))
            predicted = float(np.dot(_step_row(shape), compute)) + link.seconds(terms)
            group = f"averaged step, {run.ranks} ranks"
            pairs.setdefault(group, []).append((slower * predicted, seconds))
    errors = {
        group: Errors.of([p for p, _ in found], [m for _, m in found])
        for group, found in pairs.items()
    }
    return Model(link, (float(compute[0]), float(compute[1]), float(compute[2])), errors)


def _row(terms: Terms) -> list[float]:
    return [terms.messages, terms.sent, terms.added]


def _step_row(shape: Shape) -> list[float]:
    return [shape.batch * shape.parameters, shape.parameters, shape.layers]


def _by_shape(item: tuple[Shape, float]) -> tuple[int, int, int]:
    return item[0].layers, item[0].width, item[0].batch


# Prediction -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """A step over so many ranks; seconds.

    Attributes:
        ranks: their number.
        compute: of the step alone.
        all_reduce: by algorithm.
    """

    ranks: int
    compute: float
    all_reduce: dict[str, float]

    def efficiency(self, algorithm: str, hidden: bool) -> float:
        """What the step alone is of the whole, with all or none of the communication hidden.

        Hidden at best is what runs beside backward, two thirds of the computation.
        """
        travel = self.all_reduce[algorithm]
        if hidden:
            travel = max(0.0, travel - 2 / 3 * self.compute)
        return self.compute / (self.compute + travel)


def predict(
    compute: float, nbytes: float, within: Link, across: Link, per_host: int,
    ranks: Sequence[int] = RANKS,
) -> list[Prediction]:  # fmt: skip
    """All-reduces of `nbytes` by flat algorithms, over `across` throughout, and by hierarchy.

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


# The command ----------------------------------------------------------------------------------


def main() -> int:
    options = parse(sys.argv[1:])
    found = {backend: read(backend) for backend in ALGORITHMS}
    runs = {backend: measured for backend, measured in found.items() if measured}
    if not runs:
        raise UsageError("no measurements: run python -m benchmarks.scaling first")
    tell(runs, options)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line.

    Raises:
        UsageError: a value out of its range.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cost_model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--gbit",
        type=float,
        help="speed of a host's wire in Gbit/s (default: what gloo reached here between ranks)",
    )
    parser.add_argument(
        "--latency-us", type=float, help="of a message between hosts (default: as gloo's here)"
    )
    parser.add_argument("--per-host", type=int, default=8, help="ranks on a host (default: 8)")
    parser.add_argument("--params", type=float, default=16.8e6, help="(default: 16.8e6, 67 MB)")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=16, help="samples of a rank (default: 16)")
    options = parser.parse_args(arguments)
    for name in ("gbit", "latency_us", "per_host", "params", "layers", "batch"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise UsageError(f"--{name.replace('_', '-')} must be positive, got {value}")
    return options


def read(backend: str) -> list[Measured]:
    """What scaling.py has left of a backend, by ranks."""
    runs = []
    for path in RESULTS.glob(f"scaling-{backend}-*.json"):
        runs.append(measured(json.loads(path.read_text())["samples"]))
    return sorted(runs, key=lambda run: run.ranks)


def measured(samples: Mapping[str, Any]) -> Measured:
    """Medians of one run's samples, in seconds."""
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


def tell(runs: Mapping[str, Sequence[Measured]], options: argparse.Namespace) -> None:
    """Fits, prints, writes and draws."""
    models = {backend: fit_model(of, ALGORITHMS[backend]) for backend, of in runs.items()}
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
    print("\nfitted, with up to 4 ranks; for a rank that has a core of its own")
    print(tabulate(rows, headers, disable_numparse=True, stralign="right"))
    rows = [
        [backend, group, str(errors)]
        for backend, model in models.items()
        for group, errors in model.errors.items()
    ]
    print("\npredicted, not fitted: median of |predicted / measured - 1|")
    print(tabulate(rows, ["", "what", "error"], disable_numparse=True), flush=True)

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
    title = (
        f"{4 * options.params / 1e6:.0f} MB of gradients, {options.per_host} ranks on a host, "
        f"{8 / across.beta / 1e9:.3g} Gbit/s and {1e6 * across.alpha:.0f} us between hosts"
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
    write("cost_model", title, content)
    draw_lines("cost_model", title, ("ranks", "ms, predicted"), lines)


def prediction_table(predictions: Sequence[Prediction]) -> str:
    """All-reduces by algorithm, and weak scaling's efficiency with two of them."""
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
    return f"{tabulate(rows, headers, disable_numparse=True, stralign='right')}\n{note}"


def _speed(seconds_per_byte: float) -> str:
    return f"{1e-9 / seconds_per_byte:.2f} GB/s" if seconds_per_byte else "not seen"


def _of(samples: int, seconds: float) -> str:
    """6 operations for each sample and parameter: 2 in forward, 4 in backward."""
    return f"{6 * samples / seconds / 1e9:.0f}" if seconds else "not seen"


if __name__ == "__main__":
    run_to_exit(main)
