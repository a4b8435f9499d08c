"""Lets the ranks of a job compare their views of it in a store, before a group opens."""

import json
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache

import torch.distributed as dist

from ddp_from_scratch.backend.transport import this_machine
from ddp_from_scratch.common.errors import UsageError
from ddp_from_scratch.launch import environment
from ddp_from_scratch.launch.cores import as_text, own_cpus
from ddp_from_scratch.launch.environment import Placement

_LOOK_S = 0.5  # at most, between two looks at whether the others arrived or report an error
_GRACE_S = 3.0  # for the other ranks to read the error, since rank 0 may keep the store


@dataclass(frozen=True)
class Arrival:
    """One rank's view of the job."""

    backend: str
    world_size: int
    machine: str
    local: dict[str, int]  # those of LOCAL_RANK and LOCAL_WORLD_SIZE that are set
    process: str  # a name that no other process has
    cpus: str = ""  # that it may use, as in "0-7"


def this_arrival(backend: str, placement: Placement) -> Arrival:
    """Returns this process's view of the job."""
    local = environment.local_variables(placement)
    who, cpus = _this_process(), as_text(own_cpus())
    return Arrival(backend, placement.world_size, this_machine(), local, who, cpus)


class Meeting:
    """The ranks of one job around a store that only they use."""

    def __init__(self, store: dist.Store, placement: Placement, timeout: timedelta) -> None:
        self._store = store
        self._placement = placement
        self._timeout = timeout

    def attend(self, own: Arrival) -> Placement:
        """Waits for all ranks and compares their views; returns this rank's complete placement.

        Raises:
            UsageError: a rank is missing or reports an error of its own, two processes have the
                same rank, or the ranks differ in world size or backend.
        """
        rank = self._placement.rank
        self._claim(rank, own.process)
        came = [Arrival(**json.loads(text)) for text in self.gather("came", json.dumps(vars(own)))]
        for other, arrival in enumerate(came):
            _require_same_size(came[0].world_size, arrival.world_size, other)
        require_same_backend(own.backend, came[0].backend, rank)
        return _complete(self._placement, came)

    def gather(self, name: str, value: str) -> list[str]:
        """Returns every rank's value, in the order of ranks. Collective."""
        keys = [f"{name} {rank}" for rank in range(self._placement.world_size)]
        self._store.set(keys[self._placement.rank], value)
        end = time.monotonic() + self._timeout.total_seconds()
        nap = 0.01
        # Not `store.wait`: torch prints two warnings each time that it ends without the keys.
        while not self._store.check(keys):
            self._look_for_errors()
            if time.monotonic() > end:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                raise LateError(f"{waited(self._placement, self._timeout)}; missing: {missing}")
            time.sleep(nap)
            nap = min(2 * nap, _LOOK_S)  # seldom in the end, since each rank asks for all keys
        return [self._store.get(key).decode() for key in keys]

    @contextmanager
    def telling_all(self) -> Iterator[None]:
        """Passes an error of the block on to the other ranks, which raise it while they wait."""
        try:
            yield
        except LateError:
            raise  # the ranks that did come know it themselves
        except UsageError as error:
            with suppress(RuntimeError):  # the store is gone: so are the ranks that use it
                self._store.compare_set("error", "", str(error))
                told = self._store.add("told", 1)
                end = time.monotonic() + _GRACE_S
                # A rank that has not come by then finds no store, or the error in it.
                while self._placement.rank == 0 and told < self._present():
                    if time.monotonic() > end:
                        break
                    time.sleep(0.02)
                    told = self._store.add("told", 0)
            raise

    def _claim(self, rank: int, process: str) -> None:
        """Raises a UsageError if another process has this rank."""
        if self._store.compare_set(f"rank {rank}", "", process).decode() != process:
            raise UsageError(
                f"two processes have RANK={rank}, or two jobs have one MASTER_ADDR and "
                f"MASTER_PORT: give each process a RANK of its own and each job a MASTER_PORT of "
                f"its own"
            )

    def _look_for_errors(self) -> None:
        if self._store.check(["error"]):
            raise UsageError(self._store.get("error").decode())
        # A larger world waits for ranks that never come.
        if self._store.check(["came 0"]):
            of_rank_0 = json.loads(self._store.get("came 0"))["world_size"]
            _require_same_size(of_rank_0, self._placement.world_size, self._placement.rank)

    def _present(self) -> int:
        ranks = range(self._placement.world_size)
        return sum(self._store.check([f"came {rank}"]) for rank in ranks)


class LateError(UsageError):
    """Not all ranks have started in time."""


def waited(placement: Placement, timeout: timedelta) -> str:
    """Returns the beginning of an error about ranks that did not come in time."""
    who = f"rank {placement.rank} waited {timeout.total_seconds():g} s"
    return f"{who} for all {placement.world_size} ranks: not all have started"


def require_same_backend(backend: str, of_rank_0: str, rank: int) -> None:
    """Raises a UsageError unless both are equal: groups of two backends wait for each other."""
    if backend != of_rank_0:
        found = f"{of_rank_0} on rank 0 and {backend} on rank {rank}"
        raise UsageError(f"backend is {found}: it must be the same on all ranks")


def _require_same_size(of_rank_0: int, size: int, rank: int) -> None:
    if size != of_rank_0:
        raise UsageError(
            f"the world size is {of_rank_0} on rank 0 and {size} on rank {rank}: WORLD_SIZE must "
            f"be the same on all ranks, and MASTER_PORT different for each job"
        )


def _complete(placement: Placement, came: Sequence[Arrival]) -> Placement:
    """Fills in the place on the machine if the launcher has not told it."""
    of_rank_0 = sorted(came[0].local)
    for rank, arrival in enumerate(came):
        if sorted(arrival.local) != of_rank_0:
            raise UsageError(
                f"rank 0 has {_listed(of_rank_0)} and rank {rank} has "
                f"{_listed(sorted(arrival.local))}: set LOCAL_RANK and LOCAL_WORLD_SIZE on all "
                f"ranks, or on none"
            )
    rank, machines = placement.rank, [arrival.machine for arrival in came]
    mine = machines[rank]
    cpus = tuple(arrival.cpus for arrival in came if arrival.machine == mine)
    placement = replace(placement, cpus=cpus)
    if placement.is_complete:
        return placement
    placement = replace(
        placement,
        local_rank=machines[:rank].count(mine),
        local_world_size=machines.count(mine),
        # Machines count in the order of their lowest ranks.
        node_rank=list(dict.fromkeys(machines)).index(mine),
    )
    found = {"LOCAL_RANK": placement.local_rank, "LOCAL_WORLD_SIZE": placement.local_world_size}
    for name, told in came[rank].local.items():
        if told != found[name]:
            raise UsageError(
                f"rank {rank} has {name}={told}, but by the machines of all ranks it is "
                f"{found[name]}: set both LOCAL_RANK and LOCAL_WORLD_SIZE, or neither"
            )
    return placement


def _listed(names: Sequence[str]) -> str:
    return " and ".join(names) or "neither LOCAL_RANK nor LOCAL_WORLD_SIZE"


@cache
def _this_process() -> str:
    return f"{os.getpid()} {uuid.uuid4().hex}"  # process numbers repeat between containers
