"""A bucket for one parameter's sparse gradient: every rank gathers all rows, and sums equal ones.

Rows of two ranks, and their average:

    rank 0   rows 3 7        padded   3 7 0 0        all ranks   1 3 5 7 9
    rank 1   rows 1 3 5 9             1 3 5 9                    each row: sum / 2
"""

from collections.abc import Callable, Collection

import torch
import torch.distributed as dist

from ddp_from_scratch.common import gpu
from ddp_from_scratch.common.group import of_member
from ddp_from_scratch.common.memory import grad_dtype
from ddp_from_scratch.core.bucket import AveragePlan, Bucket, BucketState

# The kinds of gradient that ranks exchange. For a sparse one: its number of sparse dimensions.
_NONE, _DENSE = 0, -1


class SparseBucket(Bucket):
    """A bucket of one parameter, without a flat buffer.

    - launch: the ranks exchange the kind of their gradient and its number of rows, asynchronously.
      Comm hooks are not called, since they need flat buffers.
    - wait: a second collective gathers the rows.
    - unpack: the sum of the rows becomes `.grad`.

    The result is coalesced. It has the same bits on every rank, because each sums the same rows in
    rank order. A gradient that is dense on all ranks (the weight has another use) is all-reduced.
    """

    no_graph_reason = "sparse"

    def __init__(
        self,
        member: int,
        parameter: torch.nn.Parameter,
        index: int,
        process_group: dist.ProcessGroup | None,
        name: str,
    ) -> None:
        super().__init__((member,), [parameter], index, name, f"ddp.bucket {index} ({name})")
        self._parameter, self._process_group = parameter, process_group
        self._work: dist.Work | None = None
        # This rank's part divided by the world size: (indices, values) if the gradient is sparse,
        # (gradient,) if it is dense, () if there is none.
        self._mine: tuple[torch.Tensor, ...] = ()
        self._kind_and_rows = _NONE, 0
        self._kinds: list[torch.Tensor] = []
        self._average: torch.Tensor | None = None  # None until LANDED

    # Pack, launch -------------------------------------------------------------------------------

    def pack(self, plan: AveragePlan) -> Collection[int]:
        # A division: see `core/comm_hooks.py`.
        scale, gradient = plan.mean, self._parameter.grad
        self._mine, self._kind_and_rows = (), (_NONE, 0)
        if plan.sends_zeros:
            pass
        elif gradient is not None and gradient.is_sparse:
            own = gradient.coalesce()  # sends each index once
            self._mine = own.indices(), own.values() * scale
            self._kind_and_rows = own.sparse_dim(), own._nnz()
        elif gradient is not None:
            self._mine = ((gradient * scale).contiguous(),)
            self._kind_and_rows = _DENSE, 0
        return {*self.members} - self.unused if gradient is None else ()

    def keep_gradients(self) -> bool:
        return False  # the result is coalesced

    def launch(self, plan: AveragePlan) -> None:
        device = self._parameter.device
        mine = torch.tensor(self._kind_and_rows, dtype=torch.int64, device=device)
        self._kinds = self._one_of_each_rank(mine)
        work = dist.all_gather(self._kinds, mine, self._process_group, async_op=True)
        self._work = of_member(work)
        self.state = BucketState.LAUNCHED

    # Wait ---------------------------------------------------------------------------------------

    @property
    def arrived(self) -> bool:
        # On a GPU `is_completed` of NCCL makes the current stream wait, from torch 2.15 on.
        work = self._work
        return work is None or gpu.is_gpu(self._parameter.device) or work.is_completed()

    def when_landed(self, callback: Callable[[], None]) -> None: ...  # `wait` gathers the rows

    def wait(self) -> None:
        if self._work is None or self._average is not None:
            return
        self._work.wait()
        # Only now is the second collective's size known. All ranks issue it in bucket order.
        kinds, rows = torch.stack(self._kinds).t().tolist()
        found = {kind for kind in kinds if kind != _NONE}
        if len(found) > 1:  # on every rank
            dense = [rank for rank, kind in enumerate(kinds) if kind == _DENSE]
            sparse = [rank for rank, kind in enumerate(kinds) if kind > 0]
            raise RuntimeError(
                f"the gradient of parameter {self.name} is dense on ranks {dense} and sparse on "
                f"{sparse}: it must be the same kind on all"
            )
        if _DENSE in found:
            like = self._parameter
            total = self._mine[0] if self._mine else torch.zeros_like(like, dtype=grad_dtype(like))
            dist.all_reduce(total, group=self._process_group)
            self._average = total
        else:
            self._average = self._sum_rows(rows, max(found, default=1))
        self.state = BucketState.LANDED

    # Unpack -------------------------------------------------------------------------------------

    def unpack(self, used: Collection[int] | None = None) -> None:
        if self._average is not None and (used is None or self.members[0] in used):
            self._parameter.grad = self._average
        self.reset()

    def reset(self) -> None:
        self._work = self._average = None
        self._mine, self.state = (), BucketState.FILLING
        self.missing.update(self.members)
        self.unused.clear()

    def _sum_rows(self, rows: list[int], sparse_dim: int) -> torch.Tensor:
        shape, most = self._parameter.shape, max(rows)
        indices = torch.zeros(sparse_dim, most, dtype=torch.int64, device=self._parameter.device)
        values = self._parameter.new_zeros(
            most, *shape[sparse_dim:], dtype=grad_dtype(self._parameter)
        )
        if self._mine:
            own_indices, own_values = self._mine
            indices[:, : own_indices.shape[1]] = own_indices
            values[: own_values.shape[0]] = own_values
        parts = list(zip(self._gather(indices), self._gather(values), rows, strict=True))
        return torch.sparse_coo_tensor(
            torch.cat([part[:, :count] for part, _, count in parts], dim=1),
            torch.cat([part[:count] for _, part, count in parts]),
            shape,
            check_invariants=False,  # without it torch warns
        ).coalesce()

    def _one_of_each_rank(self, mine: torch.Tensor) -> list[torch.Tensor]:
        return [torch.empty_like(mine) for _ in range(dist.get_world_size(self._process_group))]

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        parts = self._one_of_each_rank(mine)
        # The padded size is the same on all ranks, so all of them skip an empty collective.
        if mine.numel():
            dist.all_gather(parts, mine, group=self._process_group)
        return parts
