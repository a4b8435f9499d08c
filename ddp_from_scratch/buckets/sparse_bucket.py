"""The gradient of one parameter that is sparse: it is gathered, and never laid into a flat buffer.

An embedding made with `sparse=True` gives a gradient that holds the rows of its weight that were
looked up, and their indices. How many there are differs between ranks and steps, so they cannot be
all-reduced: every rank gathers all of them, and the sum of equal rows is the average.

    rank 0   rows 3 7        padded   3 7 0 0        all ranks   1 3 5 7 9
    rank 1   rows 1 3 5 9             1 3 5 9                    each row: sum / 2
"""

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch.buckets.bucket import CommHook
from ddp_from_scratch.buckets.layout import BucketLayout

_NONE, _DENSE = 0, -1  # kinds of gradient; others are the number of dimensions that are sparse


def sparse_parameters(module: torch.nn.Module) -> set[int]:
    """The ids of the parameters that a module declares to have sparse gradients."""
    return {
        id(layer.weight)
        for layer in module.modules()
        if isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and layer.sparse
    }


class SparseBucket:
    """Has the phases of a `Bucket`, for one parameter; its `.grad` is a tensor of its own.

    1. `mark_ready`, `mark_absent`: as of `Bucket`.
    2. `launch`: all ranks tell each other what kind of gradient they have and how many rows,
       asynchronously. Comm hooks are for flat buffers: a sparse gradient is sent as it is.
    3. `finish`: only now is it known how much room the rows need. They are gathered, in a second
       collective, which is in the same order on all ranks, as buckets are finished in order.

    The result is coalesced and has the same bits on every rank: each adds up the same rows in the
    order of ranks. Where the gradient is dense on all ranks (the weight is also used elsewhere), it
    is averaged as a dense one.

    Args:
        member: the index of the parameter.
        name: of the parameter, for errors.
        parameter: the parameter.
        index: its place in the order of launch.
        process_group: the ranks that take part.
    """

    def __init__(
        self,
        member: int,
        name: str,
        parameter: torch.nn.Parameter,
        index: int,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self.layout = BucketLayout((member,), (0,), parameter.numel())
        self._name, self._parameter, self._index = name, parameter, index
        self._process_group = process_group
        self.missing = {member}
        self._work: dist.Work | None = None
        self._mine: tuple[torch.Tensor, ...] = ()  # what this rank contributes
        self._kinds: list[torch.Tensor] = []
        self._average: torch.Tensor | None = None

    def index(self) -> int:
        """Its place in the order of launch."""
        return self._index

    def parameters(self) -> list[torch.nn.Parameter]:
        """The one parameter."""
        return [self._parameter]

    # 1. ready -----------------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """Whether its gradient has been counted in."""
        return not self.missing

    @property
    def launched(self) -> bool:
        """Whether it is under way."""
        return self._work is not None

    @property
    def landed(self) -> bool:
        """Whether it waits for no other rank, as far as that can be told before `finish`."""
        return self._work is None or self._work.is_completed()

    def mark_ready(self, index: int, factor: float = 1.0) -> bool:
        """Its gradient is there. Idempotent; it is multiplied at the launch, not by `factor`."""
        self.missing.clear()
        return True

    def mark_absent(self, index: int) -> bool:
        """It gets no gradient, and contributes what `.grad` holds from earlier passes, if any."""
        self.missing.clear()
        return True

    # 2. launch ----------------------------------------------------------------------------------

    @torch.no_grad()
    def launch(
        self, comm_hook: CommHook, state: Any = None, share: float = 1.0, factor: float = 1.0
    ) -> None:
        """Tells the other ranks how many rows there are; returns while that is under way.

        Args:
            comm_hook: not used.
            state: not used.
            share: as of `Bucket`. With 0 nothing is contributed.
            factor: not used.
        """
        gradient = self._parameter.grad
        kind, rows = _NONE, 0
        if gradient is not None and share != 0:
            factor = share / dist.get_world_size(self._process_group)
            if gradient.is_sparse:
                own = gradient.coalesce()  # equal rows are added up before they are sent
                self._mine = own.indices(), own.values() * factor
                kind, rows = own.sparse_dim(), own._nnz()
            else:
                self._mine, kind = ((gradient * factor).contiguous(),), _DENSE
        told = torch.tensor([kind, rows], device=self._parameter.device)
        self._kinds = [
            torch.empty_like(told) for _ in range(dist.get_world_size(self._process_group))
        ]
        self._work = dist.all_gather(self._kinds, told, self._process_group, async_op=True)
        assert self._work is not None, "this rank is not a member of the process group"

    # 3. finish ----------------------------------------------------------------------------------

    def wait(self) -> None:
        """Gathers the rows, if it was launched, and keeps the average. Idempotent.

        Raises:
            RuntimeError: the gradient is sparse on some ranks and dense on others. On every rank.
        """
        if self._work is None or self._average is not None:
            return
        self._work.wait()
        kinds, rows = torch.stack(self._kinds).t().tolist()
        found = {kind for kind in kinds if kind != _NONE}
        if len(found) > 1:
            raise RuntimeError(self._differ(kinds))
        if _DENSE in found:
            self._average = self._sum_dense()
        else:
            self._average = self._sum_rows(rows, max(found, default=1))

    @torch.no_grad()
    def finish(self, used: Collection[int] | None = None) -> None:
        """Waits for the average and puts it into `.grad`. Idempotent; arguments as of `Bucket`.

        Raises: as `wait`.
        """
        self.wait()
        if self._average is not None and (used is None or self.layout.members[0] in used):
            self._parameter.grad = self._average
        self.reset()

    def reset(self) -> None:
        """Forgets what was counted in and launched. Idempotent."""
        self.missing = set(self.layout.members)
        self._work = self._average = None
        self._mine = ()

    def _sum_dense(self) -> torch.Tensor:
        total = self._mine[0] if self._mine else torch.zeros_like(self._parameter)
        dist.all_reduce(total, group=self._process_group)
        return total

    def _sum_rows(self, rows: list[int], sparse_dim: int) -> torch.Tensor:
        shape, most = self._parameter.shape, max(rows)
        indices = torch.zeros(sparse_dim, most, dtype=torch.int64, device=self._parameter.device)
        values = self._parameter.new_zeros(most, *shape[sparse_dim:])
        if self._mine:
            own_indices, own_values = self._mine
            indices[:, : own_indices.shape[1]] = own_indices
            values[: own_values.shape[0]] = own_values
        parts = list(zip(self._gather(indices), self._gather(values), rows, strict=True))
        return torch.sparse_coo_tensor(
            torch.cat([part[:, :count] for part, _, count in parts], dim=1),
            torch.cat([part[:count] for _, part, count in parts]),
            shape,
            check_invariants=False,  # they came out of a sparse tensor; says so to torch's warning
        ).coalesce()

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._process_group))]
        if mine.numel():
            dist.all_gather(parts, mine, group=self._process_group)
        return parts

    def _differ(self, kinds: list[int]) -> str:
        dense = [rank for rank, kind in enumerate(kinds) if kind == _DENSE]
        return (
            f"the gradient of parameter {self._name} is dense on ranks {dense} and sparse on "
            f"{[r for r, kind in enumerate(kinds) if kind > 0]}: it must be the same kind on all"
        )
