"""bench/quiet.py: a busy machine is noticed, with as many ranks as cores and with more."""

import os

import pytest

from ddp_from_scratch.bench.quiet import CpuUse, busy_seconds, disturbance, parse_busy
from ddp_from_scratch.bench.samples import Samples

# user nice system idle iowait irq softirq steal guest guest_nice
STAT = """cpu  9 9 9 9 9 9 9 9 9 9
cpu0 1 2 4 500 500 500 500 8 500 500
cpu1 10 20 40 500 500 500 500 80 500 500
cpu12 100 200 400 500 500 500 500 800 500 500
intr 1 2 3
"""


def steps(wall, cpu):
    return Samples("no communication", [wall] * 3, [cpu] * 3)


def test_ticks_of_the_processors_that_may_be_used():
    assert parse_busy(STAT, {0}) == 15
    assert parse_busy(STAT, {0, 12}) == 15 + 1500
    with pytest.raises(ValueError, match="invalid literal"):
        parse_busy("cpu0 one two three", {0})


def test_this_machine_says_how_busy_it_is():
    if not os.path.exists("/proc/stat"):
        pytest.skip("no /proc/stat")
    before = busy_seconds(os.sched_getaffinity(0))
    assert sum(range(3_000_000)) > 0
    assert busy_seconds(os.sched_getaffinity(0)) >= before > 0


def processors(world):
    use = CpuUse()
    others = use.others()
    assert others is None or others >= 0
    return use.processors


def test_ranks_may_be_bound_to_processors_of_their_own(ranks):
    assert ranks("gloo", 2)(processors) == [os.sched_getaffinity(0)] * 2


@pytest.mark.parametrize(
    ("alone", "others", "ranks", "expected"),
    [
        (steps(12.9, 10.0), 0.5, 2, None),  # its ranks had their cores
        (steps(13.1, 10.0), 0.0, 2, "a step without communication takes 1.31 x its CPU time"),
        (steps(29.0, 10.0), 0.1, 4, None),  # they take turns
        (steps(25.0, 10.0), 0.2, 4, "other processes took 20 % of the processors' time"),
        (steps(25.0, 10.0), None, 4, None),
        (None, 0.05, 2, None),
        (None, 0.2, 2, "other processes took 20 %"),
    ],
)
def test_disturbance(alone, others, ranks, expected):
    found = disturbance(alone, others, ranks, cores=2)
    assert found is None if expected is None else expected in found
