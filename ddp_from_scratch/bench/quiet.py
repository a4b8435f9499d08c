"""Notices a machine that is not quiet: times measured on it are no verdict."""

import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_from_scratch.bench.samples import Samples

MOST_WALL = 1.3  # wall time of a step as a multiple of its CPU time
MOST_OTHERS = 0.1  # part of the processors' time that others take

_TICKS = os.sysconf("SC_CLK_TCK")


class CpuUse:
    """CPU time that others take on the ranks' processors, from when this is made. Collective.

    Attributes:
        processors: that any rank may use. A launcher may have bound each rank to its own.
    """

    def __init__(self) -> None:
        everyone: list[set[int]] = [set() for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, os.sched_getaffinity(0))
        self.processors = set().union(*everyone)
        self._began = time.perf_counter()
        self._busy, self._own = busy_seconds(self.processors), time.process_time()

    def others(self) -> float | None:
        """The part of the processors' time that went to other processes. Collective.

        None where the system does not say. The ranks must be on one machine.
        """
        own = torch.tensor([time.process_time() - self._own], dtype=torch.float64)
        dist.all_reduce(own)
        busy = busy_seconds(self.processors)
        if busy is None or self._busy is None:
            return None
        took = (time.perf_counter() - self._began) * len(self.processors)
        return max(0.0, busy - self._busy - own.item()) / took


def busy_seconds(processors: set[int]) -> float | None:
    """Seconds in which these processors have computed; None: unknown."""
    try:
        return parse_busy(Path("/proc/stat").read_text(), processors) / _TICKS
    except (OSError, ValueError):
        return None


def parse_busy(text: str, processors: set[int]) -> int:
    """Ticks of these processors in user, nice, system and stolen time, from /proc/stat.

    Raises:
        ValueError: it is not the kernel's.
    """
    ticks = 0
    for line in text.splitlines():
        name, *columns = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in processors:
            # Not interrupts: those of gloo's sockets belong to no process.
            user, nice, system, *_ = map(int, columns)
            ticks += user + nice + system + int(columns[7])
    return ticks


def disturbance(alone: Samples | None, others: float | None, ranks: int, cores: int) -> str | None:
    """The sign that something else ran meanwhile, for people; None: the machine was quiet.

    Args:
        alone: the steps without communication, if there were any.
        others: see `CpuUse.others`.
        ranks: on this machine.
        cores: that they may use.
    """
    if alone is not None and alone.cpu_milliseconds and ranks <= cores:
        # Without communication a step computes all the time. Others may use cores that no rank
        # needs.
        pairs = zip(alone.milliseconds, alone.cpu_milliseconds, strict=True)
        ratio = statistics.median(wall / cpu for wall, cpu in pairs)
        if ratio > MOST_WALL:
            return f"a step without communication takes {ratio:.2f} x its CPU time"
    elif others is not None and others > MOST_OTHERS:
        # Ranks that share cores wait for their turns in any case, so their times do not show it.
        return f"other processes took {100 * others:.0f} % of the processors' time"
    return None
