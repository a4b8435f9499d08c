"""Flat parameters and state: neighbours in a bucket share one tensor and are stepped together.

bucket.buffer       |<- fc2.bias ->|<------ fc2.weight ------>|<- fc1.bias ->| ...
segment.gradient    |<- fc2.bias ->|<------ fc2.weight ------>|    a part of the buffer
segment.flat        |<- fc2.bias ->|<------ fc2.weight ------>|    every `.data` is a window of it
momentum            |<- fc2.bias ->|<------ fc2.weight ------>|    so is every state: "exp_avg", ...

Parameters begin at cache lines. After a parameter whose size is not a multiple of a cache line,
`flat` has a gap that the gradients do not have, and a *chunk* ends. One call steps all chunks:

segment.gradient    |<- bias ->|<------- weight ------->|<- bias ->|
segment.flat        |<- bias ->|  |<------- weight ------->|  |<- bias ->|

If ranks divide the state, a rank has only that of its own part:

segment.flat        |<- fc2.bias ->|  |<------ fc2.weight ------>|
segment.own                           |<--- own --->|
momentum                              |<----------->|
"""

from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, groupby, pairwise, repeat
from operator import is_
from typing import Any, TypeAlias

import torch

from ddp_from_scratch.common.memory import grad_dtype
from ddp_from_scratch.core.bucket import FlatBucket, gradient_of
from ddp_from_scratch.optim.update_rules import CACHE_LINE, STEP_DTYPE, UpdateRule, check_state

# Neighbours in a segment with equal `num_steps` (`UpdateRule`): the members `first` to `last - 1`,
# and `num_steps`.
Span: TypeAlias = tuple[int, int, int]

_address, _strides = torch.Tensor.data_ptr, torch.Tensor.stride


class FlatParams:
    """A segment: neighbours in a bucket that belong to one parameter group, in one flat tensor.

    Each member begins at a cache line, as in torch's own allocations. Elsewhere BLAS rounds matrix
    products differently, and a step may round other elements as its last ones.
    """

    def __init__(
        self,
        bucket: FlatBucket,
        members: slice,
        group: int,
        rule: UpdateRule,
        allocate: Callable[[int, torch.Tensor], torch.Tensor],  # of a size, like another tensor
        allocate_parameters: Callable[[int, torch.Tensor], torch.Tensor],
    ) -> None:
        self.group = group
        self._rule, self._allocate = rule, allocate
        self.parameters: list[torch.nn.Parameter] = bucket.parameters()[members]
        self.gradients: list[torch.Tensor] = bucket.views[members]
        begin = bucket.offsets[members.start]
        # Where members begin in the gradient, and the last one's end, in elements.
        self._offsets = [0, *accumulate(parameter.numel() for parameter in self.parameters)]
        self.gradient: torch.Tensor = bucket.flat[begin : begin + self._offsets[-1]]
        self._line = CACHE_LINE // self.gradient.itemsize
        # Where each member begins in `flat`.
        self._begins: list[int] = []
        # The members with which chunks begin, and the number of members.
        self._chunks, end = [0], 0
        for index, parameter in enumerate(self.parameters):
            if end % self._line:
                end = self._round_up(end)
                self._chunks.append(index)
            self._begins.append(end)
            end += parameter.numel()
        self._chunks.append(len(self.parameters))
        self.flat: torch.Tensor = allocate_parameters(self._round_up(end), self.gradient)
        self.param_views: list[torch.Tensor] = self.windows(self.flat)
        self.own: range = range(self.flat.numel())  # the elements of `flat` that this rank steps
        # Where this rank's part of the gradient begins, and the part.
        self._own_gradient = 0, self.gradient
        # State by key: a flat tensor, and a window for each member. Allocated when needed.
        self.state: dict[str, tuple[torch.Tensor, Sequence[torch.Tensor]]] = {}
        # The names of the state in the step under way. `gather` sets them.
        self._all_names: tuple[str, ...] = ()
        self._names: tuple[str, ...] = ()  # those without "step"
        # Columns of a step of all members, by `_names`.
        self._all_columns: dict[tuple[str, ...], list[list[torch.Tensor]]] = {}
        # The parameters stay the same objects, which the module and other optimizers hold.
        for parameter, view in zip(self.parameters, self.param_views, strict=True):
            view.copy_(parameter)
            parameter.data = view
        # `in_place` checks every parameter in every step, so these are cached.
        self._all_members = [*range(len(self.parameters))]
        self._params_at = [*map(_address, self.param_views)]
        self._gradients_at = [*map(_address, self.gradients)]
        self._strides = [*map(_strides, self.gradients)]

    def _round_up(self, element: int) -> int:
        return -(-element // self._line) * self._line

    def windows(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns a window of the shape of each member, of a tensor of the size of `flat`."""
        start = flat.storage_offset()
        return [
            flat.as_strided(gradient.shape, gradient.stride(), start + begin)
            for gradient, begin in zip(self.gradients, self._begins, strict=True)
        ]

    def own_only(self, begin: int, end: int) -> None:
        """Limits steps and state to these elements of `flat`, which begin at cache lines."""
        begin, end = (min(max(at, 0), self.flat.numel()) for at in (begin, end))
        self.own = range(begin, end)
        first = self.gradients_before(begin)
        self._own_gradient = first, self.gradient[first : self.gradients_before(end)]

    def gradients_before(self, position: int) -> int:
        """Returns how many elements of the gradient belong to elements of `flat` before this."""
        if position <= 0:
            return 0
        chunk = bisect(self._chunks[:-1], position, key=self._begins.__getitem__) - 1
        first, end = self._chunks[chunk], self._chunks[chunk + 1]
        return min(self._offsets[first] + position - self._begins[first], self._offsets[end])

    def _own_part(self, index: int) -> slice:
        """Returns which elements of a member, in the order of memory, this rank steps."""
        begin, numel = self._begins[index], self.parameters[index].numel()
        first, last = (min(max(at - begin, 0), numel) for at in (self.own.start, self.own.stop))
        return slice(first, last)

    def _own_numel(self, index: int) -> int:
        part = self._own_part(index)
        return max(int(part.stop) - int(part.start), 0)

    def copy_gradients(self, members: Sequence[int], target: torch.Tensor) -> None:
        """Copies this rank's part of the gradients to where the parameters are in `flat`."""
        for index in members:
            part, begin, offset = self._own_part(index), self._begins[index], self._offsets[index]
            source = self.gradient[offset + part.start : offset + part.stop]
            target[begin + part.start : begin + part.stop].copy_(source)

    def scale_gradients(self, factor: torch.Tensor) -> None:
        """Multiplies this rank's part of the gradients."""
        self._own_gradient[1].mul_(factor)

    def in_place(self) -> list[int]:
        """Returns the members whose parameter and gradient are in their windows."""
        parameters = self.parameters
        gradients = [*map(gradient_of, parameters)]
        # No Python call for each parameter: in most steps, all are in place.
        if (
            not any(map(is_, gradients, repeat(None)))
            and [*map(_address, parameters)] == self._params_at
            and [*map(_address, gradients)] == self._gradients_at
            and [*map(_strides, parameters)] == self._strides
            and [*map(_strides, gradients)] == self._strides
            and not (self.flat.is_complex() and any(map(torch.is_conj, gradients)))
        ):
            return self._all_members
        at = self._params_at, self._gradients_at, self._strides
        rows = zip(parameters, gradients, *at, strict=True)
        return [
            index
            for index, (parameter, gradient, param_at, gradient_at, strides) in enumerate(rows)
            if gradient is not None
            and parameter.data_ptr() == param_at
            and gradient.data_ptr() == gradient_at
            and parameter.stride() == strides
            and gradient.stride() == strides
            and not (self.flat.is_complex() and gradient.is_conj())
        ]

    def gather(
        self,
        members: Sequence[int],
        states: Mapping[torch.Tensor, dict[str, Any]],
        group: dict[str, Any],
    ) -> list[Span]:
        """Moves these members' state into flat tensors.

        Returns neighbours with equal `num_steps`.
        """
        names = self._rule.state_names(group)
        if names != self._all_names:
            self._all_names = names
            self._names = tuple(name for name in names if name != "step")
        step_counts = [1] * len(self.parameters)
        for name in names:
            if name not in self.state:
                self.state[name] = self._make_state(name)
            views = self.state[name][1]
            for index in members:
                state, view = states[self.parameters[index]], views[index]
                held = state.get(name)
                if held is view:
                    continue
                if name == names[0]:
                    check_state(self.parameters[index], state, names, self._own_numel(index))
                if held is None:
                    view.zero_()
                    step_counts[index] = 0
                else:  # from a checkpoint, or an earlier layout of the buckets
                    view.copy_(held if held.shape == view.shape else self._part_of(held, index))
                state[name] = view
        if "step" in names:
            step_counts = list(map(int, self.state["step"][0].tolist()))
        if len(members) == len(step_counts) and len(set(step_counts)) == 1:
            return [(0, len(step_counts), step_counts[0])]
        # Neighbours have the same distance between index and position in `members`.
        spans = groupby(enumerate(members), lambda row: (row[1] - row[0], step_counts[row[1]]))
        parts = [(num_steps, [index for _, index in rows]) for (_, num_steps), rows in spans]
        return [(part[0], part[-1] + 1, num_steps) for num_steps, part in parts]

    def _make_state(self, name: str) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Returns memory for a kind of state, and each member's part of it."""
        if name == "step":
            # On the CPU, because Python reads them.
            steps = torch.zeros(len(self.parameters), dtype=STEP_DTYPE, device="cpu")
            return steps, steps.unbind()
        flat = self._allocate(len(self.own), self.flat)
        whole = len(self.own) == self.flat.numel()
        return flat, self.windows(flat) if whole else self._parts(flat)

    def _parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Cuts a tensor of this rank's own elements into one part for each member."""
        parts = []
        for index, begin in enumerate(self._begins):
            part, shift = self._own_part(index), begin - self.own.start
            parts.append(flat[max(part.start + shift, 0) : max(part.stop + shift, 0)])
        return parts

    def _part_of(self, held: torch.Tensor, index: int) -> torch.Tensor:
        """Returns this rank's part of a member's state."""
        like = self.gradients[index]
        dense = torch.empty_strided(
            like.shape, like.stride(), dtype=held.dtype, device=held.device
        ).copy_(held)
        return dense.as_strided((held.numel(),), (1,))[self._own_part(index)]

    def update(
        self,
        spans: Sequence[Span],
        group: dict[str, Any],
        begin: int | None = None,
        gradient: torch.Tensor | None = None,
    ) -> None:
        """Steps the elements that begin at `begin` with this part of the gradient.

        None means the elements that this rank steps.
        """
        names = self._names
        if begin is None or gradient is None:
            begin, gradient = self._own_gradient
        for first, last, num_steps in spans:
            is_own = gradient is self._own_gradient[1]
            whole = is_own and (first, last) == (0, len(self.parameters))
            columns = self._all_columns.get(names) if whole else None
            if columns is None:
                columns = self._columns(first, last, names, begin, gradient)
                if whole:
                    self._all_columns[names] = columns
            if columns[0]:
                self._rule.update_flat(columns, num_steps, group)

    def _columns(
        self, first: int, last: int, names: Sequence[str], begin: int, gradient: torch.Tensor
    ) -> list[list[torch.Tensor]]:
        """Cuts these members, their part of the gradient and their state into chunks."""
        states = [self.state[name][0] for name in names]
        columns: list[list[torch.Tensor]] = [[] for _ in range(len(states) + 2)]
        for chunk, next_chunk in pairwise(self._chunks):
            if next_chunk <= first or chunk >= last:
                continue
            low = max(self._offsets[max(first, chunk)], begin)
            high = min(self._offsets[min(last, next_chunk)], begin + gradient.numel())
            if low >= high:
                continue
            shift = self._begins[chunk] - self._offsets[chunk]
            # Extends into the gap, so that the fused kernel also steps the last cache line.
            full = self._round_up(high + shift) - shift
            if self._rule.exact_anywhere and high == self._offsets[next_chunk]:
                high = full if full <= begin + gradient.numel() else high
            at = shift - self.own.start
            state = (flat[low + at : high + at] for flat in states)
            parameter = self.flat[low + shift : high + shift]
            parts = parameter, gradient[low - begin : high - begin], *state
            for column, part in zip(columns, parts, strict=True):
                column.append(part)
        return columns

    def count(self, spans: Sequence[Span]) -> None:
        for first, last, _ in spans:
            self.state["step"][0][first:last].add_(1)


def can_move(parameter: torch.Tensor, view: torch.Tensor) -> bool:
    """True if moving a parameter changes neither dtype, nor strides, nor the bits of a step."""
    # For 16 bits on a CPU, torch rounds once more in the last elements, which do not fill a vector.
    # In a flat tensor other elements are the last.
    sixteen_bit_on_cpu = parameter.element_size() == 2 and parameter.device.type == "cpu"
    unchanged = parameter.dtype == view.dtype and parameter.stride() == view.stride()
    own_dtype = grad_dtype(parameter) == parameter.dtype
    return unchanged and own_dtype and not sixteen_bit_on_cpu
