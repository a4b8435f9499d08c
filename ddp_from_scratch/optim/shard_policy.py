"""What a rank does of a step: the base of all policies, and the one that divides nothing."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from ddp_from_scratch.common.memory import in_huge_pages
from ddp_from_scratch.core.bucket import FlatBucket
from ddp_from_scratch.optim.flat_params import FlatParams, Span
from ddp_from_scratch.optim.squares import padded_zeros, squares_of_blocks, total
from ddp_from_scratch.optim.update_rules import ParamGroup, UpdateRule
from ddp_from_scratch.options.launch_order import active_reducers, check_current
from ddp_from_scratch.reducer import Reducer
from ddp_from_scratch.sync.check_sync import Mark

# The segments of a bucket, one behind the other.
Segments: TypeAlias = Sequence[FlatParams]
Allocate: TypeAlias = Callable[[int, torch.Tensor], torch.Tensor]
States: TypeAlias = Mapping[torch.Tensor, dict[str, Any]]


class ShardPolicy:
    """What a rank does of a step. A class that overrides nothing does all of it alone."""

    cuts = False  # True if ranks may divide a segment's gradient at any of its cache lines
    _max_norm: float | None = None  # of the step under way

    def __init__(self, name: str, reducer: Any, rule: UpdateRule, overlap: bool = False) -> None:
        self._name, self._reducer, self._rule, self._overlap = name, reducer, rule, overlap

    def before_arranging(self) -> None: ...
    def allocator(self, bucket: FlatBucket) -> Allocate:
        """Returns a function that makes memory for the parameters of each segment, in order."""
        return self.allocate

    def allocate(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Makes memory for state."""
        return in_huge_pages(like.new_empty(numel))

    def arranged(
        self, segments: Mapping[FlatBucket, Segments], unflattened: Sequence[torch.Tensor]
    ) -> None: ...
    def averaging(self, clips: bool) -> AbstractContextManager[Any]:
        """A context for the backward pass of `backward_and_step`."""
        return nullcontext()

    def members(self, segment: FlatParams) -> list[int]:
        """Returns the members that a flat call can step."""
        return segment.in_place()

    def mark_loaded(self, states: States) -> None:
        """Notes the whole state that is loaded, which ranks compare in the next step."""

    def forget_loaded(self) -> None: ...
    def begin_step(self, max_norm: float | None) -> None:
        """Waits until all parameters are those after the last step. Collective."""
        self._max_norm = max_norm

    def mark_gradients(self, parameters: Iterable[torch.Tensor]) -> dict[torch.Tensor, Mark]:
        """Returns what the next average must compare of the gradients, by parameter."""
        return {}

    def check_step(self) -> None:
        """Raises if the ranks cannot divide this step."""

    def step(self, segment: FlatParams, spans: Sequence[Span], group: ParamGroup) -> None:
        segment.update(spans, group)

    def end_step(self, buckets: Sequence[FlatBucket], groups: Sequence[ParamGroup]) -> None: ...
    def synchronize(self) -> None:
        """Waits until all parameters are those after the last step."""

    def whole_state(
        self, segments: Segments, states: States, label: str = ""
    ) -> dict[torch.Tensor, dict[str, Any]]:
        """Returns the state of which a rank has only its share, by parameter. Collective.

        `label` names the caller in the error of ranks that do not all call it.
        """
        return {}

    def sum_of_squares(self, segments: Sequence[Segments]) -> torch.Tensor:
        """Returns the sum of the squares of all gradients; each item has a bucket's segments."""
        return total([self._squares(each) for each in segments if each])

    def _squares(self, segments: Segments) -> torch.Tensor:
        """Returns the sum of squares of each block of a bucket; 0 where another rank has it."""
        numel = sum(segment.flat.numel() for segment in segments)
        padded = padded_zeros(numel, segments[0].flat)
        for segment, begin in placed(segments):
            segment.copy_gradients(
                self.members(segment), padded[begin : begin + segment.flat.numel()]
            )
        return squares_of_blocks(padded)


class Unsharded(ShardPolicy):
    """Every rank has all parameters and state, and steps all of them."""


def check_averages(reducer: Reducer, name: str) -> None:
    """Raises a RuntimeError if a Reducer was removed, whose optimizer's ranks share the work."""
    core = reducer.core
    if core in active_reducers() or dist.get_world_size(reducer.process_group) == 1:
        return
    check_current(core)
    raise RuntimeError(
        f"{name} divides its work among ranks, and the Reducer was removed, so gradients are local "
        f"and each part would be stepped with another rank's: make a new Reducer and a new "
        f"optimizer, and load this one's state_dict()"
    )


def placed(segments: Segments) -> list[tuple[FlatParams, int]]:
    """Returns each segment, and where it begins among the parameters of its bucket."""
    begins = accumulate((segment.flat.numel() for segment in segments), initial=0)
    return list(zip(segments, begins, strict=False))
