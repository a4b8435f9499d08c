"""The mpi backend's process group, with messages between two ranks, and its end of MPI.

Importing this module starts MPI.

MPI moves a large message only while both ranks are inside MPI. So while messages are in flight, a
rank that sleeps in a barrier or in a handle's `wait` calls `progress` now and then.
"""

# torch.distributed calls only one overload of each C++ method.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist

from ddp_from_scratch.backend.mpi_start import ending, start
from ddp_from_scratch.backend.operations import check_memory
from ddp_from_scratch.backend.process_group import SharedMemoryGroup, Tensors
from ddp_from_scratch.backend.transport import flat_bytes, write_back
from ddp_from_scratch.backend.work import FORKED
from ddp_from_scratch.common.errors import CommunicationError, UsageError

start()
from mpi4py import MPI as MPI  # noqa: E402

if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
    raise UsageError(
        f"the mpi backend calls MPI from several threads, which needs MPI_THREAD_MULTIPLE; this "
        f"MPI gave level {MPI.Query_thread()}: import ddp_from_scratch.mpi before anything else "
        f"starts MPI, or use an MPI library built with threads"
    )

_process = os.getpid()  # which alone may call MPI; a fork of it may not
_failed = False


def _note_failure(*failure: Any) -> None:
    global _failed
    _failed = True
    _previous_hook(*failure)


def _end_at_once_after_failure() -> None:
    """Exits after an uncaught exception before mpi4py finalizes MPI, which would hang."""
    if _failed:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


_previous_hook, sys.excepthook = sys.excepthook, _note_failure
atexit.register(_end_at_once_after_failure)


COUNTABLE = 2**31 - 2**20  # bytes; most MPIs count in 32 bits
BLOCK = 2**30

_EXCHANGE_TAG = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 0)  # programs use lower ones


def message(tensor: torch.Tensor) -> Any:
    """Describes a dense tensor of any size to MPI as one message of bytes."""
    # An array, since unlike an address it keeps the tensor's memory alive.
    memory = flat_bytes(tensor).numpy()
    if tensor.nbytes <= COUNTABLE:
        return memory, MPI.BYTE
    return memory, 1, _many_bytes(tensor.nbytes)


@cache
def _many_bytes(count: int) -> MPI.Datatype:
    # Never freed, since a committed type takes only a few words for each large size sent.
    blocks, rest = divmod(count, BLOCK)
    block = MPI.BYTE.Create_contiguous(BLOCK)
    places = [0, blocks * BLOCK]
    return MPI.Datatype.Create_struct([blocks, rest], places, [block, MPI.BYTE]).Commit()


class MPITransport:
    """A `Transport` over the MPI communicator `handle`, which `free` releases."""

    def __init__(self, handle: MPI.Intracomm) -> None:
        self.handle = handle
        self.rank: int = handle.rank
        self.size: int = handle.size
        group, world = handle.Get_group(), MPI.COMM_WORLD.Get_group()
        self.world_ranks: list[int] = list(MPI.Group.Translate_ranks(group, None, world))

    def allgather(self, value: Any) -> list[Any]:
        return self.handle.allgather(value)

    def split(self, color: int) -> MPITransport:
        return MPITransport(cast(MPI.Intracomm, self.handle.Split(color)))

    def split_by_machine(self) -> MPITransport:
        return MPITransport(cast(MPI.Intracomm, self.handle.Split_type(MPI.COMM_TYPE_SHARED)))

    def free(self) -> None:
        self.handle.Free()

    def begin_allgather(self, own: memoryview, gathered: memoryview) -> Callable[[], bool]:
        # The bound method keeps the request, and with it both buffers, alive.
        return self.handle.Iallgather(own, gathered).Test

    def exchange(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        if received[self.rank].numel():
            received[self.rank].copy_(sent[self.rank])
        requests = []
        # Receives first: MPI need not buffer a message whose receive is already posted.
        for begin, tensors in (self.handle.Irecv, received), (self.handle.Isend, sent):
            for rank, tensor in enumerate(tensors):
                if rank != self.rank and tensor.numel():
                    requests.append(begin(message(tensor), rank, _EXCHANGE_TAG))
        MPI.Request.Waitall(requests)


PAUSE = 1e-3  # seconds between two tests of the messages in flight


class P2PWork(dist.Work):
    """The work handle of a message. It keeps the tensor alive until MPI is done with it."""

    def __init__(
        self,
        name: str,
        timeout: timedelta,
        request: MPI.Request,
        dense: torch.Tensor,
        into: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self._name, self._timeout, self._request = name, timeout, request
        self._tensors = dense, into
        self._status = MPI.Status()
        self._error: CommunicationError | None = None
        self._done = False  # set last, after everything that a caller may then read
        self._testing = threading.Lock()  # any thread may call `progress`
        _under_way.add(self)

    def is_completed(self) -> bool:
        # Non-blocking: in a signal handler, the interrupted thread itself may hold the lock.
        if self._testing.acquire(blocking=False):
            try:
                if not self._done:
                    self._test()
            finally:
                self._testing.release()
        return self._done

    def _test(self) -> None:
        problem: object = None
        dense, into = self._tensors
        try:
            if not self._request.Test(self._status):
                return
            came = self._status.Get_elements(MPI.BYTE)
            if into is not None and came != into.nbytes:  # fewer, since MPI itself refuses more
                problem = f"{came} bytes came, expected {into.nbytes}"
            elif into is not None:
                with torch.no_grad():
                    write_back(dense, into)
        except MPI.Exception as error:
            problem = error
        if problem is not None:
            self._error = CommunicationError(f"{self._name} failed: {problem}")
        self._done = True
        del self._tensors  # a handle that is kept for long must not keep them alive
        _under_way.discard(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        # torch passes zero for "no timeout given".
        limit = (timeout if timeout and timeout > timedelta(0) else self._timeout).total_seconds()
        began = time.monotonic()
        while not self.is_completed():
            waited = time.monotonic() - began
            if waited > limit:
                raise CommunicationError(
                    f"{self._name} did not end within {limit:g} s: "
                    f"the other rank has not called its part, or has stopped"
                )
            if waited > PAUSE:  # no pause at first, since most messages arrive at once
                progress()
                time.sleep(1e-4)
        if self._error is not None:
            raise self._error
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def _source_rank(self) -> int:
        return self._status.Get_source()

    source_rank = _source_rank


# Keeps each handle, and so its tensor, until MPI is done: the caller may drop both.
_under_way: set[P2PWork] = set()


def progress() -> float:
    """Advances messages in flight; returns the seconds until it must be called again."""
    for work in list(_under_way):  # a copy, since completed messages leave the set
        work.is_completed()
    return PAUSE if _under_way else math.inf


def _require_rank() -> None:
    if os.getpid() != _process:
        raise RuntimeError(FORKED)


class ProcessGroupMPI(SharedMemoryGroup):
    """A process group with its own MPI communicator, a duplicate of the given one.

    Messages (`send`, `recv`) do not queue behind collectives, so two ranks may each post a receive
    before their send. `store` replaces torch's placeholder, where groups of other backends meet.
    """

    backend: ClassVar[str] = "mpi"

    def __init__(
        self, communicator: MPI.Intracomm, timeout: timedelta, store: dist.Store | None = None
    ) -> None:
        # A duplicate keeps other libraries apart. Messages and collectives differ in tags.
        self._communicator = communicator.Dup()
        super().__init__(MPITransport(self._communicator), timeout, progress)
        self._store = store  # None once it is installed

    @property
    def bound_device_id(self) -> None:
        # torch reads only this between recording the default store and passing it to a new group.
        self.install_store()

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        """Ignored. torch copies the parent group's value, which is None, to a split group."""

    def install_store(self) -> None:
        store = self._store  # read once, since the stall watch calls this from its own thread
        noted = dist.distributed_c10d._world.pg_map
        if store is not None and self in noted:
            noted[self] = (noted[self][0], store)
            self._store = None

    def get_group_store(self) -> dist.Store | None:
        return self._store

    def _part(self, ranks: Sequence[int], timeout: timedelta, name: str) -> ProcessGroupMPI:
        return create_subgroup(self._communicator, ranks, timeout)

    # Messages ------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> P2PWork:
        _require_rank()
        (tensor,) = tensors
        check_memory("mpi", "send", tensor)
        dense = tensor.contiguous()  # may be a copy, which the handle keeps
        name = f"send to rank {dst} from rank {self.rank()} ({tensor.nbytes} bytes)"
        progress()  # frees the tensors of completed messages
        request = self._communicator.Isend(message(dense), dst, tag)
        return P2PWork(name, self._timeout, request, dense)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> P2PWork:
        _require_rank()
        (tensor,) = tensors
        check_memory("mpi", "recv", written=[tensor])
        dense = tensor.contiguous()
        named = "any rank" if src == MPI.ANY_SOURCE else f"rank {src}"
        name = f"recv from {named} on rank {self.rank()} ({tensor.nbytes} bytes)"
        request = self._communicator.Irecv(message(dense), src, tag)
        return P2PWork(name, self._timeout, request, dense, into=tensor)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> P2PWork:
        return self.recv(tensors, MPI.ANY_SOURCE, tag)

    # Lifetime ------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Ends the worker thread and frees the communicator. Idempotent; a no-op in a fork."""
        if self._communicator == MPI.COMM_NULL or os.getpid() != _process:
            return
        # First, so a second call has nothing to do even if this one fails.
        communicator, self._communicator = self._communicator, MPI.COMM_NULL
        seconds = self._timeout.total_seconds()
        if not self._worker.close(seconds):
            return  # the worker still runs an operation in this memory
        # Freeing is collective. Skip it if a rank has failed, or ends without coming here.
        with suppress(CommunicationError):
            self.checked_barrier.meet("destroy_process_group", "", seconds)
            self._free_memory()
            self._topology.free()
            communicator.Free()


def create_subgroup(
    whole: MPI.Intracomm, ranks: Sequence[int], timeout: timedelta
) -> ProcessGroupMPI:
    """Makes a group of some ranks of `whole`. Only these ranks call it."""
    _require_rank()
    members = whole.Get_group().Incl(list(ranks))
    named = list(MPI.Group.Translate_ranks(members, None, MPI.COMM_WORLD.Get_group()))
    late = f"ranks {named} to make a group: not all have called new_group or split_group"
    with ending(f"rank {MPI.COMM_WORLD.rank}", timeout, lambda: late):
        communicator = whole.Create_group(members)
        try:
            return ProcessGroupMPI(communicator, timeout)
        finally:
            communicator.Free()  # the group has a duplicate
