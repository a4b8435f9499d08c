"""Thirty of `fuzz.py`'s random programs; what it has found is in the table of programs.

And a few of those of `fuzz_virtual_ranks.py`.
"""

import random

import pytest

pytest.importorskip("hypothesis")

from tests.support.fuzz import cases, check, run
from tests.support.fuzz_case import Backward, Case, Forward, Parameter
from tests.support.fuzz_virtual_ranks import check as check_virtual_ranks
from tests.support.fuzz_virtual_ranks import draw_case
from tests.support.tiers import slow


@pytest.mark.parametrize(
    ("backend", "world_size", "count"), [slow("gloo", 2, 14), ("gloo", 3, 8), ("mpi", 2, 8)]
)
def test_random_programs_do_what_one_process_does(ranks, backend, world_size, count):
    def check_one(case):
        return check(ranks(backend, world_size), case)

    assert run(check_one, cases(world_size), count, seed=4)["cases"] >= count


def test_a_difference_is_told_with_its_program(ranks, monkeypatch):
    """The oracle is made to average wrongly."""
    monkeypatch.setattr("tests.support.fuzz_oracle.Oracle._average", lambda self, indices: None)
    case = Case(2, (Parameter(2),), ((0,),), (Forward(((0,), (0,))), Backward()))
    told = r"gradients\[0\](.|\n)*in one process(.|\n)*1: Backward"
    with pytest.raises(AssertionError, match=told):
        check(ranks("gloo", 2), case)


@pytest.mark.parametrize(("backend", "world_size"), [("gloo", 2), slow("gloo", 3), slow("mpi", 3)])
def test_random_programs_on_virtual_ranks_have_the_bits_of_one_process(ranks, backend, world_size):
    draw = random.Random(4)
    for _ in range(5):
        check_virtual_ranks(ranks(backend, world_size), draw_case(draw, world_size))
