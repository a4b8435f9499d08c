"""The first tier's cases of a test have every pair of its values."""

from itertools import combinations, product

import pytest

from tests.support.tiers import covering

SHAPES = [(3,), (3, 4), (2, 2, 2), (4, 2, 3, 2)]


@pytest.mark.parametrize("sizes", SHAPES)
def test_every_pair_of_values_is_in_the_first_tier(sizes):
    cases = [tuple(enumerate(case)) for case in product(*map(range, sizes))]
    chosen = [cases[number] for number in covering(cases)]
    pairs = {pair for case in cases for pair in combinations(case, min(2, len(case)))}
    assert {pair for case in chosen for pair in combinations(case, min(2, len(case)))} == pairs
    assert len(chosen) == len(set(chosen)) <= len(cases)


def test_no_case_is_there_for_nothing():
    assert len(list(covering(list(product("ab", "cd", "ef"))))) == 4
    assert list(covering([("a",), ("b",)])) == [0, 1]
