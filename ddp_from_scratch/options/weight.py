"""The weight of a rank's gradients in the next average."""

import math

import torch
import torch.distributed as dist

from ddp_from_scratch.common.group import cpu_group, of_member, takes_cpu_tensors
from ddp_from_scratch.core.reducer import CoreReducer

_MOST = 1e100  # float64 ends at 1e308, and squares are summed


def agree_weight(reducer: CoreReducer, amount: float) -> "GradientWeight":
    """Starts to sum all ranks' amounts. Collective. Raises as `Reducer.weight`."""
    reducer.comm.require_unowned_hook("weight() or join()")
    on_cpu = takes_cpu_tensors(reducer.process_group)
    group = reducer.comm.open_group() if on_cpu else cpu_group(reducer.process_group)
    return GradientWeight(amount, group, reducer.comm.sums)


class GradientWeight:
    """The factor for this rank's gradients: amount x world size / sum of all ranks' amounts.

    The plain average of gradients times these factors is the average weighted by amounts. If
    gradients are summed (`sums`), the factor is the amount. Construction is collective. It starts a
    sum of CPU tensors, which overlaps with forward. Raises a ValueError if `amount` is not a
    number, negative, not finite or more than 1e100.
    """

    def __init__(
        self, amount: float, process_group: dist.ProcessGroup | None, sums: bool = False
    ) -> None:
        # A rank with a wrong amount sends nan before it raises, so that the others do not wait.
        try:
            right = not isinstance(amount, (str, bytes)) and 0 <= float(amount) <= _MOST
        except (ArithmeticError, RuntimeError, TypeError, ValueError):
            right = False
        mine = [float(amount), float(amount) ** 2] if right else [math.nan] * 2
        # On the CPU, because reading the sum from a GPU would wait for all earlier work there.
        self._sums = torch.tensor(mine, dtype=torch.float64, device="cpu")
        work = dist.all_reduce(self._sums, group=process_group, async_op=True)
        if not right:
            raise ValueError(
                f"a weight must be 0 or more, and finite, got {amount!r}; the largest is {_MOST:g}"
            )
        self._amount, self._work, self._is_factor = float(amount), of_member(work), sums
        self._world_size = dist.get_world_size(process_group)

    def total(self) -> float:
        """Waits for all ranks' amounts. Raises a ValueError if one is negative or not finite."""
        self._work.wait()
        total: float = self._sums[0].item()
        if math.isnan(total):
            raise ValueError("another rank's weight is negative or not finite, or too large")
        return total

    def check_equal(self) -> None:
        """Raises a RuntimeError if the amounts differ by more than rounding. Waits like `total`."""
        square = self.total() ** 2
        # The difference is never negative, and zero only for equal amounts (Cauchy-Schwarz).
        if self._world_size * self._sums[1] - square > 1e-12 * square:
            raise RuntimeError(
                "the weights of ranks differ, and the module has synchronised batch norm, which "
                "mixes all ranks' gradients before they are weighted: leave weight() out, and "
                "multiply each rank's loss by its amount x world size / the sum of all amounts"
            )

    def value(self) -> float:
        """Returns the factor. Waits like `total`. Raises a ValueError if the amounts sum to 0."""
        total = self.total()
        if total == 0:
            raise ValueError("the weights of all ranks are 0: there is nothing to average")
        # A division: see `core/comm_hooks.py`.
        return self._amount if self._is_factor else self._amount * self._world_size / total
