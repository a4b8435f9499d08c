"""A comm hook that sums a bucket over virtual ranks along a fixed binary tree.

    virtual rank            0   1   2   3   4   5   6   7
    sums of 2        |0 1|   |2 3|   |4 5|   |6 7|
    sums of 4        |0 1     2 3|   |4 5     6 7|
    root             |0 1     2 3     4 5     6 7|

    3 ranks          |0 1||   2 3 4|   |  5 6 7|
    aligned blocks   |0 1||   2 3|4|   |5| |6 7|

Each node is the sum of its two children, whichever ranks hold them. So the root has the same bits
on any number of ranks. Each rank owns one chunk of the bucket. It receives every rank's partial
sums of that chunk (all-to-all), adds them along the tree, and sends the average to all ranks
(all-gather).
"""

from collections.abc import Sequence
from functools import cache, partial
from itertools import chain, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from ddp_from_scratch.common.group import (
    all_gather_single,
    check_group,
    may_be_in_flight,
    of_member,
    wait,
)
from ddp_from_scratch.common.memory import as_real
from ddp_from_scratch.core.bucket import FlatBucket, Future
from ddp_from_scratch.core.comm_hooks import comm_hook
from ddp_from_scratch.options.comm_hooks import Later


class Block(NamedTuple):
    """A node of the tree: `size` virtual ranks from `start`, which is a multiple of `size`."""

    start: int
    size: int


Gradients = dict[int, torch.Tensor]  # by parameter index; a missing gradient is zero


class PartialSums:
    """A binary counter of sums, each in the memory of the gradients that came last."""

    def __init__(self) -> None:
        self._values: dict[Block, Gradients] = {}

    def push(self, block: Block, value: Gradients) -> None:
        """Adds the gradients of a new block. Blocks may come in any order."""
        start, size = block
        while (sibling := Block(start ^ size, size)) in self._values:
            other = self._values.pop(sibling)
            both = [index for index in value if index in other]
            if both:
                torch._foreach_add_([value[i] for i in both], [other[i] for i in both])
            value = other | value
            start, size = start & ~size, 2 * size
        self._values[Block(start, size)] = value

    def in_order(self) -> list[tuple[Block, Gradients]]:
        """Returns the sums without a sibling, in the order of virtual ranks."""
        return sorted(self._values.items(), key=lambda item: item[0])

    def virtual_ranks(self) -> set[int]:
        """Returns the virtual ranks that the sums hold."""
        return {rank for start, size in self._values for rank in range(start, start + size)}


@cache
def aligned_blocks(part: Sequence[int]) -> list[Block]:
    """Returns the fewest tree nodes that cover exactly these virtual ranks, in order."""
    sums = PartialSums()
    for virtual_rank in part:
        sums.push(Block(virtual_rank, 1), {})
    return [block for block, _ in sums.in_order()]


class TreeReduction:
    """Holds the partial sums of this rank's earlier virtual ranks, and averages over all of them.

    Each tree node rounds once, so a sum of V virtual ranks has log2 V roundings. With `windows` a
    gradient may already be a window of a bucket (`FusedWgrad`).
    """

    def __init__(self, virtual_ranks: int, windows: bool) -> None:
        self._virtual_ranks, self._windows = virtual_ranks, windows
        self.sums: PartialSums = PartialSums()
        # By rank, the virtual ranks that it sums in the step.
        self.parts: list[tuple[int, ...]] = []
        # A number that goes to all ranks with bucket `carrier`; None sends nothing.
        self.note: float | None = None
        self.carrier: int = 0
        # By rank, the numbers of the last step, shape (ranks,), in the bucket's dtype.
        self.notes: torch.Tensor | None = None

    def add(self, virtual_rank: int, gradients: Gradients) -> None:
        """Adds the gradients of a virtual rank, and reuses their memory. Not for the last one."""
        for index, gradient in gradients.items():
            # The next virtual rank writes to the same window.
            gradient = gradient.resolve_conj().resolve_neg()  # as `_foreach_add_` needs it
            gradients[index] = gradient.clone() if self._windows else gradient
            self._divide(gradients[index], before=True)
        self.sums.push(Block(virtual_rank, 1), gradients)

    def _divide(self, tensor: torch.Tensor, before: bool) -> None:
        # A division: see `core/comm_hooks.py`.
        # 16-bit sums may overflow, so these are divided before.
        # Dividing after the sum is cheaper: one chunk and not every virtual rank's gradients.
        if before == (tensor.element_size() == 2):
            tensor.mul_(1 / self._virtual_ranks)

    # The hook starts a second collective in `wait`. Still all ranks issue the same order: buckets
    # are launched by index, and waited for by index after the last launch.
    @comm_hook(one_collective=True)
    def average(self, process_group: dist.ProcessGroup | None, bucket: FlatBucket) -> Future:
        """Averages the bucket, which holds this rank's last virtual rank, over all of them."""
        # Not `check_group`, because torch does not list the group that a Reducer opens beside gloo.
        group = process_group or check_group(None)
        numel, ranks = bucket.flat.numel(), group.size()
        chunk = -(-numel // ranks)
        bounds = [min(rank * chunk, numel) for rank in range(ranks + 1)]
        scattered = self.reduce_scatter(group, bucket, bounds)
        if ranks == 1:
            return scattered

        def finish() -> torch.Tensor:
            scattered.wait()
            buffer = bucket.flat
            into = as_real(buffer)
            # The all-gather needs equal chunks.
            size = into.numel() // max(numel, 1) * chunk
            own = into[size * group.rank() : size * (group.rank() + 1)]
            in_place = into.numel() == size * ranks and not may_be_in_flight()
            gathered = into if in_place else into.new_empty(size * ranks)
            mine = own if in_place else pad(own, (0, size - own.numel()))
            wait(all_gather_single(gathered, mine, group=group, async_op=True))
            if not in_place:
                into.copy_(gathered[: into.numel()])
            return buffer

        return Later(finish)

    def reduce_scatter(
        self, group: dist.ProcessGroup, bucket: FlatBucket, bounds: Sequence[int]
    ) -> Future:
        """Averages only this rank's part of the bucket; rank r's begins at `bounds[r]`."""
        ranks, rank = group.size(), group.rank()
        blocks = [aligned_blocks(part) for part in self.parts]
        rows = self._rows(bucket, self.parts[rank])
        if ranks == 1:
            return Later(partial(self._fold, blocks[0], rows))
        width = rows[0].numel() // max(bucket.flat.numel(), 1)  # 2 for complex numbers
        begins = [width * begin for begin in bounds]
        sizes = [end - begin for begin, end in pairwise(begins)]
        # By owner, then in the order of virtual ranks; a note comes last.
        note: list[torch.Tensor] = []
        if self.note is not None and bucket.index() == self.carrier:
            note = [rows[0].new_full((1,), self.note)]
        cut = [[*(row[begin:end] for row in rows), *note] for begin, end in pairwise(begins)]
        # A single row already has this order.
        sent = torch.cat([*chain.from_iterable(cut)]) if rows[1:] or note else rows[0]
        splits_in = [len(part) * sizes[rank] + len(note) for part in blocks]
        splits_out = [len(rows) * size + len(note) for size in sizes]
        flat = sent.new_empty(sum(splits_in))
        work = of_member(
            dist.all_to_all_single(flat, sent, splits_in, splits_out, group=group, async_op=True)
        )

        def finish() -> torch.Tensor:
            wait(work)
            received = flat.split(splits_in)
            if note:
                self.notes = torch.stack([of_rank[-1] for of_rank in received])
            each = (
                of_rank[: len(part) * sizes[rank]].view(len(part), sizes[rank]).unbind()
                for of_rank, part in zip(received, blocks, strict=True)
            )
            own = self._fold([*chain.from_iterable(blocks)], [*chain.from_iterable(each)])
            as_real(bucket.flat)[begins[rank] : begins[rank + 1]] = own
            return bucket.flat

        return Later(finish)

    @torch.no_grad()
    def _fold(self, blocks: Sequence[Block], rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Adds the rows of all blocks along the tree; returns the average, in one of them."""
        sums = PartialSums()
        for block, row in zip(blocks, rows, strict=True):
            sums.push(block, {0: row})
        ((_, root),) = sums.in_order()
        self._divide(root[0], before=False)
        # Makes every zero +0.0. Where gradients are missing, its sign would depend on which rank
        # runs which virtual rank. No other value depends on that sign.
        return root[0].add_(0.0)

    def _rows(self, bucket: FlatBucket, part: Sequence[int]) -> list[torch.Tensor]:
        """Returns this rank's partial sums of the bucket, flat and real; one is the bucket itself.

        `self.sums` keeps its values, with which a step continues if a rank is lost.
        """
        members, sums = bucket.members, PartialSums()
        for block, gradients in self.sums.in_order():
            sums.push(block, {i: gradients[i] for i in members if i in gradients})
        (last,) = set(part) - sums.virtual_ranks()
        flat = bucket.flat
        self._divide(flat, before=True)
        sums.push(Block(last, 1), dict(zip(members, bucket.views, strict=True)))
        rows = []
        for (start, size), gradients in sums.in_order():
            row = flat
            if last not in range(start, start + size):
                row = torch.zeros_like(flat)
                windows = dict(zip(members, bucket.views_of(row), strict=True))
                for index, gradient in gradients.items():
                    windows[index].copy_(gradient)
            rows.append(as_real(row))
        return rows
