"""A bucket for the sparse gradient of one parameter: gathered, never packed into a flat buffer.

An embedding made with `sparse=True` gives a gradient that holds only the rows of its weight that
were looked up, and their indices. The number of rows differs between ranks and steps, so they
cannot be all-reduced. Instead every rank gathers all rows, and adds up equal ones:

    rank 0   rows 3 7        padded   3 7 0 0        all ranks   1 3 5 7 9
    rank 1   rows 1 3 5 9             1 3 5 9                    each row: sum / 2
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch import gpu
from ddp_from_scratch.buckets.gradient_bucket import BucketState, LaunchArgs
from ddp_from_scratch.buckets.layout import BucketLayout
from ddp_from_scratch.group import of_member

# Kinds of gradient, as ranks exchange them. A sparse one's kind is its number of sparse dimensions.
_NONE, _DENSE = 0, -1


def sparse_parameters(module: torch.nn.Module) -> set[int]:
    """Returns the ids of the parameters that a layer declares to have sparse gradients."""
    return {
        id(layer.weight)
        for layer in module.modules()
        if isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and layer.sparse
    }


class SparseBucket:
    """A `GradientBucket` of one parameter, without a flat buffer.

    - ready: `mark_ready` or `mark_unused`, as for `Bucket`.
    - launch: all ranks exchange the kind of their gradient and its number of rows, asynchronously.
      No comm hook is called: hooks are for flat buffers.
    - wait: a second collective gathers the rows.
    - unpack: the sum of the rows becomes `.grad`.

    The result is coalesced and has the same bits on every rank: each adds up the same rows in the
    order of ranks. If the gradient is dense on all ranks (the weight is also used elsewhere), it is
    averaged as a dense one.

    Args:
        member: the index of the parameter.
        name: the parameter's name, for errors.
        index: the bucket's place in the order of launch.
    """

    is_sparse = True
    early = None

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
        self.state = BucketState.FILLING
        self._work: dist.Work | None = None
        # This rank's part, divided by the world size: (indices, values) of a sparse gradient,
        # (gradient,) of a dense one, () of none.
        self._mine: tuple[torch.Tensor, ...] = ()
        self._kinds: list[torch.Tensor] = []
        # None until LANDED.
        self._average: torch.Tensor | None = None

    def index(self) -> int:
        """Returns its place in the order of launch."""
        return self._index

    def parameters(self) -> list[torch.nn.Parameter]:
        """Returns the one parameter."""
        return [self._parameter]

    # Ready --------------------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """True if its gradient has been marked ready or unused."""
        return not self.missing

    def mark_ready(self, index: int) -> bool:
        """Marks its one gradient ready. Idempotent."""
        self.missing.discard(index)
        return True

    def mark_unused(self, index: int) -> None:
        """Marks it as unused: it contributes the `.grad` of earlier passes, if any."""
        self.missing.discard(index)

    # Launch -------------------------------------------------------------------------------------

    @torch.no_grad()
    def launch(self, args: LaunchArgs, on_packed: Callable[[Any], None] | None = None) -> None:
        """Exchanges the numbers of rows; returns before they are there.

        Args:
            args: only the weight is used: it is multiplied in here, with the division.
            on_packed: see `GradientBucket`.
        """
        gradient = self._parameter.grad
        kind, rows = _NONE, 0
        if gradient is not None and args.weight != 0:
            scale = args.weight / dist.get_world_size(self._process_group)
            if gradient.is_sparse:
                # Adds up equal rows of this rank, so that each is sent once.
                own = gradient.coalesce()
                self._mine = own.indices(), own.values() * scale
                kind, rows = own.sparse_dim(), own._nnz()
            else:
                self._mine, kind = ((gradient * scale).contiguous(),), _DENSE
        if on_packed is not None:
            on_packed(self)
        mine = torch.tensor([kind, rows], device=self._parameter.device)
        self._kinds = [
            torch.empty_like(mine) for _ in range(dist.get_world_size(self._process_group))
        ]
        work = dist.all_gather(self._kinds, mine, self._process_group, async_op=True)
        self._work = of_member(work)
        self.state = BucketState.LAUNCHED

    # Wait ---------------------------------------------------------------------------------------

    @property
    def arrived(self) -> bool:
        """True if this bucket waits for no other rank, as far as is known before `wait`."""
        # On a GPU the host waits for nothing. From torch 2.15 on, `is_completed` of NCCL would make
        # the current stream wait.
        work = self._work
        return work is None or gpu.is_gpu(self._parameter.device) or work.is_completed()

    def when_landed(self, callback: Callable[[], None]) -> None:
        """Does nothing: the rows are gathered in `wait`."""

    def wait(self) -> None:
        """Gathers the rows, if launched, and keeps the average. Idempotent.

        Raises:
            RuntimeError: on every rank: the gradient is sparse on some ranks and dense on others.
        """
        if self._work is None or self._average is not None:
            return
        self._work.wait()
        # Only now is the size of the second collective known. Buckets are waited for in order, so
        # all ranks start it at the same place among the collectives.
        kinds, rows = torch.stack(self._kinds).t().tolist()
        found = {kind for kind in kinds if kind != _NONE}
        if len(found) > 1:
            raise RuntimeError(self._differ(kinds))
        if _DENSE in found:
            self._average = self._sum_dense()
        else:
            self._average = self._sum_rows(rows, max(found, default=1))
        self.state = BucketState.LANDED

    # Unpack -------------------------------------------------------------------------------------

    @torch.no_grad()
    def finish(self, used: Collection[int] | None = None) -> None:
        """Waits for the average and puts it into `.grad`. Idempotent; see `Bucket.finish`.

        Raises: as `wait`.
        """
        self.wait()
        if self._average is not None and (used is None or self.layout.members[0] in used):
            self._parameter.grad = self._average
        self.state = BucketState.FILLING
        self.missing = set(self.layout.members)
        self._work = self._average = None
        self._mine = ()

    def reset(self) -> None:
        """Empties the bucket, whatever has become of its launch. Idempotent."""
        self._work = self._average = None
        self.finish()

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
            # The indices came out of a sparse tensor. torch warns unless this is given.
            check_invariants=False,
        ).coalesce()

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._process_group))]
        # An empty all-gather is not sent: the padded size is the same on every rank, so all leave
        # it out.
        if mine.numel():
            dist.all_gather(parts, mine, group=self._process_group)
        return parts

    def _differ(self, kinds: list[int]) -> str:
        dense = [rank for rank, kind in enumerate(kinds) if kind == _DENSE]
        return (
            f"the gradient of parameter {self._name} is dense on ranks {dense} and sparse on "
            f"{[r for r, kind in enumerate(kinds) if kind > 0]}: it must be the same kind on all"
        )
