"""Runs a rank's virtual ranks one after another, in descending order.

- Each starts with the buffers from the beginning of the step (without those that forward has made
  since), with `.grad` None, and with generators seeded by the step and the virtual rank.
- After each but the last, its gradients go to the partial sums (`tree_reduction.py`).
- In the last, backward packs and launches as usual, and the comm hook adds the partial sums.
- If a rank is lost in the step, the others keep their partial sums, and only the rest runs again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ddp_from_scratch.common.arguments import check_whole
from ddp_from_scratch.common.errors import shortened
from ddp_from_scratch.common.group import wait
from ddp_from_scratch.common.numbers import is_power_of_two
from ddp_from_scratch.common.random import seeded
from ddp_from_scratch.core.bucket import Bucket
from ddp_from_scratch.core.observer import Observer
from ddp_from_scratch.core.reducer import CoreReducer
from ddp_from_scratch.options.buffers import BufferSnapshot, BufferSync
from ddp_from_scratch.options.checks import sync_batch_norms
from ddp_from_scratch.virtual_ranks.balance import Balance
from ddp_from_scratch.virtual_ranks.deal import counts_by_speed, equal_counts, parts_of
from ddp_from_scratch.virtual_ranks.recheck import Recheck
from ddp_from_scratch.virtual_ranks.tree_reduction import PartialSums, TreeReduction

Result = TypeVar("Result")


class VirtualRanks(Observer):
    """This rank's share of the `count` virtual ranks, and the state of their step."""

    def __init__(
        self,
        count: int,
        buffers: BufferSync,
        *,
        windows: bool,
        balances: bool,
        recheck_every: int | None,
    ) -> None:
        check_whole("virtual_ranks", count)
        if not is_power_of_two(int(count)):
            raise ValueError(f"virtual ranks must be a power of two, got {count}")
        self.count = int(count)
        self._buffers, self._seed = buffers, 0
        self.step: int = 0  # it and `_seed` seed the generators, with the virtual rank
        self.reduction: TreeReduction = TreeReduction(count, windows)
        # Measures ranks and deals by their speed; None for equal parts.
        self.balance: Balance | None = Balance(count, self.reduction) if balances else None
        # Computes one virtual rank twice in some steps; None never does.
        self.recheck: Recheck | None = None
        if recheck_every is not None:
            self.recheck = Recheck(recheck_every, buffers)
        # The virtual ranks of the step that have not ended. Empty between steps.
        self._due: list[int] = []
        # Those of them that have not begun.
        self._ahead: list[int] = []
        self.inside: int | None = None  # the virtual rank that is running
        # The buffers at the start of the step, and its number; None after the optimizer's step.
        self._before: tuple[BufferSnapshot, int] | None = None
        # By virtual rank, what `run_all` returns of the step.
        self._results: dict[int, Any] = {}
        # This rank's virtual ranks, if some of an aborted step are kept.
        self._dealt: tuple[int, ...] | None = None

    def observers(self) -> list[Observer]:
        """Returns this object, and what it needs to observe a step."""
        return [self, *(each for each in (self.balance, self.recheck) if each is not None)]

    def attach(self, reducer: CoreReducer) -> None:
        if len(reducer.flat_buckets) < len(reducer.all_buckets):
            raise ValueError(
                "sparse gradients cannot be summed over virtual ranks: use sparse=False"
            )
        super().attach(reducer)
        self._process_group = reducer.process_group
        self._check()
        reducer.set_hook(self.reduction.average, reducer.process_group, owner="virtual_ranks=V")

    def _check(self) -> None:
        self.range()
        if sync_batch_norms(self._reducer().module):
            raise ValueError(
                "synchronised batch norm cannot be used with virtual_ranks=V, which run one after "
                "another: leave it out, and each virtual rank normalises its own batch"
            )

    def range(self) -> Sequence[int]:
        """Returns the virtual ranks that this rank runs in the step, in order."""
        group = self._process_group
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        if ranks > self.count:
            raise ValueError(f"{ranks} ranks need at least as many virtual ranks, got {self.count}")
        # Descending, so that rank 0 ends with the buffers of virtual rank 0, which it broadcasts.
        return self._dealt or self._parts(ranks)[rank][::-1]

    def _parts(self, ranks: int) -> list[tuple[int, ...]]:
        """Returns the virtual ranks of each rank, unless some of an aborted step are kept."""
        counts = None if self.balance is None else self.balance.counts
        if counts is None or len(counts) != ranks:
            counts = equal_counts(self.count, ranks)
        return parts_of(range(self.count), counts)

    def set_step(self, step: int, seed: int | None, keep: bool) -> int:
        self.step = step
        if seed is not None:
            self._seed = seed
        if self.balance is not None:
            self.balance.forget_others()
        if self.recheck is not None:
            self.recheck.forget()
        return self._deal_rest() if keep else self._forget()

    def _forget(self) -> int:
        """Drops the partial sums; returns how many virtual ranks are kept."""
        self.reduction.sums = PartialSums()
        self._results, self._dealt = {}, None
        return 0

    def _deal_rest(self) -> int:
        """Divides among new ranks what none of them has finished. Collective; as `_forget`."""
        held = self.reduction.sums.virtual_ranks()
        if not self._results.keys() >= held:  # without its result, a virtual rank must run again
            held = set()
            self._forget()
        rank, ranks = dist.get_rank(self._process_group), dist.get_world_size(self._process_group)
        device = self._reducer().device
        # By virtual rank its holder; then by rank its nanoseconds for one, or 0.
        found = torch.zeros(self.count + ranks, dtype=torch.int64, device=device)
        found[list(held)] = 1 + rank
        if self.balance is not None:
            found[self.count + rank] = int(1e9 * self.balance.own_seconds())
        wait(dist.all_reduce(found, group=self._process_group, async_op=True))
        numbers = found.tolist()
        holders = [holder - 1 if holder else None for holder in numbers[: self.count]]
        rest = [index for index, holder in enumerate(holders) if holder is None]
        counts = equal_counts(len(rest), ranks)
        if self.balance is not None:
            self.balance.learn([each / 1e9 for each in numbers[self.count :]])
            if self.balance.seconds:
                counts = counts_by_speed(len(rest), self.balance.seconds)
        # Each rank must run at least one, in whose backward pass it communicates.
        if not ranks <= len(rest) < self.count:
            return self._forget()
        parts = parts_of(rest, counts)
        self._dealt = parts[rank][::-1]
        kept = [
            [i for i, holder in enumerate(holders) if holder == other] for other in range(ranks)
        ]
        self.reduction.parts = [(*part, *own) for part, own in zip(parts, kept, strict=True)]
        return self.count - len(rest)

    @contextmanager
    def run(self, index: int) -> Iterator[None]:
        """A context for one virtual rank. An exception drops the step and propagates."""
        reducer: CoreReducer = self._reducer()
        if self.recheck is not None:
            raise RuntimeError(
                "with recheck_every=N use run_virtual_ranks, whose function another rank can call"
            )
        try:
            with self._virtual_rank(index, reducer):
                yield
        except BaseException:
            reducer.abort_step()
            raise

    def run_all(self, function: Callable[[int], Result]) -> list[Result]:
        """Calls a function for each virtual rank. An exception drops the step and propagates."""
        reducer: CoreReducer = self._reducer()

        if self.inside is not None:  # outside of the `try`, which would drop that one's step
            raise RuntimeError(f"run_virtual_ranks was called inside virtual rank {self.inside}")
        recheck, repeat = self.recheck, partial(self._repeat, function)
        try:
            # What is left of an aborted step is not checked: the owner may have finished its part.
            if recheck is not None and recheck.is_due(self.step) and self._dealt is None:
                parts = self._parts(dist.get_world_size(self._process_group))
                recheck.begin(self.step, parts, repeat)
            for index in self.range():
                with self._virtual_rank(index, reducer):
                    result = function(index)
                self._results[index] = result
            if recheck is not None and recheck.mismatch is not None:
                raise RuntimeError("the function went on after an error of backward()")
        except BaseException:
            reducer.abort_step()
            if recheck is None or recheck.mismatch is None:
                raise
            mismatch, recheck.mismatch = recheck.mismatch, None
            try:
                error = recheck.vote(mismatch, repeat)
            except BaseException:
                self._forget()  # a rank that is not known may have computed wrong sums
                raise
            raise error from None
        return [self._results[index] for index in sorted(self._results)]

    def _repeat(self, function: Callable[[int], Any], index: int) -> dict[int, torch.Tensor]:
        """Calls the function for any virtual rank, and returns its gradients. Nothing is sent."""
        self._take_gradients()
        with seeded(self._seed, self.step, index), self._reducer().no_sync():
            function(index)
        return self._take_gradients()

    @contextmanager
    def _virtual_rank(self, index: int, reducer: CoreReducer) -> Iterator[None]:
        self._enter(index, reducer)
        last = index == self.range()[-1]
        with seeded(self._seed, self.step, index), nullcontext() if last else reducer.no_sync():
            yield
        if self.inside != index:
            raise RuntimeError(f"the step was dropped inside virtual rank {index}")
        if not last:
            gradients = self._take_gradients()
            if self.recheck is not None:
                self.recheck.note(index, gradients)
            self.reduction.add(index, gradients)
            self._due.remove(index)
            if self.balance is not None:
                self.balance.end()
        elif self._due:
            raise RuntimeError(
                f"virtual rank {index} ended without gradients of {shortened(reducer.missing())}: "
                f"one backward pass of it must be outside of no_sync(), and parameters that it "
                f"does not use need find_unused_parameters=True"
            )
        self.inside = None

    def _enter(self, index: int, reducer: CoreReducer) -> None:
        order = self.range()
        if self.inside is not None:
            raise RuntimeError(f"virtual rank {index} begins inside virtual rank {self.inside}")
        if index not in order:
            own = list(order)
            raise ValueError(f"virtual rank {index} is not one of this rank's, which are {own}")
        if not self._due:
            self._check()  # a layer may have been converted since the last step
            self._due, self._ahead = list(order), list(order)
            # Also with a single virtual rank, because a step that fails is repeated.
            self._before = self._buffers.snapshot(), self.step
            if self._dealt is None:
                self._forget()
                self.reduction.parts = self._parts(dist.get_world_size(self._process_group))
            kept = {index for _, each in self.reduction.sums.in_order() for index in each}
            for parameter, call in product(kept, reducer.calls.on_gradient):
                call(parameter)  # forgotten when the step was dropped
        if self._ahead[:1] != [index]:
            how, due = "twice" if index not in self._ahead else "out of order", self._ahead[0]
            raise RuntimeError(f"virtual rank {index} runs {how}: the next one is {due}")
        self._ahead.remove(index)
        self.inside = index
        self._put_back()
        self._take_gradients()
        if self.balance is not None:
            self.balance.begin()

    def _take_gradients(self) -> dict[int, torch.Tensor]:
        parameters = self._reducer().parameters
        found = {index: p.grad for index, p in enumerate(parameters) if p.grad is not None}
        for index in found:
            parameters[index].grad = None
        return found

    def _put_back(self) -> None:
        if self._before is not None:
            self._before[0].restore()

    def __str__(self) -> str:
        deal = "" if self.balance is None else f" assigned by speed ({self.balance})"
        return f"{self.count} virtual ranks{deal}"

    # As an observer -------------------------------------------------------------------------------

    def on_launch(self, bucket: Bucket) -> None:
        # Outside of the last virtual rank, gradients would be lost.
        if self._due != [self.inside]:
            raise RuntimeError(
                "with virtual_ranks=V every backward pass goes into `with reducer.virtual_rank(i)`"
            )

    def on_average(self, iteration: int, takes_part: bool) -> None:
        self._due, self._dealt, self.step = [], None, self.step + 1

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        # `backward_and_step` steps buckets inside the last virtual rank.
        if self._due and self._due != [self.inside]:
            raise RuntimeError(
                f"the optimizer steps before virtual ranks {self._due} of this rank have run"
            )

    def on_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._due:
            self._before = None
            self._forget()

    def on_abort(self) -> None:
        """Drops the step and restores the buffers, even after the average; keeps partial sums."""
        self._take_gradients()
        self._put_back()
        if self._before is not None:
            self.step = self._before[1]
        self._reducer().iteration = self.step
        self._due, self._ahead, self.inside, self._before = [], [], None, None
        self._dealt = None
