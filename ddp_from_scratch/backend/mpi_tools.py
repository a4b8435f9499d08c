"""torch's tools for mpi groups: a backend behind a group of torch's own, and the flight recorder.

The recorder listens to process groups of torch's own, and a group written in Python is none. So
each call goes into one of torch's, which notes it, and comes back from there to be run.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ddp_from_scratch.backend.mpi_group import ProcessGroupMPI
from ddp_from_scratch.errors import UsageError

# From 2.14 on torch takes backends that are written in Python.
IS_OFFERED = getattr(c10d, "FlightRecorderHook", None) is not None

Run = Callable[[str, tuple[Any, ...]], dist.Work]

# The calls that torch's group hands to a Python backend. Others (`gather_single`) it does not.
CALLS = (
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "scatter",
    "send",
)


class TorchBackend(c10d.Backend):
    """A backend of which `run` runs each call, given its name and its arguments."""

    # torch asks for these without end where a backend in Python does not answer itself.
    supports_coalescing = False
    supports_splitting = False
    supports_shrinking = False
    supports_reconfigure = False
    supports_window = False

    def __init__(self, name: str, rank: int, size: int, run: Run) -> None:
        super().__init__(rank, size)
        self._name, self._run = name, run
        self._options = c10d.Backend.Options(name)

    @property
    def options(self) -> c10d.Backend.Options:
        return self._options

    def getBackendName(self) -> str:
        return self._name


class CPUBackend(TorchBackend):
    """Serves CPU tensors in a group of torch's own, which has another backend for GPUs.

    torch puts handles of its own before those of a backend in Python: their `is_completed()` stays
    False, and a message from any source cannot say which it came from.

    Args:
        group: runs the calls; closed with the whole.
        timeout: of the whole.
    """

    def __init__(self, group: ProcessGroupMPI, timeout: timedelta) -> None:
        super().__init__(group.backend, group.rank(), group.size(), self._call)
        self._group = group
        self._options._timeout = timeout
        self._sequence = 0  # of calls: TORCH_DISTRIBUTED_DEBUG=DETAIL compares them over ranks

    def _call(self, name: str, arguments: tuple[Any, ...]) -> dist.Work:
        self._sequence += 1
        work: dist.Work = getattr(self._group, name)(*arguments)
        return work

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: it is 0 on all ranks."""

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def set_timeout(self, timeout: timedelta) -> None:
        self._group.set_timeout(timeout)

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        self._group.monitored_barrier(opts.timeout, wait_all_ranks)

    def shutdown(self) -> None:
        self._group.shutdown()


def _method(name: str) -> Callable[..., dist.Work]:
    def call(self: TorchBackend, *arguments: Any) -> dist.Work:
        return self._run(name, arguments)

    return call


for _name in CALLS:  # torch finds a method by its name in the class
    setattr(TorchBackend, _name, _method(_name))


_Call = Callable[[], dist.Work]


def recorder_is_on() -> bool:
    """True if torch has a recorder for this backend (from 2.15 on) with a buffer of a given size.

    Raises:
        UsageError: the size is no number.
    """
    # torch takes the first of these that is set, and 2000 where none is. Not here: to note a small
    # all_reduce takes a third of its time.
    names = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
    name, size = next(((name, os.environ[name]) for name in names if os.environ.get(name)), ("", 0))
    try:
        # 2.14 records other backends, but names the calls as its own analyser does not read them.
        return torch.__version__ >= "2.15" and int(size) > 0
    except ValueError:
        raise UsageError(f"{name} must be a number of entries, got {size!r}") from None


class _OnItsWay(threading.local):
    """The call that this thread has on its way through torch's group."""

    call: _Call | None = None
    came_back = False
    work: dist.Work | None = None


class RecordedGroup(ProcessGroupMPI):
    """The same group, with an entry in torch's flight recorder for each call."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._on_its_way = _OnItsWay()
        self._recorder: dist.ProcessGroup | None = None

    def _open_recorder(self) -> dist.ProcessGroup:
        """A group of torch's own with the name of this one, under which entries are kept."""
        rank, size, kind = self.rank(), self.size(), dist.ProcessGroup.BackendType.MPI
        name: Any = self.getGroupName()  # torch's stubs have a type of their own
        group = dist.ProcessGroup(rank, size)  # type: ignore[call-arg, unused-ignore]
        group._set_default_backend(kind)
        # Weakly: torch's group keeps its backend in C++, where no garbage is looked for. Kept here,
        # too: of a backend in Python torch keeps no more than C++ sees.
        come_back = weakref.WeakMethod(self._come_back)
        self._returns = TorchBackend(self.backend, rank, size, lambda *_: come_back()())  # type: ignore[misc]
        group._register_backend(torch.device("cpu"), kind, self._returns)
        group._set_group_name(name)
        group._set_group_desc(self.getGroupDesc())
        ranks: Any = self._nodes.everyone.world_ranks
        self._hook = c10d.FlightRecorderHook.attach(group, ranks)
        return group

    def note(self, name: str, call: _Call, *arguments: Any, **options: Any) -> dist.Work:
        """Makes an entry of the call `name` with these arguments, runs it, returns its handle."""
        mine = self._on_its_way
        if mine.call is not None:
            return call()  # a part of the call that has an entry
        if self._recorder is None:  # at the first call: torch names a group when it is made
            self._recorder = self._open_recorder()
        mine.call, mine.came_back, mine.work = call, False, None
        try:
            try:
                getattr(self._recorder, name)(*arguments, **options)
            except Exception:
                if mine.came_back:
                    raise
            # Not torch's handle, which knows neither whether the call has ended nor where a message
            # is from. There is none where torch refuses the tensors: then this group says why.
            return mine.work or call()
        finally:
            mine.call = mine.work = None

    def _come_back(self) -> dist.Work:
        mine = self._on_its_way
        assert mine.call is not None, "calls come through `note` alone"
        mine.came_back = True
        mine.work = mine.call()
        return mine.work

    def shutdown(self) -> None:
        super().shutdown()
        self._recorder = None  # refers to the group, through C++, where no garbage is looked for


def _noted(name: str) -> Callable[..., dist.Work]:
    unnoted = getattr(ProcessGroupMPI, name)

    def call(self: RecordedGroup, *arguments: Any, **options: Any) -> dist.Work:
        return self.note(name, partial(unnoted, self, *arguments, **options), *arguments, **options)

    return call


for _name in CALLS:
    setattr(RecordedGroup, _name, _noted(_name))
