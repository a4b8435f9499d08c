"""Backend: stands behind a process group of torch's own, and hands its calls on."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ddp_from_scratch.mpi.process_group import ProcessGroupMPI

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
