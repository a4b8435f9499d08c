"""Connects mpi groups to torch's C++: as a backend of its process groups, and its flight recorder.

The flight recorder records only calls of C++ process groups. So each call to an mpi group goes
through a C++ group, which records it and calls back to Python to run it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial, partialmethod
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ddp_from_scratch.backend.mpi_group import ProcessGroupMPI
from ddp_from_scratch.errors import UsageError

# torch supports backends written in Python from 2.14 on.
IS_OFFERED = getattr(c10d, "FlightRecorderHook", None) is not None

Run = Callable[[str, tuple[Any, ...]], dist.Work]

# The calls that torch's group passes to a Python backend. It does not pass `gather_single`.
CALLS = (
    *("allgather", "allgather_coalesced", "all_gather_single", "all_gather_single_coalesced"),
    *("allreduce", "allreduce_coalesced", "alltoall", "all_to_all_single"),
    *("barrier", "broadcast", "gather", "scatter", "send", "recv", "recv_anysource"),
    *("reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
)


class TorchBackend(c10d.Backend):
    """A backend that passes the name and the arguments of each call to `run`."""

    # Without these attributes, torch recurses endlessly when it asks a Python backend for them.
    supports_coalescing = supports_splitting = supports_shrinking = False
    supports_reconfigure = supports_window = False
    options: Any = None

    def __init__(self, name: str, rank: int, size: int, run: Run) -> None:
        super().__init__(rank, size)
        self._name, self._run = name, run
        self.options = c10d.Backend.Options(name)

    def getBackendName(self) -> str:
        return self._name


class CPUBackend(TorchBackend):
    """Serves the CPU tensors of a torch group that has another backend for GPUs; closed with it.

    torch wraps the work handles of a Python backend: `is_completed()` of a wrapper stays False, and
    the wrapper of a receive from any source does not know the source.
    """

    def __init__(self, group: ProcessGroupMPI, timeout: timedelta) -> None:
        super().__init__(group.backend, group.rank(), group.size(), self._call)
        self._group = group
        self.options._timeout = timeout
        self._sequence = 0  # TORCH_DISTRIBUTED_DEBUG=DETAIL compares the ranks' numbers of calls

    def _call(self, name: str, arguments: tuple[Any, ...]) -> dist.Work:
        self._sequence += 1
        work: dist.Work = getattr(self._group, name)(*arguments)
        return work

    def _set_sequence_number_for_group(self) -> None:
        pass  # it starts at 0 on all ranks

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def set_timeout(self, timeout: timedelta) -> None:
        self._group.set_timeout(timeout)

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        self._group.monitored_barrier(opts.timeout, wait_all_ranks)

    def shutdown(self) -> None:
        self._group.shutdown()


for _name in CALLS:  # torch finds a method by its name in the class
    setattr(TorchBackend, _name, lambda self, *given, name=_name: self._run(name, given))
_Call = Callable[[], dist.Work]


def recorder_is_on() -> bool:
    """True if torch records this backend (from 2.15 on) and a variable sets the buffer's size."""
    # torch reads the first that is set. Its default is 2000; ours is off, which is faster.
    names = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
    name, size = next(((name, os.environ[name]) for name in names if os.environ.get(name)), ("", 0))
    try:
        # torch 2.14 records other backends, but under names that its own analyser cannot read.
        return torch.__version__ >= "2.15" and int(size) > 0
    except ValueError:
        raise UsageError(f"{name} must be a number of entries, got {size!r}") from None


class _OnItsWay(threading.local):
    call: _Call | None = None
    came_back = False
    work: dist.Work | None = None


class RecordedGroup(ProcessGroupMPI):
    """An mpi group that makes an entry in torch's flight recorder for each call."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._on_its_way = _OnItsWay()
        self._recorder: dist.ProcessGroup | None = None

    def _open_recorder(self) -> dist.ProcessGroup:
        """Makes a torch group of the same name, which owns the entries."""
        rank, size, kind = self.rank(), self.size(), dist.ProcessGroup.BackendType.MPI
        name: Any = self.getGroupName()  # torch's stubs declare a separate type
        group = dist.ProcessGroup(rank, size)  # type: ignore[call-arg, unused-ignore]
        group._set_default_backend(kind)
        # Weak, since torch's group holds the backend in C++, where the garbage collector finds no
        # cycle. The attribute keeps the Python part of the backend, which torch does not.
        come_back = weakref.WeakMethod(self._come_back)
        self._returns = TorchBackend(self.backend, rank, size, lambda *_: come_back()())  # type: ignore[misc]
        group._register_backend(torch.device("cpu"), kind, self._returns)
        group._set_group_name(name)
        group._set_group_desc(self.getGroupDesc())
        ranks: Any = self._nodes.everyone.world_ranks
        self._hook = c10d.FlightRecorderHook.attach(group, ranks)
        return group

    def note(self, name: str, *arguments: Any, **options: Any) -> dist.Work:
        call: _Call = partial(getattr(super(), name), *arguments, **options)
        mine = self._on_its_way
        if mine.call is not None:
            return call()  # part of a call that is already recorded
        if self._recorder is None:  # not in __init__: torch names a group after it is made
            self._recorder = self._open_recorder()
        mine.call, mine.came_back, mine.work = call, False, None
        try:
            try:
                getattr(self._recorder, name)(*arguments, **options)
            except Exception:
                if mine.came_back:
                    raise
            # Not torch's handle, which knows neither the end of the call nor a message's source. If
            # torch rejects the tensors there is no handle, and this group's own call raises.
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
        self._recorder = None  # breaks a cycle through C++, which the collector cannot find


for _name in CALLS:
    setattr(RecordedGroup, _name, partialmethod(RecordedGroup.note, _name))
