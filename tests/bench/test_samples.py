"""bench/samples.py: ratios at numbers one can work out by hand."""

from ddp_from_scratch.bench.samples import Samples


def test_a_ratio_is_taken_pair_by_pair():
    other = Samples("b", [1.0, 10.0, 100.0])  # a machine that gets slower
    assert Samples("a", [2.0, 20.0, 200.0]).ratio_to(other) == (2.0, 2.0, 2.0)
    middle, low, high = Samples("a", [1.0, 20.0, 300.0]).ratio_to(other)
    assert (middle, low, high) == (2.0, 1.0, 3.0)
    assert Samples("a", [2.0, 11.0, 101.0]).minus(other) == (1.0, 1.0, 1.0)


def test_runs_that_share_no_rounds_are_compared_by_their_medians():
    one, other = Samples("a", [3.0, 1.0, 2.0]), Samples("b", [4.0, 4.0])
    middle, low, high = one.unpaired_ratio_to(other)
    assert (middle, low, high) == (0.5, 0.25, 0.75)
