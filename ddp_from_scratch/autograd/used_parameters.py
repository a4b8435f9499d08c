"""Tracks the parameters that got a gradient, on this rank and on any rank."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from ddp_from_scratch import gpu
from ddp_from_scratch.waiting import wait


class UsedParameters:
    """Records used parameters on this rank, and agrees on them with the other ranks.

    A Reducer makes one only if an option needs it. With `find_unused_parameters` ranks exchange
    their used parameters in every average, with `static_graph` in the first, with `skip_unused` in
    none.

    Args:
        find_unused: True if any parameter may be unused in any pass.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], find_unused: bool) -> None:
        self._parameters, self._count = parameters, len(parameters)
        self._device = parameters[0].device
        self._find_unused = find_unused
        self._static: StaticGraph | None = None
        # Parameters whose `.grad` is older than this Reducer. No hook of ours has seen it, and
        # other ranks may have none, but it is averaged like any other.
        self._inherited = {i for i, p in enumerate(parameters) if p.grad is not None}
        # False until the first average, which skips no bucket.
        self._has_agreed = False
        # Since the last average, also under no_sync(): the next average covers all of it.
        self._used: set[int] = set()
        # Static graph only. Agreed in the first average; later ones need no communication for it.
        self._used_by_any: set[int] | None = None
        # Static graph only: used since the last average, but by no rank in the first.
        self._unforeseen: set[int] = set()

    @property
    def is_static(self) -> bool:
        """True if the graph is the same in every pass."""
        return self._static is not None

    @property
    def varies(self) -> bool:
        """True if the set of used parameters may change from pass to pass."""
        return self._find_unused and not self.is_static

    def set_static(self) -> None:
        """Makes the graph static from the next pass on. Idempotent."""
        if self._static is None:
            self._static = StaticGraph(self._count)

    def on_gradient(self, index: int) -> None:
        """Records a gradient, also one under `no_sync()`."""
        self._used.add(index)

    def is_last_gradient(self, index: int) -> bool:
        """Counts a gradient of a synchronised pass; True if it is its parameter's last."""
        return self._static is None or self._static.count(index)

    def none_of(self, indices: Iterable[int]) -> bool:
        """True if none of these parameters got a gradient since the last average."""
        # False before the first average: one rank alone may have inherited gradients.
        return self._has_agreed and self._used.isdisjoint(indices)

    def unused(self, unreached: set[int]) -> set[int]:
        """Returns the parameters that get no gradient in a pass whose graph misses `unreached`."""
        return unreached if self._static is None else self._static.unused()

    def agree(self, process_group: dist.ProcessGroup) -> set[int] | None:
        """Returns the parameters that some rank used since the last average; None means all.

        Collective. Waits for other ranks only if this rank did not use every parameter.
        """
        used, self._used = self._used, set()
        # Without those that `zero_grad()` has dropped.
        inherited = {i for i in self._inherited if self._parameters[i].grad is not None} - used
        self._inherited = set()
        self._has_agreed = True
        if not (self._find_unused or self.is_static):
            return None
        if self._used_by_any is not None:
            # Perhaps under no_sync(), where `StaticGraph` counts nothing.
            self._unforeseen = used - self._used_by_any
            return self._used_by_any
        # Pinned memory is copied asynchronously: the host does not wait for the GPU's earlier work.
        mine = torch.zeros(self._count, dtype=torch.int32, pin_memory=gpu.is_gpu(self._device))
        mine[list(used)] = 1
        # `beyond` is more than the ones of all ranks add up to, so that one sum holds two counts:
        # its remainder counts ranks that used a parameter, its quotient ranks that inherited.
        mine[list(inherited)] = beyond = 1 + process_group.size()
        counts = mine.to(self._device, non_blocking=True)
        work = dist.all_reduce(counts, group=process_group, async_op=True)
        assert work is not None, "this rank is not a member of the process group"
        # A rank that used all parameters knows the answer. It has sent its part and need not wait.
        if len(used) < self._count:
            wait(work)
            found = dict(enumerate(counts.tolist()))
            used = {index for index, times in found.items() if times % beyond}
            inherited = {index for index, times in found.items() if times >= beyond}
        if self.is_static:
            self._used_by_any = used
        return used | inherited

    def drop(self) -> None:
        """Forgets all that ranks agreed on, and the gradients since the last average."""
        # All of it: an average that failed may have ended on some ranks alone, and all must agree
        # again in the same one.
        self._used, self._used_by_any, self._has_agreed = set(), None, False
        if self._static is not None:
            self._static = StaticGraph(self._count)

    def end_pass(self) -> list[tuple[int, int, int]]:
        """Returns breaches of a static graph: (parameter, gradients now, gradients before)."""
        if self._static is None:
            return []
        differences = self._static.end_pass()
        unforeseen = self._unforeseen.difference(index for index, _, _ in differences)
        return [*differences, *((index, 1, 0) for index in sorted(unforeseen))]


class StaticGraph:
    """The number of gradients of each parameter, the same in every backward pass.

    The first pass is counted to its end. From then on a parameter is ready with its last gradient,
    and a parameter that got none is known to be unused as soon as a pass begins.
    """

    def __init__(self, count: int) -> None:
        # None until the first pass has ended. A count may exceed 1: autograd accumulates several
        # times with reentrant checkpointing, and for a parameter of several checkpointed segments.
        self._expected: list[int] | None = None
        self._counted = [0] * count

    def count(self, index: int) -> bool:
        """Counts one gradient; True if it is its parameter's last in this pass."""
        self._counted[index] += 1
        return self._expected is not None and self._counted[index] == self._expected[index]

    def unused(self) -> set[int]:
        """Returns the parameters that get no gradient; none before the first pass has ended."""
        return {index for index, times in enumerate(self._expected or []) if times == 0}

    def end_pass(self) -> list[tuple[int, int, int]]:
        """Ends a pass; returns (parameter, gradients now, gradients before) that differ."""
        counted, self._counted = self._counted, [0] * len(self._counted)
        if self._expected is None:
            self._expected = counted
        pairs = zip(counted, self._expected, strict=True)
        return [(i, now, then) for i, (now, then) in enumerate(pairs) if now != then]
