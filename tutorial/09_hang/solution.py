"""Solutions of chapter 9."""

import torch
import torch.distributed as dist


def late_by_py_spy():
    """Rank 2 waits for a batch; the others wait in an all-reduce."""
    return 2


def late_by_stall_after():
    """Rank 3 has computed 4 of 8 gradients. Rank 2 was only the first to report."""
    return 3


def other_by_comparison():
    """Rank 2 has one number fewer than the others."""
    return 2


def skipped_by_flight_recorder():
    """Rank 1 has recorded one call fewer. The equal sizes do not show which one."""
    return 1


def all_can(this_rank_can):
    """Returns True if `this_rank_can` is True on every rank."""
    answer = torch.tensor(int(this_rank_can))
    dist.all_reduce(answer, dist.ReduceOp.MIN)
    return bool(answer)


def train(batches, step):
    """Calls `step(batch)` for this rank's batches, as long as every rank has one."""
    left = iter(batches)
    batch = next(left, None)
    while all_can(batch is not None):
        step(batch)
        batch = next(left, None)
