"""The weight of a rank's gradients in the next average."""

import math

import torch
import torch.distributed as dist

from ddp_from_scratch.group import of_member


class GradientWeight:
    """This rank's amount out of that of all ranks, agreed while the forward pass runs.

    Gradients are multiplied by `value()` before they are averaged over ranks: amount x world size
    / total. The plain average over n ranks is thereby one that is weighted by the amounts; equal
    amounts make every weight 1.

    Args:
        amount: this rank's samples or tokens.
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
        self._agreed: tuple[float, float] | None = None

    @classmethod
    def of(cls, amount: float, process_group: dist.ProcessGroup | None) -> "GradientWeight":
        """Starts to agree on the total. Collective: every rank gives its own amount.

        Args:
            amount: this rank's.
            process_group: takes tensors on a CPU. To wait there for a number does not wait for the
                GPU's earlier work.

        Raises:
            ValueError: `amount` is negative or not finite.
        """
        right = 0 <= amount < math.inf
        # A wrong amount is sent as nan before it is raised: the others would wait for this rank.
        mine = [amount, amount**2] if right else [math.nan] * 2
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
        """The amounts of all ranks together. Waits, the first time, until all have given theirs.

        Raises:
            ValueError: one of them is negative or not finite.
        """
        return self._agree()[0]

    def all_equal(self) -> bool:
        """Whether all ranks have given the same amount, to rounding. Waits as `total` does."""
        total, squares = self._agree()
        # Never negative, and zero only where all are equal (Cauchy and Schwarz).
        return self._world_size * squares - total**2 <= 1e-12 * total**2

    def value(self) -> float:
        """The factor of this rank's gradients. Waits as `total` does.

        Raises:
            ValueError: the amounts add up to zero. On every rank.
        """
        total = self.total()
        if total == 0:
            raise ValueError("the weights of all ranks are 0: there is nothing to average")
        return self._amount * self._world_size / total
