"""Groups whose ranks count as ranks of several machines: they share memory only within one."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ddp_from_scratch as ddp
from ddp_from_scratch.backend.all_reduce import STAGED_FROM
from ddp_from_scratch.backend.barrier import EAGER_NBYTES
from ddp_from_scratch.backend.mpi_group import MPITransport
from ddp_from_scratch.backend.reduction import CHUNK
from ddp_from_scratch.backend.stage import PIECE
from ddp_from_scratch.backend.transport import GlooTransport

# Elements: on either side of what 2 and 4 ranks bring along, of what several machines leave to
# messages, and of what is staged in one piece, in two and in more than there are slots.
SIZES = (
    *(1, EAGER_NBYTES // 16, EAGER_NBYTES // 16 + 1, EAGER_NBYTES // 8, EAGER_NBYTES // 8 + 1),
    *(STAGED_FROM // 4 - 1, STAGED_FROM // 4, 3 * CHUNK + 5, PIECE // 4 + 1, 5 * PIECE // 4 + 7),
)
OPERATIONS: dict[Any, Callable[..., Any]] = {
    dist.ReduceOp.SUM: sum,
    dist.ReduceOp.AVG: lambda values: sum(values) / len(values),
    dist.ReduceOp.MAX: max,
    dist.ReduceOp.MIN: min,
    dist.ReduceOp.PRODUCT: lambda values: torch.tensor(values).prod().item(),
}


def machines(sizes: Sequence[int], rank: int) -> int:
    return next(i for i in range(len(sizes)) if rank < sum(sizes[: i + 1]))


def group_over(
    world: ddp.World, sizes: Sequence[int] | Callable[[int], int], timeout: timedelta | None = None
) -> Any:
    """A new group whose ranks stand for machines of so many ranks each, or by their numbers."""

    def machine(rank: int) -> int:
        return sizes(rank) if callable(sizes) else machines(sizes, rank)

    with pytest.MonkeyPatch.context() as patched:
        for kind in (GlooTransport, MPITransport):
            patched.setattr(
                kind, "split_by_machine", lambda t: t.split(machine(t.world_ranks[t.rank]))
            )
        group = dist.new_group(timeout=timeout)
        # On gloo the group beside is opened here.
        ddp.Reducer(torch.nn.Linear(1, 1), group).remove()
    return group
