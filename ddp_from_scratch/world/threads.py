"""Sets how many threads a rank computes with, as it joins its group."""

import os
from contextlib import suppress
from typing import Literal

import torch

from ddp_from_scratch.common.errors import UsageError
from ddp_from_scratch.common.log import logger
from ddp_from_scratch.launch import ancestors, cores, environment
from ddp_from_scratch.launch.environment import Placement

Threads = int | Literal["auto"] | None


def check_threads(threads: Threads) -> None:
    """Raises a UsageError for what `set_threads` cannot take."""
    if threads not in ("auto", None) and not (isinstance(threads, int) and threads > 0):
        raise UsageError(f'threads must be 1 or more, "auto" or None, got {threads!r}')


def set_threads(place: Placement, threads: Threads) -> None:
    """Sets this process's threads, "auto" to its share of the machine's cores."""
    if threads == "auto":
        # Ranks of an elastic job have not met, and must keep their number when some are lost.
        told = os.environ.get(environment.THREADS)
        masks = _masks(place)
        threads = int(told) if told else cores.share(masks, _cores_of(masks))
    if threads is not None:
        torch.set_num_threads(threads)


def note_lost_cores(place: Placement, threads: Threads) -> None:
    """Logs a line on the first rank of a machine if its launcher leaves cores idle or crowded.

    With a number of threads that the program has chosen, only if they are crowded.
    """
    # This library's own launchers give what `bind` says.
    if place.local_rank or place.launcher == "none" or environment.STARTED_HERE in os.environ:
        return
    masks = _masks(place)
    found = _cores_of(masks)
    if isinstance(threads, int) and threads <= cores.share(masks, found):
        return
    now, (all_cores, sockets) = torch.get_num_threads(), _cores_of_job(place.launcher, found)
    if text := cores.advice(place.launcher, masks, now, found, all_cores, sockets):
        logger.warning(text)


def _masks(place: Placement) -> tuple[str, ...]:
    """Returns the CPUs of each rank on this machine; this rank's for all where they are unknown."""
    if len(place.cpus) == place.local_world_size:
        return place.cpus
    return (cores.as_text(cores.own_cpus()),) * place.local_world_size


def _cores_of(masks: tuple[str, ...]) -> cores.Cores:
    return cores.read({cpu for mask in masks for cpu in cores.numbers(mask)})


def _cores_of_job(launcher: str, found: cores.Cores) -> tuple[int, int]:
    """Returns how many cores the launcher had to give, and in how many sockets.

    Those that it gave if that is unknown.
    """
    job = found
    if launcher == "mpirun" and (pid := ancestors.launcher()):
        with suppress(OSError, AttributeError):
            job = cores.read(os.sched_getaffinity(pid))
    count, sockets = len(job.cores), len({core.socket for core in job.cores})
    if launcher == "srun":
        given = os.environ.get("SLURM_CPUS_ON_NODE", "")
        count = int(given) // found.cpus_of_core if given.isdecimal() else count
    return (count if found.quota >= count else max(1, int(found.quota))), sockets
