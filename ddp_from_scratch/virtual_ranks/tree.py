"""Sums along a fixed binary tree over virtual ranks, without tensors or communication.

    virtual rank            0   1   2   3   4   5   6   7
    sums of 2        |0 1|   |2 3|   |4 5|   |6 7|
    sums of 4        |0 1     2 3|   |4 5     6 7|
    root             |0 1     2 3     4 5     6 7|

    3 ranks          |0 1||   2 3 4|   |  5 6 7|
    aligned blocks   |0 1||   2 3|4|   |5| |6 7|

Each node is the sum of its two children, whichever ranks hold them. So the root has the same bits
on any number of ranks.
"""

from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


def virtual_rank_range(virtual_ranks: int, rank: int, ranks: int) -> range:
    """Returns a rank's contiguous virtual ranks. The counts of ranks differ by at most one."""
    return range(rank * virtual_ranks // ranks, (rank + 1) * virtual_ranks // ranks)


class Block(NamedTuple):
    """A node of the tree: `size` virtual ranks from `start`, which is a multiple of `size`."""

    start: int
    size: int


def aligned_blocks(part: range) -> list[Block]:
    """Returns the fewest tree nodes that cover exactly these virtual ranks, in order."""
    blocks, start = [], part.start
    while start < part.stop:
        # The lowest set bit of `start` is the largest size that divides it; every size divides 0.
        size = start & -start or 1 << part.stop.bit_length()
        while start + size > part.stop:
            size //= 2
        blocks.append(Block(start, size))
        start += size
    return blocks


class PartialSums(Generic[T]):
    """A binary counter of sums. `add` takes the lower virtual ranks first, and may reuse memory."""

    def __init__(self, add: Callable[[T, T], T]) -> None:
        self._add = add
        self._values: dict[Block, T] = {}

    def push(self, block: Block, value: T) -> None:
        """Adds the value of a new block. Blocks may come in any order."""
        start, size = block
        # The bit of `size` tells a left sibling from a right one.
        while (sibling := Block(start ^ size, size)) in self._values:
            other = self._values.pop(sibling)
            value = self._add(other, value) if start & size else self._add(value, other)
            start, size = start & ~size, 2 * size
        self._values[Block(start, size)] = value

    def __iter__(self) -> Iterator[tuple[Block, T]]:
        """Yields the sums without a sibling, in the order of virtual ranks."""
        return iter(sorted(self._values.items(), key=lambda item: item[0]))
