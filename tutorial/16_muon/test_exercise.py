from importlib import import_module
from itertools import product

import pytest
import torch

program = import_module("tutorial.16_muon.muon")
SHAPES = [(320, 384), (256, 320), (192, 256), (128, 192), (64, 128)]  # of the program


def test_longest(exercise):
    assert exercise.longest([5, 1, 2, 4], [0, 1, 1, 0]) == 9, "rank 0 has 5 + 4, rank 1 has 1 + 2"
    assert exercise.longest([5, 1, 2, 4], [1, 1, 2, 0]) == 6, "rank 1 has 5 + 1"


@pytest.mark.parametrize(
    ("costs", "nproc", "expected"),
    [
        ([8, 7, 6, 5, 4], 2, [0, 1, 1, 0, 0]),
        ([4, 5, 6, 7, 8], 2, [0, 0, 1, 1, 0]),
        ([3, 3, 3, 3], 3, [0, 1, 2, 0]),
        ([2, 9, 2], 4, [1, 0, 2]),
    ],
)
def test_owners(exercise, costs, nproc, expected):
    found = exercise.owners(costs, nproc)
    assert found == expected, f"owners of matrices that cost {costs}, on {nproc} ranks"


@pytest.mark.parametrize("nproc", [2, 3])
def test_owners_of_the_program(exercise, nproc):
    costs = [program.cost(torch.empty(shape)) for shape in SHAPES]
    ours = exercise.longest(costs, exercise.owners(costs, nproc))
    best = min(exercise.longest(costs, all_) for all_ in product(range(nproc), repeat=len(costs)))
    turns = exercise.longest(costs, program.by_turns(costs, nproc))
    assert best == ours < turns, "costs of the busiest rank: the least, yours, and by turns"
