"""NCCL's stream, simulated; gloo carries the numbers from rank to rank."""

import os
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tests.support.simgpu import device
from tests.support.simgpu.device import GUARD, SimTensor


class SimWork(dist._Work):
    """A collective in flight, which waits as torch's classes do.

    legacy: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, `WorkNCCL::getFuture` returns a future
    that was completed at the launch, under NCCL's stream: only its `wait` blocks a stream.
    nccl2: torch/csrc/distributed/c10d/nccl2/WorkNCCL.cpp, `getFuture` first orders the current
    stream after the collective.
    """

    def __init__(self, group: "SimNCCL", reads: list[Any], writes: list[Any]) -> None:
        super().__init__()
        self._group, self._reads, self._writes = group, reads, writes
        self._end = GUARD.record(group.stream)
        self._future: torch.futures.Future[Any] | None = None
        if group.kind == "legacy":
            with device.on(group.stream, group.index):
                self._complete()

    def _complete(self) -> None:
        self._future = torch.futures.Future(devices=[torch.device("cuda", self._group.index)])
        self._future.set_result(list(self._writes))

    def wait(self, timeout: timedelta | None = None) -> bool:
        GUARD.wait(self._end, GUARD.current(self._group.index))
        self._group.in_flight.discard(self)
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        if self._future is None:
            self.wait()
            self._complete()
        assert self._future is not None
        return self._future


def _hosts(tensors: list[Any]) -> list[torch.Tensor]:
    return [tensor.on_host for tensor in tensors]


class SimNCCL(dist.ProcessGroup):
    """A group of `kind` "legacy" or "nccl2", whose collectives run on one stream of their own."""

    opened = 0
    supports_splitting = False

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, kind: str
    ) -> None:
        super().__init__(rank, size)
        self.kind = kind
        self.index = torch.accelerator.current_device_index()
        self.stream = self.index * 1000000 + device.COMMUNICATORS + SimNCCL.opened
        SimNCCL.opened += 1
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("sim", store), rank, size, timeout)
        # A collective keeps its tensors until it is waited for, and NCCL's thread those of others.
        self.in_flight: set[SimWork] = set()
        self.options = self._gloo.options
        self._name = ""

    # torch's own asks the backends that this one does not have.
    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _run(self, name: str, call: Any, reads: list[Any], writes: list[Any]) -> SimWork:
        for tensor in [*reads, *writes]:
            if not isinstance(tensor, SimTensor):
                raise RuntimeError("No backend type associated with device type cpu")
        GUARD.wait(GUARD.record(GUARD.current(self.index)), self.stream)
        call().wait()
        read, written = (
            [span for tensor in tensors for span in device.spans(tensor.on_host)]
            for tensors in (reads, writes)
        )
        device.log(f"nccl::{name}", read, written, self.stream)
        work = SimWork(self, reads, writes)
        self.in_flight.add(work)
        return work

    def allreduce(self, tensors: list[Any], opts: Any = None) -> SimWork:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        run = partial(self._gloo.allreduce, _hosts(tensors), options)
        return self._run("all_reduce", run, tensors, tensors)

    def broadcast(self, tensors: list[Any], opts: Any) -> SimWork:
        reads = tensors if opts.rootRank == self.rank() else []
        run = partial(self._gloo.broadcast, _hosts(tensors), opts)
        return self._run("broadcast", run, reads, tensors)

    def allgather(self, outputs: list[list[Any]], inputs: list[Any], opts: Any = None) -> SimWork:
        run = partial(self._gloo.allgather, [_hosts(outputs[0])], _hosts(inputs[:1]))
        return self._run("all_gather", run, inputs, outputs[0])

    def _allgather_base(self, output: Any, input: Any, opts: Any = None) -> SimWork:
        parts = list(output.on_host.view(self.size(), -1).unbind())
        run = partial(self._gloo.allgather, [parts], [input.on_host.reshape(-1)])
        return self._run("all_gather", run, [input], [output])

    def reduce_scatter(self, outputs: list[Any], inputs: list[Any], opts: Any = None) -> SimWork:
        parts, options = _hosts(inputs[0]), dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if opts is None else opts.reduceOp

        def run() -> Any:
            work = self._gloo.allreduce([total := torch.cat(parts)], options)
            work.wait()
            own = total.split([part.numel() for part in parts])[self.rank()]
            outputs[0].on_host.copy_(own)
            return work

        return self._run("reduce_scatter", run, inputs[0], outputs)

    def alltoall_base(
        self, output: Any, input: Any, out_splits: list[int], in_splits: list[int], opts: Any = None
    ) -> SimWork:
        given = output.on_host, input.on_host, out_splits, in_splits
        return self._run("all_to_all", partial(self._gloo.alltoall_base, *given), [input], [output])

    # Their names from torch 2.14 on.
    all_gather_single, all_to_all_single = _allgather_base, alltoall_base

    def send(self, tensors: list[Any], to: int, tag: int = 0) -> SimWork:
        return self._run("send", partial(self._gloo.send, _hosts(tensors), to, tag), tensors, [])

    def recv(self, tensors: list[Any], source: int, tag: int = 0) -> SimWork:
        run = partial(self._gloo.recv, _hosts(tensors), source, tag)
        return self._run("recv", run, [], tensors)

    def barrier(self, opts: Any = None) -> SimWork:
        return self._run("barrier", self._gloo.barrier, [], [])


def install(kind: str) -> None:
    """Makes the backend "nccl" open such groups, which wait as those of torch's `kind` do."""

    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> SimNCCL:
        return SimNCCL(store, rank, size, timeout, kind)

    # Records nothing: torch 2.15 asks for a name that only groups made in C++ have.
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    dist.Backend.register_backend("nccl", create, devices=["cuda"])
