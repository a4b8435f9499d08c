"""How much a rank's gradients count in the next average."""

import torch
import torch.distributed as dist


class Share:
    """This rank's amount out of that of all ranks, agreed while the forward pass runs.

    Gradients are multiplied by `value()` before they are averaged over ranks: amount x world size
    / total. The plain average over n ranks is thereby one that is weighted by the amounts; equal
    amounts make every share 1.

    Args:
        amount: this rank's samples or tokens.
        total: tensor of one element, the sum of all ranks' amounts once `work` has ended.
        work: the all-reduce of `total`.
        process_group: the ranks that take part.
    """

    def __init__(
        self,
        amount: float,
        total: torch.Tensor,
        work: dist.Work,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self._amount, self._total, self._work = amount, total, work
        self._world_size = dist.get_world_size(process_group)
        self._sum: float | None = None

    @classmethod
    def of(
        cls, amount: float, device: torch.device, process_group: dist.ProcessGroup | None
    ) -> "Share":
        """Starts to agree on the total. Collective: every rank gives its own amount.

        Raises:
            ValueError: `amount` is negative or not finite.
        """
        if not 0 <= amount < float("inf"):
            raise ValueError(f"a weight must be 0 or more, and finite, got {amount}")
        # Filled where it is: a number that is copied to a GPU waits for what that has to do before.
        total = torch.full((1,), amount, dtype=torch.float64, device=device)
        work = dist.all_reduce(total, group=process_group, async_op=True)
        assert work is not None, "this rank is not a member of the process group"
        return cls(amount, total, work, process_group)

    def total(self) -> float:
        """The amounts of all ranks together. Waits, the first time, until all have given theirs."""
        if self._sum is None:
            self._work.wait()
            self._sum = self._total.item()
        return self._sum

    def value(self) -> float:
        """What this rank's gradients are multiplied by. Waits as `total` does.

        Raises:
            ValueError: the amounts add up to zero. On every rank.
        """
        total = self.total()
        if total == 0:
            raise ValueError("the weights of all ranks are 0: there is nothing to average")
        return self._amount * self._world_size / total
