"""Thirty of `fuzz.py`'s random programs."""

import pytest
from fuzz import run


@pytest.mark.parametrize(
    ("backend", "world_size", "count"), [("gloo", 2, 14), ("gloo", 3, 8), ("mpi", 2, 8)]
)
def test_random_programs_do_what_one_process_does(ranks, backend, world_size, count):
    total = run(lambda: ranks(backend, world_size), world_size, count, seed=4)
    assert total["cases"] >= count
