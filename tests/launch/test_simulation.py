"""Elastic jobs with random failures, on a virtual clock (`simulation.py`)."""

import pytest

from tests.launch.simulation import simulate
from tests.support.tiers import slow


@pytest.mark.parametrize("first", [0, pytest.param(50, marks=slow)])
def test_jobs_end_with_the_right_state_whatever_fails(first):
    """One generation trains at a time, nobody waits for ever, and no step is lost or repeated."""
    wrong = {}
    for seed in range(first, 50 if first == 0 else 500):
        sim = simulate(seed)
        if sim.wrong:
            wrong[seed] = sim.wrong
    assert wrong == {}
