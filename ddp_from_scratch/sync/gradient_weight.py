"""How much a rank's gradients count in the next average."""

import math

import torch
import torch.distributed as dist


class Share:
    """This rank's amount out of that of all ranks, agreed while the forward pass runs.

    Gradients are multiplied by `value()` before they are averaged over ranks: amount x world size
    / total. The plain average over n ranks is thereby one that is weighted by the amounts; equal
    amounts make every share 1.

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
    def of(cls, amount: float, process_group: dist.ProcessGroup | None) -> "Share":
        """Starts to agree on the total. Collective: every rank gives its own amount.

        Args:
            amount: this rank's.
            process_group: takes tensors on a CPU: to wait there for a number does not wait for what
                a GPU has to do before.

        Raises:
            ValueError: `amount` is negative or not finite.
        """
        right = 0 <= amount < math.inf
        # The other ranks hear of it, too: they would wait for this one's gradients.
        mine = [amount, amount**2] if right else [math.nan] * 2
        sums = torch.tensor(mine, dtype=torch.float64)
        work = dist.all_reduce(sums, group=process_group, async_op=True)
        if not right:
            raise ValueError(f"a weight must be 0 or more, and finite, got {amount}")
        assert work is not None, "this rank is not a member of the process group"
        return cls(amount, sums, work, process_group)

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
        """What this rank's gradients are multiplied by. Waits as `total` does.

        Raises:
            ValueError: the amounts add up to zero. On every rank.
        """
        total = self.total()
        if total == 0:
            raise ValueError("the weights of all ranks are 0: there is nothing to average")
        return self._amount * self._world_size / total
