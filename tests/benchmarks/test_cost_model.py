"""harness/costs.py: formulas at sizes one can work out by hand, and the fit."""

import numpy as np
import pytest

from benchmarks.harness import costs
from benchmarks.harness.costs import Link, Shape, Terms, fit, ring


def test_algorithms_by_hand():
    # Two ranks: half of 8 bytes each way, twice; each adds half. Four: 3 times a quarter, twice.
    assert ring(2, 8) == Terms(2, 8, 4)
    assert ring(4, 8) == Terms(6, 12, 6)
    # Half and a quarter, and back.
    assert costs.halving_doubling(4, 8) == Terms(4, 12, 6)
    # The third rank gives all it has to another first, and gets all of it last.
    assert costs.halving_doubling(3, 8) == Terms(2 + 2, 8 + 16, 4 + 8)
    # Two rounds up, two down, all of it each time.
    assert costs.tree(4, 8) == Terms(4, 32, 16)
    # Two meetings of one round; in and out; its half of both.
    assert costs.shared_memory(2, 8) == Terms(2, 16, 4)
    for algorithm in (ring, costs.halving_doubling, costs.tree, costs.shared_memory):
        assert algorithm(1, 1000) == Terms(0, 0, 0)
    # Two hosts of two ranks, 8 bytes. In a host: 2 messages, 8 bytes. Across: 2 messages of a
    # quarter of the bytes each rank, 2 ranks through one wire: 8 bytes.
    found = costs.hierarchical(2, 2, 8, Link(1, 0.5, 0), Link(10, 2, 0))
    assert found == 2 * 1 + 8 * 0.5 + 2 * 10 + 8 * 2
    # 4 MB a layer: the first bucket is closed at 1 MB, the others at 25.
    nbytes = 4 * 1024 * 1025
    assert Shape(16, 1024, 1).buckets() == [nbytes, 7 * nbytes, 7 * nbytes, nbytes]


def test_fit():
    # No time is negative: without that condition the best would be 2 and -1.
    assert fit([[1, 1], [2, 3], [1, 0]], [1.0, 1.0, 2.0]).min() >= 0
    # Errors are relative: 1 byte a second for most, although the large one says 2.
    (beta,) = fit([[1], [2], [4], [1000]], [1.0, 2.0, 4.0, 2000.0])
    assert beta == pytest.approx((3 + 0.5) / (3 + 0.25))


LINK, COMPUTE = Link(1e-4, 1e-9, 1e-10), np.array((2e-11, 3e-9, 5e-5))
SHAPES = [Shape(4, 64, 8), Shape(16, 64, 8), Shape(4, 256, 16), Shape(8, 512, 4), Shape(2, 512, 8)]
SIZES = [4**k for k in range(5, 13)]


def simulated(ranks, cores=2, factor=1.0):
    """What a machine would measure that is as the model says, times `factor`."""
    slower = factor * costs.oversubscribed(ranks, cores)

    def seconds(shape, averages):
        work = (shape.parameters * shape.batch, shape.parameters, shape.layers)
        buckets = shape.buckets() if averages else []
        return slower * (COMPUTE @ work + sum(LINK.seconds(ring(ranks, n)) for n in buckets))

    return costs.Measured(
        ranks,
        cores,
        {n: slower * LINK.seconds(ring(ranks, n)) for n in SIZES},
        {n: slower * LINK.seconds(Terms(0, 0, n)) for n in SIZES},
        {shape: seconds(shape, averages=False) for shape in SHAPES},
        {shape: seconds(shape, averages=True) for shape in SHAPES} if ranks > 1 else {},
    )


def test_the_model_recovers_a_machine_that_is_as_it_says_and_tells_its_errors():
    runs = [simulated(n) for n in (1, 2, 4, 8)]
    model = costs.fit_model(runs, ring)
    assert (model.link.alpha, model.link.beta) == pytest.approx((LINK.alpha, LINK.beta))
    assert model.compute == pytest.approx(COMPUTE)
    kinds = ["all-reduce, held-out sizes", "step alone, held-out models"]
    kinds += ["all-reduce, 8 ranks", "step alone, 8 ranks"]
    assert set(model.errors) == {*kinds, *(f"averaged step, {n} ranks" for n in (2, 4, 8))}
    assert all(errors.worst < 1e-6 for errors in model.errors.values())
    # What is held out is not fitted.
    runs[3] = simulated(8, factor=2.0)
    runs[1].all_reduce[sorted(runs[1].all_reduce)[1]] *= 4
    model = costs.fit_model(runs, ring)
    assert model.link.beta == pytest.approx(LINK.beta)
    assert model.errors["all-reduce, held-out sizes"].worst == pytest.approx(0.75)
    for kind in kinds[2:]:
        assert model.errors[kind].median == pytest.approx(0.5)
