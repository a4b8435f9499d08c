r"""How far the clocks of a group's machines are apart.

Ranks of one machine read one clock. The first rank of every other machine exchanges messages with
rank 0:

    rank 0        t0 ------.             .------> t1
                            \           /
    other rank               '--> t ---'        t is taken to be (t0 + t1) / 2

The quickest of several rounds counts: its error is at most half of its round-trip time. Follows
Cristian, "Probabilistic clock synchronization" (1989).
"""

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

# Of the group itself below: torch's functions refuse a group that it does not list (`open_gloo`).
_ROUNDS, _TAG = 20, 0


def measure(hosts: Sequence[str], group: dist.ProcessGroup) -> list[tuple[float, float]]:
    """Returns the ms to add to each rank's clock to get rank 0's, and the error. Collective.

    Args:
        hosts: the machine of each rank.
        group: takes CPU tensors.
    """
    firsts = [rank for rank, host in enumerate(hosts) if host not in hosts[:rank]]
    rank = group.rank()
    found = torch.zeros(len(hosts), 2, dtype=torch.float64)
    for other in firsts[1:]:
        if rank == 0:
            found[other] = torch.tensor(_ask(other, group), dtype=torch.float64)
        elif rank == other:
            _answer(group)
    dist.broadcast(found, group=group, group_src=0)
    return [tuple(found[hosts.index(host)].tolist()) for host in hosts]


def _ask(other: int, group: dist.ProcessGroup) -> tuple[float, float]:
    rounds = []
    there = torch.zeros(1, dtype=torch.float64)
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        group.send([there], other, _TAG).wait()
        group.recv([there], other, _TAG).wait()
        ended = time.perf_counter()
        rounds.append((ended - began, (began + ended) / 2 - there.item()))
    way, offset = min(rounds)
    return offset * 1e3, way / 2 * 1e3


def _answer(group: dist.ProcessGroup) -> None:
    now = torch.zeros(1, dtype=torch.float64)
    for _ in range(_ROUNDS):
        group.recv([now], 0, _TAG).wait()
        now.fill_(time.perf_counter())
        group.send([now], 0, _TAG).wait()
