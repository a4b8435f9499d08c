"""Flat parameters and their state: neighbours of a bucket moved into one tensor, stepped together.

bucket.buffer   |<- fc2.bias ->|<------ fc2.weight ------>|<- fc1.bias ->| ...
run.gradient    |<- fc2.bias ->|<------ fc2.weight ------>|    a part of the buffer
run.flat        |<- fc2.bias ->|<------ fc2.weight ------>|    every `.data` is a window of it
momentum        |<- fc2.bias ->|<------ fc2.weight ------>|    so is every state: "exp_avg", ...
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from ddp_from_scratch.buckets.bucket import Bucket
from ddp_from_scratch.optim.update_rules import CACHE_LINE, UpdateRule

Allocate: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


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
        allocate: makes a flat tensor like another one.

    Attributes:
        group: as given.
        parameters: the members' parameters.
        gradient, gradients: the part of the bucket's buffer for the run, and its windows: one for
            the `.grad` of each member.
        flat, places: the flat tensor, and its windows: one for the `.data` of each member.
    """

    def __init__(self, bucket: Bucket, members: range, group: int, allocate: Allocate) -> None:
        self.group, self._allocate = group, allocate
        self.parameters = [bucket.parameters()[i] for i in members]
        self.gradients = [bucket.views[i] for i in members]
        begin = bucket.layout.offsets[members.start]
        numel = sum(parameter.numel() for parameter in self.parameters)
        self.gradient = bucket.buffer()[begin : begin + numel]
        # The elements at which the members begin, and the end of the last one.
        self._offsets = [bucket.layout.offsets[i] - begin for i in members] + [numel]
        self.flat = allocate(self.gradient)
        self.places = self._windows(self.flat)
        # The state by its key: a flat tensor and its windows. Allocated by the first step that
        # needs them.
        self._state: dict[str, tuple[torch.Tensor, Sequence[torch.Tensor]]] = {}
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

    def _windows(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Cuts `flat` into windows, each with the offset and strides of a member's gradient."""
        begin = self.gradient.storage_offset()
        return [
            flat.as_strided(g.shape, g.stride(), g.storage_offset() - begin) for g in self.gradients
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
        rule: UpdateRule,
        group: dict[str, Any],
    ) -> list[Stretch]:
        """Moves the state of these members into flat tensors, and joins neighbours of one age."""
        names = rule.state_names(group)
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
                flat = self._allocate(self.flat)
                self._state[name] = flat, self._windows(flat)
        return self._state[name]

    def update(
        self,
        stretches: Sequence[Stretch],
        rule: UpdateRule,
        group: dict[str, Any],
        begin: int,
        gradient: torch.Tensor,
    ) -> None:
        """Steps the elements from `begin` on with this part of the gradient."""
        names = (name for name in rule.state_names(group) if name != "step")
        flats = [self.flat, *(self._slot(name)[0] for name in names)]
        for first, last, age in stretches:
            low = max(self._offsets[first], begin)
            high = min(self._offsets[last], begin + gradient.numel())
            if low < high:
                parameter, *state = (flat[low:high] for flat in flats)
                part = gradient[low - begin : high - begin]
                rule.update_flat([parameter, part, *state], age, group)

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
    allocate: Allocate,
) -> list[FlatParams]:
    """Moves the bucket's parameters in runs, each of one group; leaves those that cannot move."""
    # None for a parameter that stays where it is.
    movable = [
        group if can_move(parameter, view) and id(parameter) not in shared else None
        for group, parameter, view in zip(groups, bucket.parameters(), bucket.views, strict=True)
    ]
    offsets, itemsize = bucket.layout.offsets, bucket.buffer().itemsize
    cuts: list[int] = []
    for i in range(len(movable)):
        # Most sizes are multiples of 16 elements. After one that is not, the next run begins.
        odd = bool(cuts) and (offsets[i] - offsets[cuts[-1]]) * itemsize % CACHE_LINE
        if i == 0 or odd or movable[i] != movable[i - 1]:
            cuts.append(i)
    return [
        FlatParams(bucket, range(begin, end), group, allocate)
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
