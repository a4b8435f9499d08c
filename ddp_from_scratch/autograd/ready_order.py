"""Records the order in which gradients become ready; buckets are laid out in that order."""

from collections.abc import Sequence

import torch
import torch.distributed as dist


class ReadyOrder:
    """The order of readiness, recorded until all ranks agree on rank 0's order, once and for good.

    Args:
        names: the parameters' names, in the order of registration.
        known: the order that an earlier run recorded, or None.

    Attributes:
        final: the names in the agreed order; None before that.

    Raises:
        ValueError: `known` does not name each parameter once.
    """

    def __init__(self, names: Sequence[str], known: Sequence[str] | None) -> None:
        if known is not None and sorted(known) != sorted(names):
            raise ValueError("ready_order must name each parameter that requires a gradient once")
        self._names = names
        # Indices in the order of readiness: a dict keeps the order of insertion.
        self._counted: dict[int, None] = {}
        self.final = None if known is None else list(known)

    def present(self) -> Sequence[str]:
        """Returns the final order; before it is known, a guess: the last layer is ready first."""
        return self.final or self._names[::-1]

    def count(self, index: int) -> None:
        """Records a ready gradient. One that comes again counts at its last place."""
        self._counted.pop(index, None)
        self._counted[index] = None

    def agree(self, device: torch.device, process_group: dist.ProcessGroup | None) -> Sequence[str]:
        """Returns rank 0's order, on every rank. Collective."""
        unused = [i for i in reversed(range(len(self._names))) if i not in self._counted]
        # Ranks may have had their gradients ready in different orders. All must lay out the same
        # buckets, so one rank decides.
        order = torch.tensor([*self._counted, *unused], device=device)
        dist.broadcast(order, group=process_group, group_src=0)
        self.final = [self._names[index] for index in order.tolist()]
        return self.final
