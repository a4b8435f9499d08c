"""Which parameters take part in a backward pass, on this rank and on any."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from ddp_from_scratch.autograd.static_graph import StaticGraph


class Usage:
    """Keeps account of the gradients that came, and agrees on it with the other ranks.

    There are three kinds of model. One where every parameter gets one gradient in each pass: then
    nothing is agreed on. One whose parameters may be unused: ranks tell each other what they used
    at the end of each pass. And one with a static graph: they do so at the end of the first.

    Args:
        parameters: those that are meant; an index into these names one.
        process_group: the ranks that take part.
        find_unused: parameters may be unused, others in each pass.
        static: the graph is the same in every pass.

    Attributes:
        rank: of this process in the group.
        may_be_unused: whether a parameter may get no gradient.
        stayed: whether this rank used the same in each pass.

    Raises:
        ValueError: this rank is not in the group.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        process_group: dist.ProcessGroup | None,
        find_unused: bool,
        static: bool,
    ) -> None:
        self.rank = dist.get_rank(process_group)
        if self.rank < 0:
            raise ValueError("this rank is not a member of the process group")
        self._parameters, self._count = parameters, len(parameters)
        self._device = parameters[0].device
        # What another Reducer, or none, has accumulated: local, and not seen by our hooks.
        self._inherited = {i for i, p in enumerate(parameters) if p.grad is not None}
        self._has_agreed = False
        self._process_group = process_group
        self._find_unused = find_unused
        self.may_be_unused = find_unused or static
        self._static = StaticGraph(self._count) if static else None
        self._used: set[int] = set()  # since the last average, under no_sync() too
        self._used_by_any: set[int] | None = None  # of a static graph
        self._unforeseen: set[int] = set()  # of a static graph: used, but not averaged
        self._before: set[int] | None = None  # what this rank used for the last average
        self.stayed = True

    @property
    def is_static(self) -> bool:
        """Whether the graph is the same in every pass."""
        return self._static is not None

    @property
    def varies(self) -> bool:
        """Whether other parameters may be used in each pass."""
        return self._find_unused and not self.is_static

    def set_static(self) -> None:
        """From the next pass on the graph is the same in every one. Idempotent."""
        if self._static is None:
            self._static = StaticGraph(self._count)
        self.may_be_unused = True

    def note(self, index: int) -> None:
        """A gradient came, whether it is averaged in this pass or accumulated for a later one."""
        self._used.add(index)

    def none_of(self, indices: Iterable[int]) -> bool:
        """Whether none of these need be averaged: no gradient came since the last average."""
        # In the first average all are: what was inherited may be one rank's alone.
        return self._has_agreed and self._used.isdisjoint(indices)

    def count(self, index: int) -> bool:
        """A gradient came in a pass that averages; True when it is its parameter's last."""
        return self._static is None or self._static.count(index)

    def unused(self, unreached: set[int]) -> set[int]:
        """What will get no gradient in the pass that begins, given what its graph misses."""
        return unreached if self._static is None else self._static.unused()

    def agree(self) -> set[int] | None:
        """The parameters that some rank used since the last average; None where all must be.

        Collective. Waits for the others only where it changes the answer: a rank that used every
        parameter knows it already.
        """
        used, self._used = self._used, set()
        inherited, self._inherited = self._still_inherited() - used, set()
        self._has_agreed = True
        self.stayed &= self._before in (None, used)
        self._before = used
        if not self.may_be_unused:
            return None
        if self._used_by_any is not None:
            self._unforeseen = used - self._used_by_any  # perhaps under no_sync(), uncounted
            return self._used_by_any
        # From pinned memory, so that the host does not wait for what a GPU has to do before.
        mine = torch.zeros(self._count, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        mine[list(used)] = 1
        mine[list(inherited)] = beyond = 1 + dist.get_world_size(self._process_group)
        counts = mine.to(self._device, non_blocking=True)
        work = dist.all_reduce(counts, group=self._process_group, async_op=True)
        assert work is not None, "this rank is not a member of the process group"
        if len(used) < self._count:
            work.wait()
            found = dict(enumerate(counts.tolist()))
            used = {index for index, times in found.items() if times % beyond}
            inherited = {index for index, times in found.items() if times >= beyond}
        if self.is_static:
            self._used_by_any = used
        return used | inherited

    def _still_inherited(self) -> set[int]:
        """What was inherited and has not been dropped, by `zero_grad()`."""
        return {index for index in self._inherited if self._parameters[index].grad is not None}

    def end_pass(self) -> list[tuple[int, int, int]]:
        """What broke the promise of a static graph: (parameter, gradients now, in the first)."""
        if self._static is None:
            return []
        differences = self._static.end_pass()
        unforeseen = self._unforeseen.difference(index for index, _, _ in differences)
        return [*differences, *((index, 1, 0) for index in sorted(unforeseen))]
