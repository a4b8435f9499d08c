"""harness/costs.py, cost_model.py: formulas at sizes one can work out by hand, and the fit."""

import json
import math

import numpy as np
import pytest

from benchmarks import cost_model
from benchmarks.cost_model import predict
from benchmarks.harness.costs import (
    Errors,
    Link,
    Measured,
    Shape,
    Terms,
    fit,
    fit_model,
    halving_doubling,
    hierarchical,
    oversubscribed,
    ring,
    shared_memory,
    tree,
)
from benchmarks.harness.report import pyplot


def test_algorithms_by_hand():
    # Two ranks: half of 8 bytes each way, twice; each adds half.
    assert ring(2, 8) == Terms(2, 8, 4)
    # Four: three times a quarter, twice.
    assert ring(4, 8) == Terms(6, 12, 6)
    # Half and a quarter, and back.
    assert halving_doubling(4, 8) == Terms(4, 12, 6)
    # The third rank gives all it has to another first, and gets all of it last.
    assert halving_doubling(3, 8) == Terms(2 + 2, 8 + 16, 4 + 8)
    # Two rounds up, two down, all of it each time.
    assert tree(4, 8) == Terms(4, 32, 16)
    assert tree(3, 8) == tree(4, 8)
    # Two meetings of one round; in and out; its half of both.
    assert shared_memory(2, 8) == Terms(2, 16, 4)
    assert shared_memory(4, 3 * 2**20) == Terms(2 * 3 * 2, 6 * 2**20, 3 / 4 * 3 * 2**20)


@pytest.mark.parametrize("algorithm", [ring, halving_doubling, tree, shared_memory])
def test_one_rank_needs_nobody(algorithm):
    assert algorithm(1, 1000) == Terms(0, 0, 0)


def test_ring_and_halving_send_as_little_and_differ_in_messages():
    for ranks in (2, 8, 64):
        a, b = ring(ranks, 1e6), halving_doubling(ranks, 1e6)
        assert (a.sent, a.added) == (b.sent, b.added)
        assert (a.messages, b.messages) == (2 * (ranks - 1), 2 * math.log2(ranks))


def test_hierarchical_by_hand():
    within, across = Link(1, 0.5, 0), Link(10, 2, 0)
    # Two hosts of two ranks, 8 bytes. In a host: 2 messages, 8 bytes. Across: 2 messages of a
    # quarter of the bytes each rank, 2 ranks through one wire: 8 bytes.
    assert hierarchical(2, 2, 8, within, across) == 2 * 1 + 8 * 0.5 + 2 * 10 + 8 * 2
    # One rank a host is a ring, one host too.
    assert hierarchical(4, 1, 8, within, across) == across.seconds(ring(4, 8))
    assert hierarchical(1, 4, 8, within, across) == within.seconds(ring(4, 8))


def test_hierarchy_sends_two_thirds_of_a_flat_ring_with_two_ranks_on_two_hosts():
    wire = Link(0, 1, 0)
    flat = wire.seconds(ring(4, 900))
    assert hierarchical(2, 2, 900, Link(0, 0, 0), wire) == pytest.approx(2 / 3 * flat)


def test_sharing_cores():
    assert [oversubscribed(ranks, 2) for ranks in (1, 2, 4, 8)] == [1, 1, 2, 4]


def test_fit_finds_what_the_times_were_made_of():
    true = np.array([3e-5, 2e-9, 1e-10])
    rows = [
        [t.messages, t.sent, t.added]
        for n in (2, 4, 8)
        for t in (ring(n, 1e3), ring(n, 1e6), ring(n, 1e8), Terms(0, 0, 1e6 * n))
    ]
    assert fit(rows, list(np.array(rows) @ true)) == pytest.approx(true, rel=1e-6)


def test_fit_has_no_negative_times():
    # The best without that condition would be 2 and -1.
    assert fit([[1, 1], [2, 3], [1, 0]], [1.0, 1.0, 2.0]).min() >= 0


def test_fit_takes_relative_errors():
    # 1 byte a second for most, although the large one says 2.
    (beta,) = fit([[1], [2], [4], [1000]], [1.0, 2.0, 4.0, 2000.0])
    assert beta == pytest.approx((3 + 0.5) / (3 + 0.25))


@pytest.mark.parametrize(("rows", "seconds"), [([[1, 2]], [1.0]), ([[1], [2]], [0.0, 1.0])])
def test_fit_refuses(rows, seconds):
    with pytest.raises(ValueError, match="the fit needs"):
        fit(rows, seconds)


def test_errors():
    errors = Errors.of([1.1, 1.0, 0.5], [1.0, 1.0, 1.0])
    assert errors.count == 3
    assert errors.median == pytest.approx(0.1)
    assert errors.worst == pytest.approx(0.5)
    assert str(errors) == "10 % (worst 50 %, 3 measured)"
    assert str(Errors.of([], [])) == "nothing"


LINK, COMPUTE = Link(1e-4, 1e-9, 1e-10), (2e-11, 3e-9, 5e-5)
SHAPES = [Shape(4, 64, 8), Shape(16, 64, 8), Shape(4, 256, 16), Shape(8, 512, 4), Shape(2, 512, 8)]
SIZES = [4**k for k in range(5, 13)]


def simulated(ranks, cores=2, factor=1.0):
    """What a machine would measure that is as the model says, times `factor`."""
    slower = factor * oversubscribed(ranks, cores)

    def alone(shape):
        per_sample, per_parameter, per_layer = COMPUTE
        each = shape.batch * per_sample + per_parameter
        return shape.parameters * each + shape.layers * per_layer

    def averaged(shape):
        return alone(shape) + sum(LINK.seconds(ring(ranks, n)) for n in shape.buckets())

    return Measured(
        ranks,
        cores,
        {n: slower * LINK.seconds(ring(ranks, n)) for n in SIZES},
        {n: slower * LINK.seconds(Terms(0, 0, n)) for n in SIZES},
        {shape: slower * alone(shape) for shape in SHAPES},
        {shape: slower * averaged(shape) for shape in SHAPES} if ranks > 1 else {},
    )


def test_model_recovers_a_machine_that_is_as_it_says():
    model = fit_model([simulated(n) for n in (1, 2, 4, 8)], ring)
    assert model.link.alpha == pytest.approx(LINK.alpha)
    assert model.link.beta == pytest.approx(LINK.beta)
    assert model.compute == pytest.approx(COMPUTE)
    assert {group: errors.worst < 1e-6 for group, errors in model.errors.items()} == {
        "all-reduce, held-out sizes": True,
        "all-reduce, 8 ranks": True,
        "step alone, held-out models": True,
        "step alone, 8 ranks": True,
        "averaged step, 2 ranks": True,
        "averaged step, 4 ranks": True,
        "averaged step, 8 ranks": True,
    }


def test_what_is_held_out_is_not_fitted_and_its_error_is_told():
    runs = [simulated(1), simulated(2), simulated(4), simulated(8, factor=2.0)]
    model = fit_model(runs, ring)
    assert model.link.beta == pytest.approx(LINK.beta)
    assert model.errors["all-reduce, held-out sizes"].worst < 1e-6
    assert model.errors["all-reduce, 8 ranks"].median == pytest.approx(0.5)
    assert model.errors["step alone, 8 ranks"].median == pytest.approx(0.5)
    wrong = sorted(runs[1].all_reduce)[1]
    runs[1].all_reduce[wrong] *= 4
    model = fit_model(runs, ring)
    assert model.link.beta == pytest.approx(LINK.beta)
    assert model.errors["all-reduce, held-out sizes"].worst == pytest.approx(0.75)


def test_buckets_are_the_reducers():
    assert Shape(1, 4, 1).buckets() == [4 * 4 * 5]
    # 4 MB a layer: the first bucket is closed at 1 MB, the others at 25.
    nbytes = 4 * 1024 * 1025
    assert Shape(16, 1024, 1).buckets() == [nbytes, 7 * nbytes, 7 * nbytes, nbytes]


def test_efficiency():
    (one,) = predict(0.3, 1e6, Link(0, 0, 0), Link(0, 5e-8, 0), per_host=1, ranks=[2])
    assert one.all_reduce["ring"] == pytest.approx(0.05)
    assert one.efficiency("ring", hidden=False) == pytest.approx(0.3 / 0.35)
    assert one.efficiency("ring", hidden=True) == 1.0


def test_command_reads_predicts_and_draws(tmp_path, capsys):
    for ranks in (1, 2, 4):
        run = simulated(ranks)
        cases = [
            {"layers": s.layers, "width": s.width, "batch": s.batch}
            | {"alone": [1e3 * run.alone[s]], "averaged": [1e3 * run.averaged.get(s, 1.0)]}
            for s in SHAPES
        ]
        samples = {
            "ranks": ranks,
            "cores": 2,
            "all_reduce": {n: [s] for n, s in run.all_reduce.items()},
            "add": {n: [s] for n, s in run.add.items()},
            "cases": cases,
        }
        file = tmp_path / f"scaling-gloo-{ranks}.json"
        file.write_text(json.dumps({"samples": samples}))
    assert cost_model.read("mpi", tmp_path) == []
    runs = {"gloo": cost_model.read("gloo", tmp_path)}
    assert [run.ranks for run in runs["gloo"]] == [1, 2, 4]
    cost_model.report(runs, cost_model.parse(["--per-host", "4", "--results", str(tmp_path)]))
    printed = capsys.readouterr().out
    assert "100 us" in printed  # alpha
    assert "0 % (worst 0 %," in printed
    assert "4,096" in printed
    content = json.loads((tmp_path / "cost_model.json").read_text())["samples"]
    assert [p["ranks"] for p in content["predictions"]] == [2**k for k in range(3, 13)]
    if pyplot is not None:
        assert (tmp_path / "cost_model.png").stat().st_size > 0
