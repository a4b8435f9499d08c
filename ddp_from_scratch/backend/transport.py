"""Transports send the messages that set up shared memory, and those between machines.

This module sends them over gloo, `mpi_group.py` over MPI.
"""

import os
import pickle
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist

from ddp_from_scratch.backend.operations import name_ranks
from ddp_from_scratch.common.errors import CommunicationError
from ddp_from_scratch.common.group import failure_detector, open_gloo
from ddp_from_scratch.common.whereabouts import whereabouts


class Transport(Protocol):
    """Ranks that exchange messages. Each method is collective; one thread at a time may call it."""

    rank: int
    world_ranks: list[int]  # by rank, the rank in the whole job, which errors name

    @property
    def size(self) -> int: ...

    def allgather(self, value: Any) -> list[Any]:
        """Returns every rank's value, in rank order. Only setup calls it, also as a barrier."""

    def split(self, color: int) -> Self:
        """Returns a transport of the ranks that pass the same color, in the same order."""

    def split_by_machine(self) -> Self:
        """Returns a transport of the ranks that run on this rank's machine."""

    def free(self) -> None: ...

    def begin_allgather(self, own: memoryview, gathered: memoryview) -> Callable[[], bool]:
        """Starts to gather equal numbers of bytes; the result returns True once all have arrived.

        A caller that stops calling the result before that must not use the transport again.
        """

    def exchange(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        """Sends a tensor to each rank and receives one from each; dense, flat, of equal sizes."""


def flat_bytes(dense: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a dense tensor as bytes."""
    # `view` alone would keep the stride of a single element, which may be any number.
    return dense.detach().as_strided((dense.numel(),), (1,)).view(torch.uint8)


def write_back(dense: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Copies to a tensor what was computed in `tensor.contiguous()`; returns the tensor."""
    return tensor if dense is tensor else tensor.copy_(dense)


class ProcessWatch:
    """Notices when processes end, by descriptors that no later process can take over."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._index_of: dict[int, int] = {}
        for index, pid in enumerate(pids):  # 0 stands for none
            # Without a descriptor (an old kernel), the rank is missed only at the timeout.
            if pid not in (0, os.getpid()) and hasattr(os, "pidfd_open"):
                with suppress(OSError):
                    self._index_of[os.pidfd_open(pid)] = index

    def ended(self) -> list[int]:
        ready = wait(self._index_of, 0)
        return [index for descriptor, index in self._index_of.items() if descriptor in ready]

    def close(self) -> None:
        while self._index_of:
            os.close(self._index_of.popitem()[0])

    __del__ = close


def this_machine() -> str:
    """Returns a name that no other machine has."""
    # Host names may coincide; a container with its own network counts as a machine.
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        return f"process {os.getpid()}"  # not Linux, where ranks share no memory
    return f"{boot.read_text().strip()} {os.stat('/proc/self/ns/net').st_ino}"


@dataclass
class GlooTransport:
    """A `Transport` that sends objects through torch's store and tensors through gloo."""

    store: dist.Store  # used by these ranks alone
    rank: int
    world_ranks: list[int]
    timeout: timedelta  # of each call
    # This machine's, by world rank, once `split_by_machine` was called.
    processes: ProcessWatch = field(default_factory=lambda: ProcessWatch([]))
    _calls: int = field(default=0, init=False)  # so far; equal on all ranks in one call
    _opened: dist.ProcessGroup | None = field(default=None, init=False)

    @property
    def size(self) -> int:
        return len(self.world_ranks)

    def allgather(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        self._calls += 1
        keys = [f"{self._calls}/{rank}" for rank in range(self.size)]
        try:
            self.store.set(keys[self.rank], pickle.dumps(value))  # type: ignore[arg-type]  # bytes
            self._await(keys)
            return [pickle.loads(self.store.get(key)) for key in keys]
        except dist.DistError as error:
            # Usually rank 0 ended, which hosts the store: its connections close just before that.
            time.sleep(0.1)
            ended = name_ranks(self.processes.ended()) or "the process that keeps the store"
            raise CommunicationError(f"{ended} ended without reaching it") from error

    def _await(self, keys: list[str]) -> None:
        deadline, is_broken = time.monotonic() + self.timeout.total_seconds(), failure_detector()
        # Polled with growing pauses, since the store's own wait does not notice a lost process.
        pause = 1e-4
        while not self.store.check(keys):
            if is_broken():
                raise CommunicationError("a rank of the group was lost")
            expired, ended = time.monotonic() > deadline, self.processes.ended()
            if expired or ended:
                missing = [
                    world_rank
                    for world_rank, key in zip(self.world_ranks, keys, strict=True)
                    if not self.store.check([key])
                ]
                if gone := [rank for rank in missing if rank in ended]:
                    raise CommunicationError(f"{name_ranks(gone)} ended without reaching it")
                if missing and expired:
                    seconds = self.timeout.total_seconds()
                    raise CommunicationError(
                        f"the timeout of {seconds:g} s passed without {name_ranks(missing)}"
                        f"{whereabouts(missing, seconds)}"
                    )
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def split(self, color: int) -> "GlooTransport":
        return self._part(color, self.allgather(color))

    def split_by_machine(self) -> "GlooTransport":
        here = this_machine()
        found = self.allgather((here, os.getpid()))
        pids = [0] * (max(self.world_ranks) + 1)
        for world_rank, (machine, pid) in zip(self.world_ranks, found, strict=True):
            pids[world_rank] = pid if machine == here else 0
        self.processes = ProcessWatch(pids)
        return self._part(here, [machine for machine, _ in found])

    def _part(self, color: object, colors: list[Any]) -> "GlooTransport":
        members = [rank for rank, other in enumerate(colors) if other == color]
        return replace(
            self,
            # No other part has this first member.
            store=dist.PrefixStore(f"{self._calls}/part {members[0]}", self.store),
            rank=members.index(self.rank),
            world_ranks=[self.world_ranks[rank] for rank in members],
        )

    def free(self) -> None:
        # A Reducer may keep a closed group alive. The next group may need the store's port.
        self._opened = None
        self.__dict__.pop("store", None)
        self.processes = ProcessWatch([])  # closed with the last transport that has it

    @property
    def _gloo(self) -> dist.ProcessGroup:
        # Not a cached_property: with its one lock (Python 3.11) two groups could deadlock.
        if self._opened is None:
            try:
                self._opened = open_gloo(self.store, self.rank, self.size, self.timeout)
            except RuntimeError as error:  # gloo raises no more specific type
                raise CommunicationError(
                    f"no connection to ranks on other machines: {str(error).splitlines()[0]}"
                ) from error
        return self._opened

    def begin_allgather(self, own: memoryview, gathered: memoryview) -> Callable[[], bool]:
        into, mine = (torch.frombuffer(part, dtype=torch.uint8) for part in (gathered, own))
        work = self._gloo._allgather_base(into, mine)

        def arrived() -> bool:
            # A work that failed is completed, too, and `wait` raises its error.
            return work.is_completed() and bool(work.wait())

        return arrived

    def exchange(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        gloo = self._gloo  # collective, so a rank that sends nothing opens it, too
        if received[self.rank].numel():
            received[self.rank].copy_(sent[self.rank])
        works = []
        for call, tensors in (gloo.recv, received), (gloo.send, sent):
            for rank, tensor in enumerate(tensors):
                if rank != self.rank and tensor.numel():
                    works.append(call([flat_bytes(tensor)], rank, 0))
        for work in works:
            work.wait()
