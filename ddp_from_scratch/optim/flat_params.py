"""Flat parameters and their state: neighbours of a bucket moved into one tensor, stepped together.

bucket.buffer   |<- fc2.bias ->|<------ fc2.weight ------>|<- fc1.bias ->| ...
run.gradient    |<- fc2.bias ->|<------ fc2.weight ------>|    a part of the buffer
run.flat        |<- fc2.bias ->|<------ fc2.weight ------>|    every `.data` is a window of it
momentum        |<- fc2.bias ->|<------ fc2.weight ------>|    so is every state: "exp_avg", ...

A parameter begins at a cache line. After one whose size is no multiple of a cache line there is a
gap in `flat` that the gradients do not have, and a *piece* ends. One call steps all pieces:

run.gradient    |<- bias ->|<------- weight ------->|<- bias ->|
run.flat        |<- bias ->|  |<------- weight ------->|  |<- bias ->|
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

import torch

from ddp_from_scratch.core.bucket import Bucket
from ddp_from_scratch.optim.update_rules import CACHE_LINE, UpdateRule

Allocate: TypeAlias = Callable[[int, torch.Tensor], torch.Tensor]


class Stretch(NamedTuple):
    """Neighbours in a run that are stepped alike: the members `first` to `last - 1`.

    Attributes:
        age: the steps that their state has seen; see `UpdateRule`.
    """

    first: int
    last: int
    age: int


class FlatParams:
    """A run: neighbours in a bucket that belong to one parameter group, in one flat tensor.

    Each member begins at a cache line, since torch allocates it so: at other addresses BLAS rounds
    a matrix product differently, and a step may round other elements as its last ones.

    Args:
        bucket: holds their gradients.
        members: their positions in the bucket.
        group: the index of their parameter group.
        rule: steps them.
        allocate: makes a flat tensor of this many elements, like another one.

    Attributes:
        group: as given.
        parameters: the members' parameters.
        gradient, gradients: the part of the bucket's buffer for the run, and its windows: one for
            the `.grad` of each member.
        flat, places: the flat tensor, and its windows: one for the `.data` of each member.
    """

    def __init__(
        self, bucket: Bucket, members: range, group: int, rule: UpdateRule, allocate: Allocate
    ) -> None:
        self.group, self._rule, self._allocate = group, rule, allocate
        self.parameters = [bucket.parameters()[i] for i in members]
        self.gradients = [bucket.views[i] for i in members]
        begin = bucket.offsets[members.start]
        # The element of the gradient at which each member begins, and the end of the last one.
        self._offsets = [0, *accumulate(parameter.numel() for parameter in self.parameters)]
        self.gradient = bucket.buffer()[begin : begin + self._offsets[-1]]
        # The same in the flat tensor, and the members with which pieces begin.
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
        # The state by its key: a flat tensor and its windows. Allocated by the first step that
        # needs them.
        self._state: dict[str, tuple[torch.Tensor, Sequence[torch.Tensor]]] = {}
        # The columns of a step of all members, by the names of their state: the same in most steps.
        self._all_columns: dict[tuple[str, ...], list[list[torch.Tensor]]] = {}
        # The parameters stay the same objects: the module and other optimizers hold them.
        for parameter, place in zip(self.parameters, self.places, strict=True):
            place.copy_(parameter)
            parameter.data = place
        self._rows = [
            (parameter, place.data_ptr(), gradient.data_ptr(), gradient.stride())
            for parameter, place, gradient in zip(
                self.parameters, self.places, self.gradients, strict=True
            )
        ]

    def _round_up(self, element: int) -> int:
        return -(-element // self._line) * self._line

    def _windows(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Cuts `flat` into windows, each with the strides of a member's gradient."""
        return [
            flat.as_strided(gradient.shape, gradient.stride(), begin)
            for gradient, begin in zip(self.gradients, self._begins, strict=True)
        ]

    def in_place(self) -> list[int]:
        """Returns the members whose parameter and gradient lie in their windows."""
        # Once per parameter and step, so with addresses that are known already.
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
        """Moves the state of these members into flat tensors, and joins neighbours of one age."""
        names = self._rule.state_names(group)
        ages = [1] * len(self.parameters)
        for name in names:
            places = self._slot(name)[1]
            for index in members:
                state, place = states[self.parameters[index]], places[index]
                held = state.get(name)
                if held is place:
                    continue
                if held is None:
                    place.zero_()
                    ages[index] = 0
                else:
                    # Loaded from a checkpoint, or from an earlier layout of the buckets.
                    place.copy_(held)
                state[name] = place
        if "step" in names:
            ages = list(map(int, self._slot("step")[0].tolist()))
        return _stretches(members, ages)

    def _slot(self, name: str) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Returns a flat tensor for one state of all members, and its windows."""
        if name not in self._state:
            if name == "step":
                # Numbers for Python, on whatever device the parameters are.
                steps = torch.zeros(len(self.parameters))
                self._state[name] = steps, steps.unbind()
            else:
                flat = self._allocate(self.flat.numel(), self.flat)
                self._state[name] = flat, self._windows(flat)
        return self._state[name]

    def update(
        self,
        stretches: Sequence[Stretch],
        group: dict[str, Any],
        begin: int,
        gradient: torch.Tensor,
    ) -> None:
        """Steps the elements from `begin` on with this part of the gradient."""
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
        self, first: int, last: int, names: Iterable[str], begin: int, gradient: torch.Tensor
    ) -> list[list[torch.Tensor]]:
        """Cuts these members, their part of the gradient and their state into pieces."""
        flats = [self.flat, *(self._slot(name)[0] for name in names)]
        columns: list[list[torch.Tensor]] = [[] for _ in range(len(flats) + 1)]
        for piece, next_piece in pairwise(self._pieces):
            if next_piece <= first or piece >= last:
                continue
            low = max(self._offsets[max(first, piece)], begin)
            high = min(self._offsets[min(last, next_piece)], begin + gradient.numel())
            if low >= high:
                continue
            shift = self._begins[piece] - self._offsets[piece]
            # Into the gap, with any numbers: a whole cache line is stepped by the fused kernel.
            full = self._round_up(high + shift) - shift
            if self._rule.exact_anywhere and high == self._offsets[next_piece]:
                high = full if full <= begin + gradient.numel() else high
            parameter, *state = (flat[low + shift : high + shift] for flat in flats)
            parts = parameter, gradient[low - begin : high - begin], *state
            for column, part in zip(columns, parts, strict=True):
                column.append(part)
        return columns

    def count(self, stretches: Sequence[Stretch]) -> None:
        """Adds 1 to the "step" of these members, if their state has one."""
        if "step" in self._state:
            for first, last, _ in stretches:
                self._state["step"][0][first:last].add_(1)


def _stretches(members: Iterable[int], ages: Sequence[int]) -> list[Stretch]:
    """Joins members that are neighbours and have one age."""
    found: list[Stretch] = []
    first, last, age = 0, 0, 0
    for index in members:
        if index != last or ages[index] != age:
            found.append(Stretch(first, last, age))
            first, age = index, ages[index]
        last = index + 1
    found.append(Stretch(first, last, age))
    return [stretch for stretch in found if stretch.first < stretch.last]


def make_flat_params(
    bucket: Bucket,
    groups: Sequence[int | None],
    shared: set[int],
    rule: UpdateRule,
    allocate: Allocate,
    cut: bool,
) -> list[FlatParams]:
    """Moves the bucket's parameters in runs, each of one group; leaves those that cannot move.

    `cut` is true if `FlatParams.update` gets the gradient in parts.
    """
    # None for a parameter that stays where it is.
    movable = [
        group if can_move(parameter, view) and id(parameter) not in shared else None
        for group, parameter, view in zip(groups, bucket.parameters(), bucket.views, strict=True)
    ]
    offsets, itemsize = bucket.offsets, bucket.buffer().itemsize
    cuts: list[int] = []
    for i in range(len(movable)):
        odd = bool(cuts) and (offsets[i] - offsets[cuts[-1]]) * itemsize % CACHE_LINE != 0
        # A part that begins within a piece need not begin at a cache line of a parameter.
        apart = odd and cut and not rule.exact_anywhere
        if i == 0 or apart or movable[i] != movable[i - 1]:
            cuts.append(i)
    return [
        FlatParams(bucket, range(begin, end), group, rule, allocate)
        for begin, end in zip(cuts, [*cuts[1:], len(movable)], strict=True)
        if (group := movable[begin]) is not None
    ]


def can_move(parameter: torch.Tensor, view: torch.Tensor) -> bool:
    """True if moving a parameter changes neither its strides nor the bits of a step."""
    # The last elements of a tensor do not fill a vector. In 16 bits on a CPU, torch computes these
    # with one rounding more; in a flat tensor other elements are the last.
    sixteen_bit_on_cpu = parameter.element_size() == 2 and parameter.device.type == "cpu"
    return parameter.stride() == view.stride() and not sixteen_bit_on_cpu


def overlapping(parameters: Sequence[torch.Tensor]) -> set[int]:
    """Returns the ids of parameters that share memory with another one."""
    # Moved, such parameters would no longer share memory, and nothing would report it.
    ranges = sorted(
        (parameter.data_ptr(), parameter.data_ptr() + parameter.nbytes, id(parameter))
        for parameter in parameters
        if parameter.numel()
    )
    found = set()
    # The end of all ranges so far, and the parameter that ends there.
    furthest, last = 0, 0
    for begin, end, this in ranges:
        if begin < furthest:
            found |= {last, this}
        if end > furthest:
            furthest, last = end, this
    return found
