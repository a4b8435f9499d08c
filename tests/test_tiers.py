"""The first tier's cases of a test have every pair of its values, and none is there for nothing."""

from itertools import combinations, product

from tests.support.tiers import covering


def test_every_pair_of_values_is_in_the_first_tier():
    for sizes, most in (((3,), 3), ((3, 4), 12), ((2, 2, 2), 4), ((4, 2, 3, 2), 14)):
        cases = [tuple(enumerate(case)) for case in product(*map(range, sizes))]
        chosen = [cases[number] for number in covering(cases)]
        pairs = [
            {p for c in some for p in combinations(c, min(2, len(c)))} for some in (cases, chosen)
        ]
        assert pairs[0] == pairs[1]
        assert len(chosen) == len(set(chosen)) <= most
