"""The order in which gradients become ready, which is that of the buckets."""

from collections.abc import Sequence

import torch
import torch.distributed as dist


class ReadyOrder:
    """Records gradients until all ranks have agreed on rank 0's order, once and for good.

    Args:
        names: of the parameters, in the order of registration.
        known: the order of an earlier run, or None.

    Attributes:
        final: the names in the order agreed on, or None as long as it is not.

    Raises:
        ValueError: `known` does not name each parameter once.
    """

    def __init__(self, names: Sequence[str], known: Sequence[str] | None) -> None:
        if known is not None and sorted(known) != sorted(names):
            raise ValueError("ready_order must name each parameter that requires a gradient once")
        self._names = names
        self._counted: dict[int, None] = {}  # in the order of readiness
        self.final = None if known is None else list(known)

    def present(self) -> Sequence[str]:
        """The final order; before it is known, that the last layer's gradient is ready first."""
        return self.final or self._names[::-1]

    def count(self, index: int) -> None:
        """A gradient is ready; one that comes again counts where it comes last."""
        if self.final is None:
            self._counted.pop(index, None)
            self._counted[index] = None

    def agree(self, device: torch.device, process_group: dist.ProcessGroup | None) -> Sequence[str]:
        """Rank 0's order, on every rank. Collective."""
        unused = [i for i in reversed(range(len(self._names))) if i not in self._counted]
        order = torch.tensor([*self._counted, *unused], device=device)
        dist.broadcast(order, group=process_group, group_src=0)
        self.final = [self._names[index] for index in order.tolist()]
        return self.final
