"""The weight of a rank's gradients in the next average."""

import math

import torch
import torch.distributed as dist

from ddp_from_scratch.group import of_member


class GradientWeight:
    """The factor of this rank's gradients: amount x world size / sum of all ranks' amounts.

    The plain average of gradients times these factors is the average weighted by amounts. Ranks
    agree on the sum while the forward pass runs. Equal amounts make every factor 1.

    Args:
        amount: this rank's number of samples or tokens.
        sums: of all ranks' amounts and of their squares, float64, (2,), once `work` has ended.
        work: the all-reduce of `sums`.
        process_group: the ranks that take part.
    """

    def __init__(
        self,
        amount: float,
        sums: torch.Tensor,
        work: dist.Work,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self._amount, self._sums, self._work = amount, sums, work
        self._world_size = dist.get_world_size(process_group)
        # `sums` as numbers, so that the all-reduce is waited for once.
        self._agreed: tuple[float, float] | None = None

    @classmethod
    def of(cls, amount: float, process_group: dist.ProcessGroup | None) -> "GradientWeight":
        """Starts to agree on the sum of all amounts. Collective: every rank gives its own.

        Args:
            amount: this rank's.
            process_group: must take CPU tensors.

        Raises:
            ValueError: `amount` is negative or not finite.
        """
        right = 0 <= amount < math.inf
        # A wrong amount is sent as nan before this rank raises, or the others would wait for it.
        mine = [amount, amount**2] if right else [math.nan] * 2
        # On the CPU: reading the sum from a GPU would wait for all its earlier work.
        sums = torch.tensor(mine, dtype=torch.float64)
        work = dist.all_reduce(sums, group=process_group, async_op=True)
        if not right:
            raise ValueError(f"a weight must be 0 or more, and finite, got {amount}")
        return cls(amount, sums, of_member(work), process_group)

    def _agree(self) -> tuple[float, float]:
        if self._agreed is None:
            self._work.wait()
            total, squares = self._sums.tolist()
            if math.isnan(total):
                raise ValueError("another rank's weight is negative or not finite")
            self._agreed = total, squares
        return self._agreed

    def total(self) -> float:
        """Returns the sum of all ranks' amounts. The first call waits for all ranks to give theirs.

        Raises:
            ValueError: an amount is negative or not finite.
        """
        return self._agree()[0]

    def all_equal(self) -> bool:
        """True if all ranks gave the same amount, up to rounding. Waits as `total` does."""
        total, squares = self._agree()
        # The difference is never negative, and zero only if all amounts are equal (Cauchy-Schwarz).
        return self._world_size * squares - total**2 <= 1e-12 * total**2

    def value(self) -> float:
        """Returns the factor of this rank's gradients. Waits as `total` does.

        Raises:
            ValueError: on every rank: the amounts add up to zero.
        """
        total = self.total()
        if total == 0:
            raise ValueError("the weights of all ranks are 0: there is nothing to average")
        return self._amount * self._world_size / total
