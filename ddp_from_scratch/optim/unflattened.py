"""Steps parameters where they are: nothing moves, and one call steps many of them.

parameters      |<- fc2.bias ->|     |<------ fc2.weight ------>|    a tensor each,
gradients       |<- fc2.bias ->|     |<------ fc2.weight ------>|    as autograd made it
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import is_
from typing import Any

import torch

from ddp_from_scratch.common.memory import dense_strides
from ddp_from_scratch.optim.update_rules import (
    STEP_DTYPE,
    ParamGroup,
    UpdateRule,
    check_state,
)


class Unflattened:
    """Parameters of one group that are not in flat tensors."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        group: int,
        rule: UpdateRule,
        shared: Collection[int],  # ids of parameters that share memory
    ) -> None:
        self.group = group
        self._rule = rule
        self._rows = [_Row(parameter, id(parameter) in shared) for parameter in parameters]

    def step(self, states: Mapping[torch.Tensor, dict[str, Any]], group: ParamGroup) -> None:
        """Steps those that have a gradient, with the bits of a call for each."""
        names = self._rule.state_names(group)
        found: list[tuple[torch.Tensor, ...]] = []  # a parameter, its gradient and its state
        step_counts: list[int] = []
        for row in self._rows:
            parameter, gradient = row.parameter, row.parameter.grad
            if gradient is None:
                continue
            state = states[parameter] if names else {}
            if not row.fits(gradient):
                self._rule.step(parameter, gradient, state, group)
                continue
            held = tuple(map(state.get, names))
            num_steps = 1
            if len(held) != len(row.state) or not all(map(is_, held, row.state)):
                num_steps = int(held.count(None) == 0)
                row.take_state(state, names)
            found.append((parameter, gradient, *row.state))
            step_counts.append(num_steps)
        if not found:
            return
        columns = [*map(list, zip(*found, strict=True))]
        if "step" in names:
            steps = columns.pop(2 + names.index("step"))
            step_counts = [*map(int, torch.stack(steps).tolist())]
        for num_steps, part in _by_num_steps(step_counts, columns):
            self._rule.update_flat(part, num_steps, group)
        if "step" in names:
            torch._foreach_add_(steps, 1)


class _Row:
    """A parameter, and the tensors of its state that have been checked."""

    def __init__(self, parameter: torch.Tensor, is_shared: bool) -> None:
        self.parameter = parameter
        self.state: tuple[torch.Tensor, ...] = ()
        self._dtype, self._strides = parameter.dtype, dense_strides(parameter)
        # One by one, torch's operations on these have other bits, or an order.
        sixteen_bit_on_cpu = parameter.element_size() == 2 and parameter.is_cpu
        self._needs_own_call = is_shared or sixteen_bit_on_cpu or not parameter.is_floating_point()

    def fits(self, gradient: torch.Tensor) -> bool:
        """True if a call may step the parameter with others: both are dense, in one order."""
        parameter, strides = self.parameter, self._strides
        return (
            not self._needs_own_call
            and gradient.layout is torch.strided
            and gradient.stride() == strides
            and parameter.stride() == strides
            and gradient.dtype is self._dtype
            and parameter.dtype is self._dtype
        )

    def take_state(self, state: dict[str, Any], names: Sequence[str]) -> None:
        """Checks the state, which is new or was loaded; lays it out as the parameter."""
        check_state(self.parameter, state, names)
        for name in names:
            held, like = state.get(name), self.parameter
            if name == "step":
                steps = 0.0 if held is None else held
                state[name] = torch.as_tensor(steps, dtype=STEP_DTYPE, device="cpu").view(())
            elif held is None:
                state[name] = torch.zeros_like(like, requires_grad=False)
            elif held.stride() != like.stride() or held.dtype != like.dtype:
                state[name] = torch.empty_like(like, requires_grad=False).copy_(held)
        self.state = tuple(state[name] for name in names)


def _by_num_steps(
    step_counts: Sequence[int], columns: list[list[torch.Tensor]]
) -> Iterator[tuple[int, list[list[torch.Tensor]]]]:
    """Divides the rows of these columns by `num_steps`."""
    each = set(step_counts)
    if len(each) == 1:
        yield step_counts[0], columns
        return
    for num_steps in sorted(each):
        chosen = [*map(num_steps.__eq__, step_counts)]
        rows = [[x for x, use in zip(column, chosen, strict=True) if use] for column in columns]
        yield num_steps, rows
