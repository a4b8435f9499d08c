"""The cost model of a training step by the number of ranks, and its fit to measurements.

`python -m benchmarks.cost_model --help` describes the model.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from ddp_from_scratch.core.layout import assign, bucket_caps


@dataclass(frozen=True)
class Terms:
    """Parts of an all-reduce on the rank that does most."""

    messages: float  # one after another
    sent: float  # bytes, one after another
    added: float  # bytes, to others

    def __mul__(self, factor: float) -> "Terms":
        return Terms(self.messages * factor, self.sent * factor, self.added * factor)

    def __add__(self, other: "Terms") -> "Terms":
        return Terms(
            self.messages + other.messages, self.sent + other.sent, self.added + other.added
        )


@dataclass(frozen=True)
class Link:
    """A connection between two ranks or two hosts."""

    alpha: float  # seconds per message, however small
    beta: float  # seconds per byte
    gamma: float  # seconds to add a byte to another

    def seconds(self, terms: Terms) -> float:
        return terms.messages * self.alpha + terms.sent * self.beta + terms.added * self.gamma


def ring(ranks: int, nbytes: float) -> Terms:
    """Reduce-scatter and all-gather around a ring, 1/n of the bytes at a time."""
    part = (ranks - 1) / ranks * nbytes
    return Terms(2 * (ranks - 1), 2 * part, part)


def halving_doubling(ranks: int, nbytes: float) -> Terms:
    """Recursive halving, then recursive doubling (Rabenseifner).

    If n is not a power of two, the extra ranks first send their elements to others and receive the
    result last, which adds two messages of all bytes.
    """
    whole = 2 ** (ranks.bit_length() - 1)
    part = (whole - 1) / whole * nbytes
    terms = Terms(2 * math.log2(whole), 2 * part, part)
    return terms if whole == ranks else terms + Terms(2, 2 * nbytes, nbytes)


def tree(ranks: int, nbytes: float) -> Terms:
    """A binomial tree to one rank, and back."""
    # Each round sends the whole tensor, which suits small ones, whose messages dominate.
    rounds = (ranks - 1).bit_length()
    return Terms(2 * rounds, 2 * rounds * nbytes, rounds * nbytes)


def shared_memory(ranks: int, nbytes: float) -> Terms:
    """This library's mpi backend on one machine, for a tensor outside of shared memory.

    For each megabyte, the ranks copy it in, meet, add 1/n of it each, meet, and copy it out.
    Messages are the rounds of the meetings' dissemination barriers.
    """
    if ranks == 1:
        return Terms(0, 0, 0)
    pieces = max(1, math.ceil(nbytes / 2**20))
    meetings = 2 * pieces * (ranks - 1).bit_length()
    return Terms(meetings, 2 * nbytes, (ranks - 1) / ranks * nbytes)


def hierarchical(hosts: int, per_host: int, nbytes: float, within: Link, across: Link) -> float:
    """Returns the seconds of an all-reduce that crosses the wire once per host, not per rank.

    1. Reduce-scatter within each host, so each of its p ranks holds 1/p of the host's sum.
    2. A ring over the hosts for each of the p parts, all at once over the host's one wire.
    3. All-gather within each host.
    """
    in_host = within.seconds(ring(per_host, nbytes))
    part = ring(hosts, nbytes / per_host)
    # The parts share one wire, so their bytes add up; their messages overlap.
    shared = Terms(part.messages, part.sent * per_host, part.added)
    return in_host + across.seconds(shared)


def oversubscribed(ranks: int, cores: int) -> float:
    """Returns the factor by which everything takes longer if ranks share cores."""
    return max(1.0, ranks / cores)


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> np.ndarray:
    """Returns non-negative coefficients with the least squares of relative errors.

    With so few coefficients, it tries every set of them that may be zero.

    Args:
        rows: by measurement, how often each coefficient counts.
        seconds: the measurements.

    Raises:
        ValueError: fewer measurements than coefficients, or one that took no time.
    """
    design, measured = np.array(rows, dtype=float), np.array(seconds, dtype=float)
    if design.ndim != 2 or len(design) < design.shape[1] or (measured <= 0).any():
        raise ValueError(
            f"the fit needs at least as many measurements as coefficients, all longer than 0 s; "
            f"got a table of shape {design.shape}"
        )
    # Relative, since otherwise only the largest measurements would count.
    relative = design / measured[:, None]
    # Columns of similar size, since rounding would lose the smallest coefficients.
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
    """Relative errors of predictions, |predicted / measured - 1|; 0.1 is ten percent."""

    count: int  # of measurements
    median: float
    worst: float

    def __str__(self) -> str:
        return f"{100 * self.median:.0f} % (worst {100 * self.worst:.0f} %, {self.count} measured)"


@dataclass(frozen=True, order=True)
class Shape:
    """A model of equal layers, Linear(width, width), and each rank's batch size."""

    layers: int
    width: int
    batch: int

    @property
    def parameters(self) -> int:
        return self.layers * self.width * (self.width + 1)

    def buckets(self) -> list[int]:
        """Returns the bytes of each bucket of a Reducer with default caps."""
        gradients = [
            (4 * numel, "float32")
            for _ in range(self.layers)
            for numel in (self.width, self.width**2)
        ]
        layouts = assign(gradients, range(len(gradients)), bucket_caps(None))
        return [sum(gradients[index][0] for index in members) for members in layouts]


@dataclass(frozen=True)
class Measured:
    """Measurements of one run of scaling.py; times are in seconds."""

    ranks: int
    cores: int
    all_reduce: dict[int, float]  # by bytes
    add: dict[int, float]  # of additions, by bytes
    alone: dict[Shape, float]  # of steps without communication
    averaged: dict[Shape, float]  # of steps with a Reducer


Algorithm = Callable[[int, float], Terms]
ALGORITHMS: Mapping[str, Algorithm] = {"gloo": ring, "mpi": shared_memory}


@dataclass(frozen=True)
class Model:
    """The model fitted to one backend's runs."""

    link: Link  # of its all-reduce
    compute: tuple[float, float, float]  # seconds per sample x parameter, per parameter, per layer
    errors: dict[str, Errors]  # by group of held-out measurements

    def compute_seconds(self, samples: float, parameters: float, layers: float) -> float:
        per_sample, per_parameter, per_layer = self.compute
        return parameters * (samples * per_sample + per_parameter) + layers * per_layer


def held_out(position: int) -> bool:
    """True for every third measurement, which is predicted instead of fitted."""
    return position % 3 == 1


def fit_model(runs: Sequence[Measured], algorithm: Algorithm, most: int = 4) -> Model:
    """Fits runs of up to `most` ranks, without every third measurement, and predicts the rest.

    Raises:
        ValueError: too few measurements.
    """
    fitted_terms, held_terms = [], []  # (group, row, seconds)
    fitted_steps, held_steps = [], []
    for run in runs:
        # Scales every row, so the coefficients are those of a rank with its own core.
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
        for position, (shape, seconds) in enumerate(sorted(run.alone.items())):
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
    for run in runs:  # averaged steps, which are never fitted
        slower = oversubscribed(run.ranks, run.cores)
        for shape, seconds in run.averaged.items():
            terms = sum((algorithm(run.ranks, b) for b in shape.buckets()), Terms(0, 0, 0))
            predicted = float(np.dot(_step_row(shape), compute)) + link.seconds(terms)
            group = f"averaged step, {run.ranks} ranks"
            pairs.setdefault(group, []).append((slower * predicted, seconds))
    errors = {}
    for group, found in pairs.items():
        predictions, measured = np.array(found).T
        off = np.abs(predictions / measured - 1)
        errors[group] = Errors(len(off), float(np.median(off)), float(off.max()))
    return Model(link, (float(compute[0]), float(compute[1]), float(compute[2])), errors)


def _row(terms: Terms) -> list[float]:
    return [terms.messages, terms.sent, terms.added]


def _step_row(shape: Shape) -> list[float]:
    return [shape.batch * shape.parameters, shape.parameters, shape.layers]
