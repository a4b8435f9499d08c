"""Flat parameters and state: neighbours in a bucket share one tensor and are stepped together.

bucket.buffer   |<- fc2.bias ->|<------ fc2.weight ------>|<- fc1.bias ->| ...
run.gradient    |<- fc2.bias ->|<------ fc2.weight ------>|    a part of the buffer
run.flat        |<- fc2.bias ->|<------ fc2.weight ------>|    every `.data` is a window of it
momentum        |<- fc2.bias ->|<------ fc2.weight ------>|    so is every state: "exp_avg", ...

Parameters begin at cache lines. After a parameter whose size is not a multiple of a cache line,
`flat` has a gap that the gradients do not have, and a *piece* ends. One call steps all pieces:

run.gradient    |<- bias ->|<------- weight ------->|<- bias ->|
run.flat        |<- bias ->|  |<------- weight ------->|  |<- bias ->|

The rules step flat tensors with torch's fused kernels and bits. A kernel's threads split a tensor
at cache lines, so a cut there does not change the bits. Only the last elements, which do not fill a
vector, may be rounded differently.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import accumulate, groupby, pairwise, product
from typing import Any, Protocol, TypeAlias

import torch
from torch.optim.sgd import sgd

from ddp_from_scratch.common.memory import dense_strides
from ddp_from_scratch.core.bucket import Bucket

# In bytes. A multiple of the vector size of every CPU that torch has kernels for.
CACHE_LINE = 64

Group = dict[str, Any]
# A parameter, its gradient, and its state in the order of `state_names`, without "step".
Tensors = Sequence[torch.Tensor]
Columns = Sequence[list[torch.Tensor]]  # the same, for several parameters


class UpdateRule(Protocol):
    """The arithmetic of one of torch's optimizers.

    `state_names` are the keys of a parameter's state; all but "step" have the parameter's shape.
    `update` steps a parameter and its state, and keeps the gradient. `update_flat` steps contiguous
    parts, which begin at cache lines unless the rule is exact anywhere. `age` is a state's number
    of earlier steps. Without a "step" that counts them it is 0 or 1.
    """

    settings: tuple[str, ...]  # the keys of a parameter group that a step depends on
    fused: bool | None  # torch's class has the same bits with this `fused`
    takes_complex: bool
    exact_anywhere: bool  # an element's bits do not depend on its position in a tensor

    def state_names(self, group: Group) -> tuple[str, ...]: ...
    def update(self, tensors: Tensors, age: int, group: Group) -> None: ...
    def update_flat(self, columns: Columns, age: int, group: Group) -> None: ...

    def _update_contiguous(self, tensors: Tensors, age: int, group: Group) -> None:
        strides = dense_strides(tensors[0])  # the kernel ignores strides
        in_order = all(tensor.stride() == strides for tensor in tensors)
        dense = tensors if in_order else [tensor.contiguous() for tensor in tensors]
        self.update_flat([[tensor] for tensor in dense], age, group)
        for tensor, stepped in zip(tensors, dense, strict=True):
            if stepped is not tensor:
                tensor.copy_(stepped)

    def step(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: Group
    ) -> None:
        """Steps one parameter. Like torch, it allocates the state in the first step."""
        names = self.state_names(group)
        age = int(all(state.get(name) is not None for name in names))
        like = gradient if gradient.is_sparse else parameter
        for name in names:
            if state.get(name) is None:
                state[name] = torch.tensor(0.0) if name == "step" else torch.zeros_like(like)
        if "step" in names:
            age = int(state["step"])
        values = (state[name] for name in names if name != "step")
        self.update([parameter, gradient, *values], age, group)
        if "step" in names:
            state["step"] += 1


class SGDRule(UpdateRule):
    """torch.optim.SGD: on a GPU with the bits of `fused=True`, on a CPU of the other forms.

    On a CPU, torch's `fused=True` differs from them only in the momentum of a parameter's last
    elements (at most 7 in float32, 3 in float64), which it rounds once less. Here the operations of
    `foreach=False` step these elements, and the fused kernel steps all others.
    """

    settings = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
    fused = None
    takes_complex = True
    exact_anywhere = True

    def state_names(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def update(self, tensors: Tensors, age: int, group: Group) -> None:
        parameter, gradient, *state = tensors
        if parameter.is_cuda and parameter.is_floating_point() and not gradient.is_sparse:
            self._update_contiguous(tensors, age, group)
            return
        momentum = [state[0] if state and age else None]
        sgd([parameter], [gradient], momentum, foreach=False, fused=False, **_sgd_settings(group))
        if age == 0 and momentum[0] is not None:
            state[0].copy_(momentum[0])

    def update_flat(self, columns: Columns, age: int, group: Group) -> None:
        # The fused kernel steps the whole cache lines of each part, and `update` the rest.
        first = columns[0][0]
        rest = list(columns)
        if first.is_cuda and first.is_floating_point():
            _fused_sgd(columns, age, group)
            return
        if has_exact_kernel(first.dtype, first.device.type):
            line = CACHE_LINE // first.itemsize
            over = [(k, n) for k, part in enumerate(columns[0]) if (n := part.numel() % line)]
            rest = [[column[k][-n:] for k, n in over] for column in columns]
            whole = [list(column) for column in columns]
            for column in whole:
                for k, n in over:
                    column[k] = column[k][:-n]
            _fused_sgd(whole, age, group)
        for tensors in zip(*rest, strict=True):
            self.update(tensors, age, group)


class AdamRule(UpdateRule):
    """torch.optim.Adam and AdamW with the bits of `fused=True`."""

    _of_kernel = ("eps", "weight_decay", "amsgrad", "maximize")
    settings = ("lr", "betas", *_of_kernel, "decoupled_weight_decay")
    fused = True
    takes_complex = False  # torch's fused kernel has none
    exact_anywhere = False

    def state_names(self, group: Group) -> tuple[str, ...]:
        largest = ("max_exp_avg_sq",) if group["amsgrad"] else ()
        return ("step", "exp_avg", "exp_avg_sq", *largest)

    def update(self, tensors: Tensors, age: int, group: Group) -> None:
        if tensors[1].is_sparse:
            raise RuntimeError(
                "Adam does not support sparse gradients, please consider SparseAdam instead"
            )
        self._update_contiguous(tensors, age, group)

    def update_flat(self, columns: Columns, age: int, group: Group) -> None:
        kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
        parameters, gradients, first, second, *largest = columns
        # Filled on the device, because a copy would make the host wait for a GPU.
        step = torch.full((), age + 1.0, device=parameters[0].device)
        beta1, beta2 = group["betas"]
        steps, settings = [step] * len(parameters), {name: group[name] for name in self._of_kernel}
        settings |= {"lr": float(group["lr"]), "beta1": float(beta1), "beta2": float(beta2)}
        maximum = largest[0] if largest else []
        kernel(parameters, gradients, first, second, maximum, steps, **settings)


SGD_RULE, ADAM_RULE = SGDRule(), AdamRule()


def _sgd_settings(group: Group) -> dict[str, Any]:
    settings = {name: group[name] for name in SGDRule.settings}
    return settings | {"lr": float(group["lr"]), "weight_decay": float(group["weight_decay"])}


def _fused_sgd(columns: Columns, age: int, group: Group) -> None:
    parameters, gradients, *momentum = columns
    buffers = momentum[0] if momentum else []
    first = bool(momentum) and age == 0  # a GPU's kernel warns of the flag without momentum
    settings = _sgd_settings(group)
    torch._fused_sgd_(parameters, gradients, buffers, **settings, is_first_step=first)


@cache
def has_exact_kernel(dtype: torch.dtype, device: str) -> bool:
    """True if a CPU's fused SGD has the bits of its separate operations. Tried once."""
    # The build of torch decides: its compiler may fuse a product and a sum, which rounds once.
    if not dtype.is_floating_point or device != "cpu":
        return False
    numbers = torch.linspace(-1.7, 1.3, 512, dtype=dtype, device=device)
    start = [numbers, numbers.flip(0).sin(), numbers.cos()]
    switches = product((0.0, 0.9), (0.0, 0.3), (0.0, 0.01), (False, True), (False, True), (0, 1))
    equal = []
    for momentum, dampening, decay, nesterov, maximize, age in switches:
        group = {"lr": 0.03, "momentum": momentum, "dampening": dampening}
        group |= {"weight_decay": decay, "nesterov": nesterov, "maximize": maximize}
        one, other = ([tensor.clone() for tensor in start[: 2 + (momentum > 0)]] for _ in range(2))
        _fused_sgd([[tensor] for tensor in one], age, group)
        SGD_RULE.update(other, age, group)
        equal += [(a == b).all() for a, b in zip(one, other, strict=True)]
    return bool(torch.stack(equal).all())


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
