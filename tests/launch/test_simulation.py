"""Elastic jobs with random failures, on a virtual clock (`tests/support/simulation.py`)."""

import pytest

from tests.support.simulation import Simulation
from tests.support.tiers import slow


@pytest.mark.parametrize("seeds", [range(40), slow(range(40, 160))], ids=["few", "many"])
def test_jobs_end_with_the_right_state_whatever_fails(seeds):
    wrong = {seed: sim.wrong for seed in seeds if (sim := Simulation(seed).run()).wrong}
    assert wrong == {}


def test_a_seed_repeats_exactly():
    first, second = (Simulation(5).run() for _ in range(2))
    assert (first.now, first.messages, first.said) == (second.now, second.messages, second.said)
