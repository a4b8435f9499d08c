"""Monitored barrier: rank 0 hears from each rank, names the missing ones, and answers each."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from ddp_from_scratch.mpi.runtime import MPI

_TAG = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 0)  # beyond every tag that a program uses


def monitored_barrier(group: dist.ProcessGroup, limit: timedelta, wait_all_ranks: bool) -> None:
    """Returns when every rank has called it; a RuntimeError where one has not in time.

    It sends messages, so that it can be used to find out why a group's collectives do not end.

    Args:
        group: the ranks.
        limit: how long rank 0 waits for the others.
        wait_all_ranks: name all ranks that are missing, and not only the first.
    """
    rank, others = group.rank(), range(1, group.size())
    if rank != 0:
        # 0 is no answer's rank: rank 0 itself cannot be missing where it answers.
        answer = torch.zeros(1, dtype=torch.int64)
        group.send([torch.zeros(1, dtype=torch.int64)], 0, _TAG)
        group.recv([answer], 0, _TAG).wait(limit + timedelta(seconds=5))
        missing = [int(answer)] if answer else []
    else:
        heard = {
            other: group.recv([torch.zeros(1, dtype=torch.int64)], other, _TAG) for other in others
        }
        deadline = time.monotonic() + limit.total_seconds()
        # Looked at together: the timeout is for all ranks, not for each.
        while not all(m.is_completed() for m in heard.values()) and time.monotonic() < deadline:
            time.sleep(1e-3)
        missing = [other for other in others if not heard[other].is_completed()]
        for other in set(others) - set(missing):
            group.send([torch.tensor([missing[0] if missing else 0])], other, _TAG).wait()
    if missing:
        named = missing if wait_all_ranks else missing[:1]
        missed = (
            f"Rank{'s' * (len(named) > 1)} {', '.join(map(str, named))} failed to pass "
            f"monitoredBarrier in {limit.total_seconds() * 1e3:g} ms"
        )
        if rank != 0:  # in gloo's words, which programs look for
            missed = (
                f"Rank {rank} successfully reached monitoredBarrier, but received errors while "
                f"waiting for send/recv from rank 0: {missed}"
            )
        raise RuntimeError(f"[Rank {rank}]: {missed}")
