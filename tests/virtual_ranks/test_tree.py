"""Partial sums of any partition give one expression."""

from itertools import combinations, pairwise

import pytest

from ddp_from_scratch.virtual_ranks.tree import (
    Block,
    PartialSums,
    aligned_blocks,
)


def plus(low, high):
    return f"({low}+{high})"


def expression(first, after):
    half = (first + after) // 2
    if after - first == 1:
        return str(first)
    return plus(expression(first, half), expression(half, after))


def partitions(virtual_ranks):
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
