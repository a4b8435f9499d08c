"""The parameters that a backward pass used, on this rank and on any."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist


class UsedParameters:
    """Counts the gradients that came, and agrees on them with the other ranks.

    Made only where it can matter: parameters may be unused (then ranks tell each other at the end
    of each pass which ones they used), the graph is static (then at the end of the first pass), or
    buckets without a used parameter are not sent.

    Args:
        parameters: an index into these stands for a parameter.
        process_group: the ranks that take part.
        find_unused: parameters may be unused, others in each pass.
        static: the graph is the same in every pass.

    Attributes:
        may_be_unused: whether a parameter may get no gradient.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        process_group: dist.ProcessGroup | None,
        find_unused: bool,
        static: bool,
    ) -> None:
        self._parameters, self._count = parameters, len(parameters)
        self._device = parameters[0].device
        self._process_group = process_group
        self._find_unused = find_unused
        self.may_be_unused = find_unused or static
        self._static = StaticGraph(self._count) if static else None
        # `.grad`s from before, accumulated by another Reducer or none: local, unseen by our hooks.
        self._inherited = {i for i, p in enumerate(parameters) if p.grad is not None}
        self._has_agreed = False
        self._used: set[int] = set()  # since the last average, under no_sync() too
        self._used_by_any: set[int] | None = None  # of a static graph
        self._unforeseen: set[int] = set()  # of a static graph: used, but not averaged

    @property
    def is_static(self) -> bool:
        """Whether the graph is the same in every pass."""
        return self._static is not None

    @property
    def varies(self) -> bool:
        """Whether other parameters may be used in each pass."""
        return self._find_unused and not self.is_static

    def set_static(self) -> None:
        """Makes the graph static from the next pass on. Idempotent."""
        if self._static is None:
            self._static = StaticGraph(self._count)
        self.may_be_unused = True

    def on_gradient(self, index: int) -> None:
        """Notes a gradient, to be averaged in this pass or accumulated for a later one."""
        self._used.add(index)

    def is_last_gradient(self, index: int) -> bool:
        """Counts a gradient of a pass that averages; True when it is its parameter's last."""
        return self._static is None or self._static.count(index)

    def none_of(self, indices: Iterable[int]) -> bool:
        """Whether none of these need be averaged: no gradient came since the last average."""
        # In the first average all are: inherited gradients may be one rank's alone.
        return self._has_agreed and self._used.isdisjoint(indices)

    def unused(self, unreached: set[int]) -> set[int]:
        """The parameters without a gradient in the pass that begins; its graph misses these."""
        return unreached if self._static is None else self._static.unused()

    def agree(self) -> set[int] | None:
        """The parameters that some rank used since the last average; None where all must be.

        Collective. Waits for the others only where it changes the answer: a rank that used every
        parameter knows it already.
        """
        used, self._used = self._used, set()
        inherited, self._inherited = self._still_inherited() - used, set()
        self._has_agreed = True
        if not self.may_be_unused:
            return None
        if self._used_by_any is not None:
            self._unforeseen = used - self._used_by_any  # perhaps under no_sync(), uncounted
            return self._used_by_any
        # From pinned memory, so that the host does not wait for what a GPU has to do before.
        mine = torch.zeros(self._count, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        mine[list(used)] = 1
        # More than all ranks' ones together, so that one sum carries both counts.
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
        """Inherited gradients that `zero_grad()` has not dropped."""
        return {index for index in self._inherited if self._parameters[index].grad is not None}

    def end_pass(self) -> list[tuple[int, int, int]]:
        """Breaches of a static graph: (parameter, gradients now, gradients in the first pass)."""
        if self._static is None:
            return []
        differences = self._static.end_pass()
        unforeseen = self._unforeseen.difference(index for index, _, _ in differences)
        return [*differences, *((index, 1, 0) for index in sorted(unforeseen))]


class StaticGraph:
    """The number of gradients of each parameter in a backward pass, the same in every one.

    The first pass is counted to its end; nothing is known before it. From then on a parameter is
    ready with its last gradient (with reentrant checkpointing, or a parameter shared by several
    checkpointed segments, autograd accumulates several), and those that got none are known to be
    unused before the pass begins.

    Args:
        count: the number of parameters.
    """

    def __init__(self, count: int) -> None:
        self._expected: list[int] | None = None  # None until the first pass has ended
        self._counted = [0] * count

    def count(self, index: int) -> bool:
        """Counts one gradient; True when it is the last of its parameter in this pass."""
        self._counted[index] += 1
        return self._expected is not None and self._counted[index] == self._expected[index]

    def unused(self) -> set[int]:
        """The parameters that get no gradient, as far as that is known yet."""
        return {index for index, times in enumerate(self._expected or []) if times == 0}

    def end_pass(self) -> list[tuple[int, int, int]]:
        """Ends a pass; returns (parameter, gradients now, gradients in the first) that differ."""
        counted, self._counted = self._counted, [0] * len(self._counted)
        if self._expected is None:
            self._expected = counted
        pairs = zip(counted, self._expected, strict=True)
        return [(i, now, then) for i, (now, then) in enumerate(pairs) if now != then]
