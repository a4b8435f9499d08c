"""Flat parameters and state: neighbours in a bucket share one tensor and are stepped together.

bucket.buffer   |<- fc2.bias ->|<------ fc2.weight ------>|<- fc1.bias ->| ...
run.gradient    |<- fc2.bias ->|<------ fc2.weight ------>|    a part of the buffer
run.flat        |<- fc2.bias ->|<------ fc2.weight ------>|    every `.data` is a window of it
momentum        |<- fc2.bias ->|<------ fc2.weight ------>|    so is every state: "exp_avg", ...

Parameters begin at cache lines. After a parameter whose size is not a multiple of a cache line,
`flat` has a gap that the gradients do not have, and a *piece* ends. One call steps all pieces:

run.gradient    |<- bias ->|<------- weight ------->|<- bias ->|
run.flat        |<- bias ->|  |<------- weight ------->|  |<- bias ->|
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Any, TypeAlias

import torch

from ddp_from_scratch.core.bucket import Bucket
from ddp_from_scratch.optim.update_rules import CACHE_LINE, UpdateRule

# Neighbours of one age in a run: the members `first` to `last - 1`, and their age (`UpdateRule`).
Stretch: TypeAlias = tuple[int, int, int]


class FlatParams:
    """A run: neighbours in a bucket that belong to one parameter group, in one flat tensor.

    Each member begins at a cache line, as in torch's own allocations. Elsewhere BLAS rounds matrix
    products differently, and a step may round other elements as its last ones.
    """

    def __init__(
        self,
        bucket: Bucket,
        members: slice,
        group: int,
        rule: UpdateRule,
        allocate: Callable[[int, torch.Tensor], torch.Tensor],  # of a size, like another tensor
    ) -> None:
        self.group, self._rule, self._allocate = group, rule, allocate
        self.parameters, self.gradients = bucket.parameters()[members], bucket.views[members]
        begin = bucket.offsets[members.start]
        # Where members begin in the gradient, and the last one's end, in elements.
        self._offsets = [0, *accumulate(parameter.numel() for parameter in self.parameters)]
        self.gradient = bucket.buffer()[begin : begin + self._offsets[-1]]
        # Where each member begins in the flat tensor, and the members with which pieces begin.
        self._line = CACHE_LINE // self.gradient.itemsize
        self._begins, self._pieces, end = [], [0], 0
        for index, parameter in enumerate(self.parameters):
            if end % self._line:
                end = self._round_up(end)
                self._pieces.append(index)
            self._begins.append(end)
            end += parameter.numel()
        self._pieces.append(len(self.parameters))
        self.flat = allocate(self._round_up(end), self.gradient)
        self.places = self._windows(self.flat)
        # State by key: a flat tensor, and a window for each member. Allocated when needed.
        self._state: dict[str, tuple[torch.Tensor, Sequence[torch.Tensor]]] = {}
        # Columns of a step of all members, by the names of their state.
        self._all_columns: dict[tuple[str, ...], list[list[torch.Tensor]]] = {}
        # The parameters stay the same objects, which the module and other optimizers hold.
        for parameter, place in zip(self.parameters, self.places, strict=True):
            place.copy_(parameter)
            parameter.data = place
        # `in_place` checks every parameter in every step, so addresses are cached.
        columns = self.parameters, self.places, self.gradients
        self._rows = [
            (parameter, place.data_ptr(), gradient.data_ptr(), gradient.stride())
            for parameter, place, gradient in zip(*columns, strict=True)
        ]

    def _round_up(self, element: int) -> int:
        return -(-element // self._line) * self._line

    def _windows(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [
            flat.as_strided(gradient.shape, gradient.stride(), begin)
            for gradient, begin in zip(self.gradients, self._begins, strict=True)
        ]

    def in_place(self) -> list[int]:
        """Returns the members whose parameter and gradient are in their windows."""
        return [
            index
            for index, (parameter, at, gradient_at, strides) in enumerate(self._rows)
            if (gradient := parameter.grad) is not None
            and parameter.data_ptr() == at
            and gradient.data_ptr() == gradient_at
            and parameter.stride() == strides
            and gradient.stride() == strides
        ]

    def gather(
        self,
        members: Sequence[int],
        states: Mapping[torch.Tensor, dict[str, Any]],
        group: dict[str, Any],
    ) -> list[Stretch]:
        """Moves these members' state into flat tensors, and groups neighbours of one age."""
        names = self._rule.state_names(group)
        ages = [1] * len(self.parameters)
        for name in names:
            if name not in self._state:
                if name == "step":
                    steps = torch.zeros(len(self.parameters))  # on the CPU: Python reads them
                    self._state[name] = steps, steps.unbind()
                else:
                    flat = self._allocate(self.flat.numel(), self.flat)
                    self._state[name] = flat, self._windows(flat)
            places = self._state[name][1]
            for index in members:
                state, place = states[self.parameters[index]], places[index]
                held = state.get(name)
                if held is place:
                    continue
                if held is None:
                    place.zero_()
                    ages[index] = 0
                else:
                    place.copy_(held)  # from a checkpoint, or an earlier layout of the buckets
                state[name] = place
        if "step" in names:
            ages = list(map(int, self._state["step"][0].tolist()))
        if len(members) == len(ages) and len(set(ages)) == 1:
            return [(0, len(ages), ages[0])]
        # Neighbours have the same distance between index and position in `members`.
        stretches = groupby(enumerate(members), lambda row: (row[1] - row[0], ages[row[1]]))
        parts = [(age, [index for _, index in rows]) for (_, age), rows in stretches]
        return [(part[0], part[-1] + 1, age) for age, part in parts]

    def update(
        self,
        stretches: Sequence[Stretch],
        group: dict[str, Any],
        begin: int,
        gradient: torch.Tensor,
    ) -> None:
        """Steps the elements that begin at `begin` with this part of the gradient."""
        names = tuple(name for name in self._rule.state_names(group) if name != "step")
        for first, last, age in stretches:
            whole = gradient is self.gradient and (first, last) == (0, len(self.parameters))
            columns = self._all_columns.get(names) if whole else None
            if columns is None:
                columns = self._columns(first, last, names, begin, gradient)
                if whole:
                    self._all_columns[names] = columns
            if columns[0]:
                self._rule.update_flat(columns, age, group)

    def _columns(
        self, first: int, last: int, names: Sequence[str], begin: int, gradient: torch.Tensor
    ) -> list[list[torch.Tensor]]:
        """Cuts these members, their part of the gradient and their state into pieces."""
        flats = [self.flat, *(self._state[name][0] for name in names)]
        columns: list[list[torch.Tensor]] = [[] for _ in range(len(flats) + 1)]
        for piece, next_piece in pairwise(self._pieces):
            if next_piece <= first or piece >= last:
                continue
            low = max(self._offsets[max(first, piece)], begin)
            high = min(self._offsets[min(last, next_piece)], begin + gradient.numel())
            if low >= high:
                continue
            shift = self._begins[piece] - self._offsets[piece]
            # Extends into the gap, so that the fused kernel also steps the last cache line.
            full = self._round_up(high + shift) - shift
            if self._rule.exact_anywhere and high == self._offsets[next_piece]:
                high = full if full <= begin + gradient.numel() else high
            parameter, *state = (flat[low + shift : high + shift] for flat in flats)
            parts = parameter, gradient[low - begin : high - begin], *state
            for column, part in zip(columns, parts, strict=True):
                column.append(part)
        return columns

    def count(self, stretches: Sequence[Stretch]) -> None:
        if "step" in self._state:
            for first, last, _ in stretches:
                self._state["step"][0][first:last].add_(1)


def can_move(parameter: torch.Tensor, view: torch.Tensor) -> bool:
    """True if moving a parameter changes neither its strides nor the bits of a step."""
    # For 16 bits on a CPU, torch rounds once more in the last elements, which do not fill a vector.
    # In a flat tensor other elements are the last.
    sixteen_bit_on_cpu = parameter.element_size() == 2 and parameter.device.type == "cpu"
    return parameter.stride() == view.stride() and not sixteen_bit_on_cpu


def overlapping(parameters: Sequence[torch.Tensor]) -> set[int]:
    """Returns the ids of parameters that share memory. Moving them would silently end that."""
    ranges = [(p.data_ptr(), p.data_ptr() + p.nbytes, id(p)) for p in parameters if p.numel()]
    found = set()
    furthest = 0, 0  # the end of all ranges so far, and the parameter that ends there
    for begin, end, this in sorted(ranges):
        if begin < furthest[0]:
            found |= {furthest[1], this}
        furthest = max(furthest, (end, this))
    return found
