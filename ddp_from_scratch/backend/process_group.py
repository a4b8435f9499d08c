"""The base class of process groups whose ranks share a machine's memory, with all collectives.

A collective returns a work handle at once and runs on the group's thread, in order (`work.py`).
A backend adds a `Transport` that sends messages.
"""

# torch.distributed calls only one overload of each C++ method.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import lru_cache, partial
from itertools import chain
from types import NoneType, SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ddp_from_scratch.backend.all_reduce import AllReduce, Crossing, Receive
from ddp_from_scratch.backend.barrier import CheckedBarrier, Progress
from ddp_from_scratch.backend.exchange import Exchange
from ddp_from_scratch.backend.operations import (
    PLAIN,
    caller,
    check_count,
    check_dtype,
    check_memory,
    check_same,
    size_of,
    split_rows,
)
from ddp_from_scratch.backend.reduction import REDUCED, ReduceOp, Reduction
from ddp_from_scratch.backend.shared_memory import Topology
from ddp_from_scratch.backend.stage import SharedTensors, Stage
from ddp_from_scratch.backend.transport import Transport, write_back
from ddp_from_scratch.backend.work import NodeWork, Operation, Outputs, Worker, run_in_turn
from ddp_from_scratch.common.errors import CommunicationError, NoSharedMemory
from ddp_from_scratch.common.numbers import is_power_of_two

Tensors = Sequence[torch.Tensor]

# torch's options for a call with `async_op=False`: the caller waits at once.
_AT_ONCE = SimpleNamespace(asyncOp=False)


class SharedMemoryGroup(dist.ProcessGroup):
    """A process group over shared memory; threads that wait call `progress`."""

    backend: ClassVar[str]
    # Each backend defines this: makes the group of `ranks`, which are ranks in this group.
    _part: Callable[[Sequence[int], timedelta, str], SharedMemoryGroup]

    def __init__(
        self, transport: Transport, timeout: timedelta, progress: Progress = lambda: math.inf
    ) -> None:
        super().__init__(transport.rank, transport.size)  # type: ignore[call-arg, unused-ignore]
        # These constructors are collective, so all ranks must call them in this order.
        self._topology = Topology.of(transport)
        self.machines: int = self._topology.count  # a rank that shares no memory counts as one
        self.checked_barrier: CheckedBarrier = CheckedBarrier(self._topology, progress)
        self._shared = SharedTensors(self._topology.intra_node)
        self._stage = Stage(self._topology, self.checked_barrier)
        self._reduce = AllReduce(self._topology, self.checked_barrier, self._shared, self._stage)
        self._reduce_here = self._reduce  # for `average_on_machine`
        if self.machines > 1:
            node = self._topology.intra_node
            here = Topology(world=node, intra_node=node, inter_node=node, count=1)
            stage = Stage(here, self.checked_barrier)
            self._reduce_here = AllReduce(here, self.checked_barrier, self._shared, stage)
        self._exchange = Exchange(self._topology, self.checked_barrier, self._shared, self._stage)
        # Cached, since making the text takes as long as summing a small tensor.
        self._named_reduction = lru_cache(maxsize=1024)(self._make_named_reduction)
        # True if 1/n is exact: AVG has the bits of torch's DDP, which divides before the sum.
        self.divides_first: bool = is_power_of_two(transport.size)
        self._timeout = timeout
        self.calls: int = 0  # so far; numbers them in error messages
        # Returns the gloo group beside this one, whose calls the ranks compare, too.
        self._beside: Callable[[], dist.ProcessGroup | None] = NoneType
        self._worker = Worker(f"{self.backend}-group-{transport.size}")

    @property
    def shares_memory(self) -> bool:
        return bool(self._stage.shares_memory)

    def getBackendName(self) -> str:
        return self.backend

    # torch keeps these names in a group's backends. This group is its own backend.

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    @property
    def group_name(self) -> str:
        return self._name

    def _get_backend(self, device: torch.device) -> SharedMemoryGroup:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    # Splitting: `dist.split_group` ---------------------------------------------------------------

    supports_splitting = True

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> SharedMemoryGroup | None:
        """Makes a group of some of this group's ranks; None on the others, which need not call."""
        if self.rank() not in ranks:
            return None
        part = self._part(ranks, timeout or self._timeout, group_name or "")
        part.setGroupName(group_name or "")
        part.setGroupDesc(group_desc or "")
        return part

    def install_store(self) -> None:
        """Gives torch the group's store if it does not have it yet. Idempotent."""

    # Reductions -----------------------------------------------------------------------------------

    def allreduce(
        self, tensors: Tensors, opts: Any = None, crossing: Crossing | None = None
    ) -> dist.Work:
        """Reduces over all ranks. Sums cross between machines by `crossing`, if given."""
        op, operations = dist.ReduceOp.SUM if opts is None else opts.reduceOp, []
        for tensor in tensors:
            dense = tensor.is_cpu and tensor.layout is torch.strided
            if not dense or tensor.dtype not in REDUCED:
                return self._all_reduce_elsewhere(tensors, opts)
            text, reduction = self._named_reduction(
                tensor.numel(), tensor.dtype, op, caller.op_label
            )
            run = partial(self._reduce, tensor, reduction, crossing)
            prepare = partial(self._reduce.prepare, tensor, crossing)
            operations.append(Operation(text, run, prepare))
        return self._submit("all_reduce", tensors, opts, operations, written=tensors)

    def _all_reduce_elsewhere(self, tensors: Tensors, opts: Any) -> dist.Work:
        """Reduces sparse tensors and other dtypes, in a backend that can."""
        check_memory(self.backend, "all_reduce", written=tensors)
        dtype = tensors[0].dtype
        raise RuntimeError(f"the {self.backend} backend cannot reduce tensors of {dtype}")

    allreduce_coalesced: ClassVar[Callable[..., dist.Work]] = allreduce

    def average_on_machine(self, tensor: torch.Tensor) -> dist.Work:
        """Averages over the ranks of this machine. Collective over the whole group."""
        operation = Operation(f"average_on_machine of {size_of(tensor)}", lambda: [tensor])
        if (size := self._topology.intra_node.size) > 1:
            reduction = Reduction.of(dist.ReduceOp.AVG, tensor.dtype, size)
            operation.run = partial(self._reduce_here, tensor, reduction)
            operation.prepare = partial(self._reduce_here.prepare, tensor)
        return self._submit("average_on_machine", [tensor], None, [operation], written=[tensor])

    def _make_named_reduction(
        self, numel: int, dtype: torch.dtype, op: ReduceOp, op_label: str
    ) -> tuple[str, Reduction]:
        reduction = Reduction.of(op, dtype, self.size())
        return f"all_reduce({reduction.name}) of {numel} x {dtype}{op_label}", reduction

    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        (tensor,), root = tensors, opts.rootRank
        reduction = Reduction.of(opts.reduceOp, tensor.dtype, self.size())
        # Every rank reduces a share. Only the root's tensor may change, so the others use a copy.
        total = tensor if self.rank() == root else torch.empty_like(tensor)

        def prepare() -> str:
            if total is not tensor:
                total.copy_(tensor)
            return self._reduce.prepare(total)

        text = f"reduce({reduction.name}) of {size_of(tensor)} to {root}"
        operation = Operation(text, partial(self._reduce, total, reduction), prepare)
        return self._submit("reduce", tensors, opts, [operation], written=tensors)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> dist.Work:
        operations = [
            self._reduce_scatter(output, parts, opts.reduceOp)
            for output, parts in zip(outputs, inputs, strict=True)
        ]
        read = chain(*inputs)
        return self._submit("reduce_scatter", outputs, opts, operations, read, written=outputs)

    def _reduce_scatter(self, output: torch.Tensor, parts: Tensors, op: ReduceOp) -> Operation:
        rank, size = self.rank(), self.size()
        check_count("reduce_scatter", "input", parts, size)
        check_dtype("reduce_scatter", output, parts)
        if output.numel() != parts[rank].numel():
            raise ValueError(
                f"reduce_scatter needs an output of {parts[rank].numel()} elements on rank "
                f"{rank}, got {output.numel()}"
            )
        reduction = Reduction.of(op, output.dtype, size)
        most = max(part.nbytes for part in parts)

        def prepare() -> str:
            return self._exchange.prepare(parts, most, True, self._exchange.place(parts))

        def run() -> Outputs:
            dense = output.contiguous()
            self._exchange.reduce(parts, dense.view(-1), most, reduction)
            return [write_back(dense, output)]

        return Operation(f"reduce_scatter({reduction.name}) of {size_of(*parts)}", run, prepare)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any
    ) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> dist.Work:
        parts = [input.reshape(-1).tensor_split(self.size()) for input in inputs]
        return self.reduce_scatter(outputs, parts, opts)

    # Copies --------------------------------------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        (tensor,), root = tensors, opts.rootRank
        sent = [tensor] if self.rank() == root else []

        def run() -> Outputs:
            self._exchange.broadcast(tensor, root)
            return [tensor]

        prepare = partial(self._exchange.prepare, sent, tensor.nbytes)
        operation = Operation(f"broadcast of {size_of(tensor)} from {root}", run, prepare)
        return self._submit("broadcast", tensors, opts, [operation], written=tensors)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        operations = []
        for parts, tensor in zip(outputs, inputs, strict=True):
            check_count("all_gather", "output", parts, self.size())
            check_same("all_gather", tensor, [parts[self.rank()]])
            most = max(part.nbytes for part in parts)
            text = f"all_gather of {size_of(*parts)}"
            operations.append(self._copy(text, [tensor], parts, most, parts))
        written = list(chain(*outputs))
        return self._submit("all_gather", inputs, opts, operations, inputs, written=written)

    def allgather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        # torch passes one list per rank here, not one per tensor.
        return self.allgather(list(zip(*outputs, strict=True)), inputs, opts)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        operations = [
            self._all_gather_single(output, tensor)
            for output, tensor in zip(outputs, inputs, strict=True)
        ]
        kind = "all_gather_into_tensor"
        return self._submit(kind, inputs, opts, operations, inputs, written=outputs)

    def _all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor) -> Operation:
        numel = tensor.numel() * self.size()
        if output.numel() != numel or output.dtype != tensor.dtype:
            raise ValueError(
                f"all_gather_into_tensor needs an output of {numel} elements of {tensor.dtype}, "
                f"got {output.numel()} of {output.dtype}"
            )

        def prepare() -> str:
            place = self._exchange.place([output])
            return self._exchange.prepare([tensor], tensor.nbytes, place=place)

        def run() -> Outputs:
            dense = output.contiguous()
            self._exchange.all_gather(tensor, dense.view(-1))
            return [write_back(dense, output)]

        text = f"all_gather_into_tensor of {size_of(output)}{caller.op_label}"
        return Operation(text, run, prepare)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        (tensor,), root = inputs, opts.rootRank
        parts = outputs[0] if outputs else []
        received: Sequence[torch.Tensor | None] = [None] * self.size()
        if self.rank() == root:
            check_count("gather", "output", parts, self.size())
            check_same("gather", tensor, parts)
            received = parts
        sent = [tensor if rank == root else tensor.new_empty(0) for rank in range(self.size())]
        text = f"gather of {size_of(tensor)} to {root}"
        operation = self._copy(text, sent, received, tensor.nbytes, parts, for_each=True)
        return self._submit("gather", inputs, opts, [operation], inputs, written=parts)

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> dist.Work:
        is_root = opts.rootRank == self.rank()
        parts = [output.view(-1).tensor_split(self.size())] if is_root else []
        return self.gather(parts, [input], opts)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> dist.Work:
        (tensor,), root, size = outputs, opts.rootRank, self.size()
        parts = inputs[0] if inputs else []
        if self.rank() == root:
            check_count("scatter", "input", parts, size)
            check_same("scatter", tensor, parts)
        operation = self._copy(
            f"scatter of {size_of(tensor)} from {root}",
            parts if self.rank() == root else [],
            [tensor if rank == root else None for rank in range(size)],
            tensor.nbytes,
            outputs,
            for_each=True,
        )
        return self._submit("scatter", outputs, opts, [operation], parts, written=outputs)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        check_count("all_to_all", "output", outputs, self.size())
        check_count("all_to_all", "input", inputs, self.size())
        operation = self._all_to_all("all_to_all", outputs, inputs, outputs)
        return self._submit("all_to_all", inputs, opts, [operation], inputs, written=outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        kind = "all_to_all_single"
        received = split_rows("output", output, output_splits, self.size())
        sent = split_rows("input", input, input_splits, self.size())
        operation = self._all_to_all(kind, received, sent, [output])
        return self._submit(kind, [input], opts, [operation], [input], written=[output])

    # The names of these methods in torch before 2.14.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _copy(
        self,
        text: str,
        sent: Tensors,
        received: Sequence[torch.Tensor | None],
        most: int,
        result: Tensors,
        for_each: bool = False,
    ) -> Operation:
        def run() -> Outputs:
            self._exchange(sent, received, most, for_each)
            return list(result)

        return Operation(text, run, partial(self._exchange.prepare, sent, most, for_each))

    def _all_to_all(
        self, kind: str, received: Tensors, sent: Tensors, result: Tensors
    ) -> Operation:
        """Copies rank r's `sent[s]` to rank s's `received[r]`. Sizes may differ between pairs."""
        check_dtype(kind, received[0], sent)
        size = self.size()
        # Each pair of ranks has its own size, which a fingerprint equal on all ranks cannot hold.
        numels = [[part.numel() for part in parts] for parts in (sent, received)]
        own = torch.tensor(numels, dtype=torch.int64, device="cpu")

        def run() -> Outputs:
            sizes = own.new_empty(size, 2, size)
            self._exchange([own], sizes.unbind(), own.nbytes)
            by_source, by_target = sizes.unbind(1)
            self._check_pairs(kind, by_source.T, by_target, received[0].dtype)
            most = int(by_source.max()) * received[0].itemsize
            self._exchange(sent, received, most, for_each=True, prepared=False)
            return list(result)

        prepare = partial(self._exchange.prepare, [own], own.nbytes)
        return Operation(f"{kind} of {received[0].dtype}", run, prepare)

    def _check_pairs(
        self, kind: str, sent: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype
    ) -> None:
        """Raises on all ranks where numbers, indexed by target and then by source, differ."""
        names = self._topology.world.world_ranks
        wrong = [
            f"rank {names[source]} sends {sent[target, source]} x {dtype} to rank "
            f"{names[target]}, which expects {expected[target, source]}"
            for target, source in (sent != expected).nonzero().tolist()
        ]
        if wrong:
            raise self.checked_barrier.fail(f"{kind} does not fit: {'; '.join(wrong)}")

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._submit("barrier", [], opts, [Operation("barrier", list)])

    # Memory that ranks share ---------------------------------------------------------------------

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        try:
            return self.empty(size, dtype)
        except CommunicationError as error:
            # The group survives a lack of memory: all ranks get this error and can continue.
            if not isinstance(error.__cause__, NoSharedMemory):
                raise
            if self.checked_barrier.rank == 0:
                text = "gradients lie in ordinary memory, which costs two copies"
                warnings.warn(f"{text}: {error.__cause__}", stacklevel=2)
            return torch.empty(size, dtype=dtype, device="cpu")

    def empty(self, numel: int, dtype: torch.dtype, for_all: bool = False) -> torch.Tensor:
        """Makes a flat uninitialised tensor in memory that a machine's ranks share. Collective."""
        kind, make = f"{self.backend}.empty{'_for_all' * for_all}", self._shared.empty
        operation = Operation(f"{kind}({numel}, {dtype})", lambda: [make(numel, dtype, for_all)])
        work = self._submit(kind, [], None, [operation])
        work.wait()
        (tensor,) = work.result()
        return tensor

    def is_shared(self, tensor: torch.Tensor) -> bool:
        return bool(self._shared.place(tensor))

    def free_unused(self) -> None:
        """Frees memory that this rank no longer uses. Also a barrier. Collective."""
        operation = Operation("free_unused", self._shared.free_unused)
        self._submit("free_unused", [], _AT_ONCE, [operation]).wait()

    def reduce_to_owners(
        self, tensor: torch.Tensor, op: ReduceOp, receive: Receive, label: str
    ) -> None:
        """Runs `AllReduce.to_owners`; all ranks raise if their labels differ. Collective."""
        reduction = Reduction.of(op, tensor.dtype, self.size())
        operation = Operation(
            f"reduce_to_owners({reduction.name}) of {size_of(tensor)} {label}",
            partial(self._reduce.to_owners, tensor, reduction, receive),
            partial(self._shared.place, tensor),
        )
        self._submit("reduce_to_owners", [tensor], _AT_ONCE, [operation], [tensor]).wait()

    # Lifetime ------------------------------------------------------------------------------------

    @property
    def timeout(self) -> timedelta:
        """How long a collective may take."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def _submit(
        self,
        kind: str,
        tensors: Tensors,
        opts: Any,
        operations: Sequence[Operation],
        read: Iterable[torch.Tensor] = (),
        written: Tensors = (),
    ) -> NodeWork:
        """Submits operations under one work handle; errors and the profiler name `tensors`."""
        read = [*read]
        plain = not torch._C._len_torch_dispatch_stack()
        for tensor in (*read, *written):
            keys = torch._C._dispatch_keys(tensor).raw_repr()
            plain = plain and keys == PLAIN and tensor.is_contiguous()
        if not plain:  # most tensors are, and pass the check
            check_memory(self.backend, kind, *read, written=written)
        self.calls += 1  # after the check: a call with invalid arguments gets no number
        sequence, world = self.calls, self._topology.world
        self.checked_barrier.caller = threading.get_ident()
        # Counted in the caller's thread: the order of both groups' calls is that of the program.
        beside = self._beside()
        others = 0
        if beside is not None:
            others = beside._get_sequence_number_for_group()  # type: ignore[attr-defined]
        seconds = self._timeout.total_seconds()
        run = partial(run_in_turn, operations, self.checked_barrier, seconds, others)
        if torch.is_inference_mode_enabled() or any(map(torch.Tensor.is_inference, tensors)):
            run = torch.inference_mode()(run)  # torch forbids writes to such tensors elsewhere
        # A caller that waits at once (`async_op=False`) may run the operations itself, which saves
        # two thread switches. Not across machines: TCP may wait for a lost machine far beyond the
        # timeout, and only a caller that waits for another thread can stop waiting.
        at_once = self._topology.count == 1 and not getattr(opts, "asyncOp", True)
        label = caller.op_label

        def name() -> str:
            size = sum(tensor.nbytes for tensor in tensors)
            rank = world.world_ranks[world.rank]
            return f"{kind} number {sequence} on rank {rank} ({size} bytes){label}"

        work = NodeWork(name, self._timeout, self.checked_barrier)
        if torch.autograd.profiler._is_profiler_enabled:
            at_once = False  # an asynchronous range must end in another thread
            run = _in_range(f"{self.backend}:{kind}", tensors, run)
        return self._worker.submit(work, run, at_once)

    def _free_memory(self) -> None:
        self._reduce.free()
        self._reduce_here.free()  # idempotent: on one machine both are the same object
        self._shared.free_unused()
        self.checked_barrier.free()


def register_backend(name: str, create: Callable[[Any, Any], Any]) -> None:
    """Registers a backend, which makes its groups with `create`, under torch's name for it."""
    # Otherwise torch attaches a recorder to the group's C++ backends, and such a group has none.
    recording: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recording.add(name)
    dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu"])


def _in_range(name: str, tensors: Tensors, run: Callable[[], Outputs]) -> Callable[[], Outputs]:
    """Opens an asynchronous range of torch.profiler, as torch's own backends do; `run` ends it."""
    # Not the handle's future: its waiters could stop the profiler before the range has ended.
    ended: torch.futures.Future[None] = torch.futures.Future()
    with torch.profiler.record_function(name, str([list(t.shape) for t in tensors])) as of_call:
        of_call._call_end_callbacks_on_future(ended)

    def run_and_end() -> Outputs:
        try:
            return run()
        finally:
            ended.set_result(None)

    return run_and_end
