"""Partial sums of any partition give one expression."""

from itertools import combinations, pairwise

import pytest
import torch

from ddp_from_scratch.virtual_ranks.tree import (
    Block,
    PartialSums,
    aligned_blocks,
    virtual_rank_range,
)
from ddp_from_scratch.virtual_ranks.tree_reduction import add_gradients, seeded


def plus(low, high):
    return f"({low}+{high})"


def expression(first, after):
    """The tree from its definition: the two halves."""
    half = (first + after) // 2
    if after - first == 1:
        return str(first)
    return plus(expression(first, half), expression(half, after))


def test_ranges_are_contiguous_and_near_equal():
    for virtual_ranks, ranks in [(count, n + 1) for count in (1, 2, 8, 64) for n in range(count)]:
        parts = [virtual_rank_range(virtual_ranks, rank, ranks) for rank in range(ranks)]
        assert [virtual_rank for part in parts for virtual_rank in part] == list(
            range(virtual_ranks)
        )
        assert {len(part) for part in parts} <= {virtual_ranks // ranks, virtual_ranks // ranks + 1}


def partitions(virtual_ranks):
    """Every way to cut the virtual ranks into contiguous parts."""
    for count in range(virtual_ranks):
        for cuts in combinations(range(1, virtual_ranks), count):
            edges = (0, *cuts, virtual_ranks)
            yield [range(a, b) for a, b in pairwise(edges)]


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("virtual_ranks", [1, 2, 4, 8])
def test_every_partition_leaves_the_same_root(virtual_ranks, descending):
    for parts in partitions(virtual_ranks):
        of_all = PartialSums(plus)
        for part in parts[::-1] if descending else parts:
            of_rank = PartialSums(plus)
            for virtual_rank in part[::-1] if descending else part:
                of_rank.push(Block(virtual_rank, 1), str(virtual_rank))
            # What a rank sends is what the others count on.
            assert [block for block, _ in of_rank] == aligned_blocks(part)
            for block, value in of_rank:
                of_all.push(block, value)
        assert list(of_all) == [((0, virtual_ranks), expression(0, virtual_ranks))]


def test_gradients_that_one_side_lacks():
    low = {0: torch.tensor([1.0]), 1: torch.tensor([2.0])}
    high = {1: torch.tensor([4.0]), 2: torch.tensor([8.0])}
    assert add_gradients(low, high) == {0: 1.0, 1: 6.0, 2: 8.0}


def test_virtual_ranks_draw_numbers_of_their_own_and_leave_the_program_its():
    def drawn(*numbers):
        with seeded(*numbers):
            return torch.rand(()).item()

    torch.manual_seed(3)
    expected = torch.rand(2).tolist()
    torch.manual_seed(3)
    first = torch.rand(()).item()
    values = [drawn(0, 0, 0), drawn(0, 0, 1), drawn(0, 1, 0), drawn(1, 0, 0)]
    assert [first, torch.rand(()).item()] == expected
    assert len(set(values)) == 4
    assert drawn(0, 0, 1) == values[1]
