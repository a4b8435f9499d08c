"""Flat parameters and momentum: neighbours of a bucket moved into one tensor, which `sgd.py` steps.

bucket.buffer   |<- fc2.bias ->|<------ fc2.weight ------>|<- fc1.bias ->| ...
run.gradient    |<- fc2.bias ->|<------ fc2.weight ------>|    a part of the buffer
run.flat        |<- fc2.bias ->|<------ fc2.weight ------>|    every `.data` is a window of it
momentum        |<- fc2.bias ->|<------ fc2.weight ------>|    every "momentum_buffer", too
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from ddp_from_scratch.buckets.bucket import Bucket
from ddp_from_scratch.buckets.memory import lies_at

Allocate: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

# Each parameter begins at a multiple of this many bytes, as torch allocates it. At other addresses
# BLAS rounds a matrix product differently.
_ALIGNMENT = 64


class FlatParams:
    """A run: neighbours in a bucket that belong to one parameter group, in one flat tensor.

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
        self.flat = allocate(self.gradient)
        self.places = self._windows(self.flat)
        # Allocated by the first step with momentum, if there is one.
        self._momentum: torch.Tensor | None = None
        self._momentum_places: list[torch.Tensor] = []
        # The parameters stay the same objects: the module and other optimizers hold them.
        for parameter, place in zip(self.parameters, self.places, strict=True):
            place.copy_(parameter)
            parameter.data = place

    def _windows(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Cuts `flat` into windows, each with the offset and strides of a member's gradient."""
        begin = self.gradient.storage_offset()
        return [
            flat.as_strided(g.shape, g.stride(), g.storage_offset() - begin) for g in self.gradients
        ]

    def in_place(self) -> bool:
        """True if all parameters and gradients lie in their windows."""
        return all(
            parameter.grad is not None
            and lies_at(parameter.grad, gradient)
            and lies_at(parameter, place)
            for parameter, gradient, place in zip(
                self.parameters, self.gradients, self.places, strict=True
            )
        )

    def gather_momentum(self, states: Sequence[dict[str, Any]]) -> torch.Tensor:
        """Moves the members' momentum, as far as there is any, into one flat tensor."""
        flat, places = self.momentum()
        for state, place in zip(states, places, strict=True):
            move_momentum(state, place)
        return flat

    def momentum(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Returns a flat tensor for the momentum of all members, and its windows."""
        if self._momentum is None:
            self._momentum = self._allocate(self.flat)
            self._momentum_places = self._windows(self._momentum)
        return self._momentum, self._momentum_places


def move_momentum(state: dict[str, Any], place: torch.Tensor) -> bool:
    """Moves a parameter's momentum to `place`; True if it has no values yet."""
    held = state.get("momentum_buffer")
    if held is None:
        place.zero_()
    elif held is not place:
        # Loaded from a checkpoint, or from an earlier layout of the buckets.
        place.copy_(held)
    state["momentum_buffer"] = place
    return held is None


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
        odd = bool(cuts) and (offsets[i] - offsets[cuts[-1]]) * itemsize % _ALIGNMENT
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
