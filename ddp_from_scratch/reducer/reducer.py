"""Averages a module's gradients over ranks while backward still runs: steps 2, 3 and 6.

The order to read in: autograd calls `_on_gradient` for every parameter, which fills buckets and
launches them in order; at the end of the pass it calls `_on_backward_end`, which waits for them.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch.autograd.backward_pass import BackwardPass
from ddp_from_scratch.autograd.graph_walk import GraphWatch
from ddp_from_scratch.autograd.hooks import Hooks
from ddp_from_scratch.autograd.ready_order import ReadyOrder
from ddp_from_scratch.autograd.used_parameters import Usage
from ddp_from_scratch.buckets.bucket import Bucket, CommHook
from ddp_from_scratch.buckets.bucket_list import Buckets
from ddp_from_scratch.buckets.layout import Caps, bucket_caps
from ddp_from_scratch.checks.forward_writes import ForwardWrites, check_rescaling
from ddp_from_scratch.checks.gradient_checks import Guard, trains
from ddp_from_scratch.checks.module_snapshot import Snapshot
from ddp_from_scratch.checks.stall_watch import Progress, StallWatch
from ddp_from_scratch.group import check_group
from ddp_from_scratch.reducer.bucket_tuning import CapSearch
from ddp_from_scratch.reducer.comm_state import Sending
from ddp_from_scratch.sync.buffer_sync import BufferSync
from ddp_from_scratch.sync.check_sync import DriftCheck
from ddp_from_scratch.sync.gradient_weight import Share


class Reducer:
    """All-reduces the gradients of a module in buckets; the module itself stays as it is.

    The phases of one backward pass:

    1. mark ready: a hook on each parameter runs when its `.grad` is complete.
    2. launch: a full bucket is all-reduced asynchronously, once every earlier bucket has been
       launched. The order is that of the bucket's index on every rank, never that of readiness,
       so that all ranks issue the same collectives.
    3. finish: at the end of backward wait for every bucket in order. When `backward()` returns,
       every `.grad` is the average over ranks.

    The average is taken of what `.grad` holds, and averaging is linear: gradients accumulated under
    `no_sync()` are averaged by the next pass outside of it, and a second pass through one graph
    adds to an average and is averaged again. After the first pass the buckets are laid out anew,
    in the order in which rank 0's gradients became ready (torch's DDP: before its second step).

    Args:
        module: its parameters with `requires_grad` are synchronised. All ranks must hold the same
            ones (`broadcast_parameters` checks that). A forward pass that writes to parameters
            makes ranks compare them (`check_every`).
        process_group: the ranks that take part; None means all of them.
        bucket_cap_mb: size in MiB at which a bucket is closed: 0 one bucket for each parameter,
            `inf` one for all; None and a sequence as in `bucket_caps`. "auto" tries several in the
            first averages, with and without overlap, and settles on one (`bucket_tuning.py`).
        overlap: launch buckets during backward. False launches all of them at its end.
        gradient_as_bucket_view: let `.grad` be a window of its bucket rather than a copy. Saves
            most of the memory of the gradients; `.grad` must then not be detached in place, and
            on a CPU that of large ones is None from when it is ready until the average is there.
        find_unused_parameters: parameters may take no part in a backward pass, others on each
            rank. `.grad` of what no rank used stays as it was, elsewhere it becomes the average.
            The buckets keep their first layout.
        static_graph: every backward pass is as the first: what is unused, and how many gradients a
            parameter gets. One that differs raises and names the parameter.
        skip_unused: do not send a bucket none of whose parameters this rank has used since the last
            average; the first sends all. All ranks must use the same ones: otherwise they wait for
            each other.
        broadcast_buffers: at the end of each backward pass that averages all ranks get rank 0's
            buffers (batch norm's running statistics), so that each may evaluate at any time.
        ignore: names of parameters and buffers that are not synchronised.
        check_every: `check_sync` in every so many averages, for the state of optimizers that step
            these parameters, too. None means never, but for forward passes that write to
            parameters: then in the first average, and in every hundredth.
        stall_after: seconds that a step waits before it is reported what for and for which ranks
            (`stall_watch.py`). None means never.
        ready_order: `ready_order` of an earlier run. The buckets are laid out by it at once, so
            that sums are taken in the same order and have the same bits.

    Attributes:
        sync: whether backward passes average. `no_sync()` sets it to False and back.
        sending: the comm hook, and how much this rank counts.
        buffer_sync: sends the buffers.
        ignore: as given.
        on_landed: called with each flat bucket as soon as its averages are in `.grad`.
        iteration: the number of averages so far.

    Raises:
        ValueError: no parameter requires a gradient, this rank is not in the group, or an argument
            is out of its range.
        TypeError: `process_group` is none.
        RuntimeError: no process group is open; from a forward pass, an optimizer's step or
            `backward()`: what `gradient_checks.py` names; from `backward()` on every rank: what has
            drifted apart (`check_every`).

    Follows: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training"
    (VLDB 2020), and torch/csrc/distributed/c10d/reducer.cpp.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        process_group: dist.ProcessGroup | None = None,
        *,
        bucket_cap_mb: Caps = None,
        overlap: bool = True,
        gradient_as_bucket_view: bool = False,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        skip_unused: bool = False,
        broadcast_buffers: bool = False,
        check_every: int | None = None,
        stall_after: float | None = None,
        ignore: Collection[str] = (),
        ready_order: Sequence[str] | None = None,
    ) -> None:
        caps = bucket_caps(bucket_cap_mb)
        snapshot = Snapshot(module, ignore)
        trainable = snapshot.trainable()
        check_group(process_group)
        self._buckets = Buckets(module, trainable, process_group, caps, gradient_as_bucket_view)
        self._search = CapSearch(bucket_cap_mb, overlap, self._buckets, process_group)
        parameters = self._buckets.parameters
        self.module, self.device, self.process_group = module, parameters[0].device, process_group
        self.sync, self.iteration = True, 0
        self.ignore = frozenset(ignore)
        self.sending = Sending(process_group)
        self.buffer_sync = BufferSync(module, process_group, broadcast_buffers, ignore)
        self.on_landed: Callable[[Bucket], None] | None = None

        self._skip_unused = skip_unused
        self._snapshot = snapshot
        self._writes: ForwardWrites | None = None  # one rank cannot differ from others
        if dist.get_world_size(process_group) > 1:
            check_rescaling(module, snapshot.parameters)
            self._writes = ForwardWrites(snapshot.parameters)
        self._lock = threading.Lock()  # autograd has a thread for each device
        self._backward = BackwardPass()
        self._next_bucket = 0  # every bucket before it has been launched
        self._error: RuntimeError | None = None  # for when all buckets have been averaged
        self._order = ReadyOrder(self._buckets.names, ready_order)
        self._buckets.lay_out(self._order.present())
        self._usage = Usage(parameters, process_group, find_unused_parameters, static_graph)
        self._guard = Guard(module, snapshot, self._usage, self._buckets, self._backward)
        self._graphs = GraphWatch(parameters, self._on_enter)
        self._drift = DriftCheck(check_every, module, process_group, ignore)
        self._stall = StallWatch(stall_after, self._progress, process_group)
        called = self._on_gradient, self._before_forward, self._after_forward, self._before_step
        self._hooks = Hooks(module, parameters, *called)

    @property
    def buckets(self) -> tuple[tuple[str, ...], ...]:
        """The names of the parameters of each bucket, in the order of launch."""
        return self._buckets.members()

    @property
    def flat_buckets(self) -> tuple[Bucket, ...]:
        """The buckets of the present layout, in the order of launch, less sparse gradients'."""
        return self._buckets.flat

    @property
    def ready_order(self) -> list[str] | None:
        """The names of the parameters in the order of the final layout, or None."""
        return self._order.final

    @property
    def bucket_cap_mb(self) -> float | Sequence[float] | None:
        """As given (None: what it stands for), or what "auto" has settled on, None until then."""
        return self._search.present.bucket_cap_mb if self._search.settled else None

    @property
    def has_sync_batch_norm(self) -> bool:
        """Whether the module has a batch norm over several ranks, in training mode."""
        return self._guard.has_sync_batch_norm()

    @property
    def overlap(self) -> bool:
        """Whether the next backward pass launches buckets before its end."""
        return self._search.present.overlap

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients are accumulated locally; the next backward outside averages the sum."""
        before = self.sync
        self.sync = False
        try:
            yield
        finally:
            self.sync = before

    def weight(self, amount: float) -> None:
        """Lets this rank's gradients count by `amount` in the next average, then equally again.

        With the number of samples (or tokens) that its loss is the mean over, the result is the
        gradient of the mean over the whole batch. Collective: called on every rank before the
        backward pass. A rank with 0 runs backward, too; what it computes does not matter.

        Raises:
            ValueError: `amount` is negative or not finite; on the other ranks from `backward()`.
            RuntimeError: inside `join()`; on every rank, the amounts differ and the module has
                synchronised batch norm.
        """
        error = self._guard.unequal_weights(self.sending.weigh(amount))
        if error is not None:
            self.sending.count_by(None)
            raise error

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Lets `hook(state, bucket)` average each bucket from now on; see `comm_hooks`.

        One that is not of `ddp.comm_hooks` has one bucket under way at a time.

        Raises:
            RuntimeError: a backward pass is under way, or `CapSearch.check_hook`.
            TypeError: `hook` cannot be called.
        """
        if any(bucket.begun for bucket in self._buckets):
            raise RuntimeError("a comm hook cannot be registered while gradients are under way")
        self._search.check_hook(hook)
        self.sending.send_by(hook, state)

    def set_static_graph(self) -> None:
        """As `static_graph=True`, from the next backward pass on. Idempotent."""
        self._usage.set_static()

    def contribute_nothing(self, share: Share) -> None:
        """Takes part in the others' next average, with a share of 0; `.grad` stays as it is."""
        self.sending.count_by(share)
        self._buckets.mark_rest_absent()
        self._launch_full_buckets()
        self._await_hook()
        self._finish(unpack=False)

    def remove(self) -> None:
        """Takes every hook off the module, whose gradients are local from then on. Idempotent."""
        self._hooks.remove()
        self._graphs.stop()

    # 1. mark ready ------------------------------------------------------------------------------

    def _on_gradient(self, index: int) -> None:
        """The `.grad` of parameter `index` is complete. Called by autograd (`hooks.py`)."""
        gradient = self._buckets.parameters[index].grad
        if gradient is None:  # an undefined gradient: backward came by and brought nothing
            return
        with self._lock:
            bucket = self._buckets.of(index)
            if bucket.launched and not self.sync:
                raise self._guard.second_gradient(index)
            self._usage.note(index)
            if not self.sync:
                return
            if gradient.is_sparse or gradient.requires_grad:
                self._guard.check_gradient(index, gradient)
            # What may be unused is told at the end of the outermost pass, whose beginning we saw.
            if not (self._usage.may_be_unused and self._backward.begun):
                self._backward.begin(self._on_backward_end, self._buckets.hold)
            self._order.count(index)
            if not self._usage.count(index):
                return
            if bucket.launched:  # not raised yet: other ranks count on this rank's other buckets
                self._error = self._guard.second_gradient(index)
            elif bucket.mark_ready(index, self.sending.multiplier()):
                self._launch_early()

    def _on_enter(self, unreached: set[int]) -> None:
        """A backward pass has come to an output of the module, and will not reach these."""
        with self._lock:
            if not self.sync or self._backward.is_this:
                return
            self._backward.begin(self._on_backward_end, self._buckets.hold)
            for index in self._usage.unused(unreached):
                self._buckets.of(index).mark_absent(index)
            self._launch_early()

    # 2. launch ----------------------------------------------------------------------------------

    def _launch_early(self) -> None:
        """During backward: launches what is full, unless that is to wait for its end."""
        # Synchronised batch norm has collectives in backward. Two kinds of ours would come before
        # them on one rank and after them on another: those that a hook starts when others have
        # landed, and those of buckets that are full early where their parameters are unused.
        varies = self._usage.may_be_unused or not self.sending.may_overlap()
        if self.overlap and not (varies and self._layers_communicate()):
            self._launch_full_buckets()

    def _layers_communicate(self) -> bool:
        """Whether layers have collectives in the Reducer's own group."""
        ours = self.process_group or dist.group.WORLD
        found = (layer.process_group or dist.group.WORLD for layer in self._snapshot.communicating)
        return any(group is ours for group in found)

    def _launch_full_buckets(self) -> None:
        """Launches, in order, up to the first bucket that is not full. Idempotent."""
        while self._next_bucket < len(self._buckets):
            bucket = self._buckets[self._next_bucket]
            if bucket.missing:
                return
            self._await_hook()
            if not (self._skip_unused and self._usage.none_of(bucket.layout.members)):
                bucket.launch(*self.sending.way())
            self._next_bucket += 1

    def _await_hook(self) -> None:
        """Lets a hook that starts several collectives, one after the other, come to its last."""
        if self._next_bucket and not self.sending.may_overlap():
            self._buckets[self._next_bucket - 1].wait()

    # 3. finish ----------------------------------------------------------------------------------

    def _on_backward_end(self) -> None:
        """Autograd's callback: launches what is left, waits for each bucket in order, unpacks.

        Where gradients are still missing nothing is unpacked: a later backward pass may bring
        them (a loss computed in parts, reentrant checkpointing), or else the next forward raises.
        Where parameters may be unused, what is missing now is unused in this pass.
        Idempotent: called again after the last bucket was unpacked, it does nothing.
        """
        if not self._backward.end():
            return
        if self._usage.may_be_unused:
            self._buckets.mark_rest_absent()
        self._launch_full_buckets()
        self._await_hook()
        if self._next_bucket < len(self._buckets):
            self._buckets.hold()
            return
        error, self._error = self._error, None
        self._finish(unpack=error is None)
        if error is not None:
            raise error
        self._guard.check_static(self._usage.end_pass())

    def _finish(self, unpack: bool = True) -> None:
        if not self.sending.joining:  # which has sent them before forward
            self.buffer_sync.launch()
        used = self._usage.agree()
        for bucket in self._buckets:
            bucket.finish(used if unpack else ())
            self._stall.on_finish(self.iteration, bucket)
            if unpack and self.on_landed is not None and isinstance(bucket, Bucket):
                self.on_landed(bucket)
        self.buffer_sync.finish()
        self._next_bucket = 0
        self.sending.end()
        self.iteration += 1
        # Here and not before a forward pass, which may be one rank's own affair (an evaluation):
        # every rank is known to take part.
        if self.ready_order is None and not self._usage.varies:
            self._buckets.lay_out(self._order.agree(self.device, self.process_group))
        elif not self._search.settled:
            self._search.on_average(self._order.present())
        written = self._writes is not None and bool(self._writes.names)
        self._drift.on_average(self.iteration, is_current=unpack, written=written)

    # Around forward, and before a step -----------------------------------------------------------

    def check_forward(self) -> None:
        """Raises if the forward pass that begins, one of training, would not be averaged right."""
        self._guard.check_forward()

    def _before_forward(self) -> None:
        self.check_forward()
        if self._writes is not None:
            self._writes.on_enter(trains(self.module))

    def _after_forward(self, outputs: object) -> None:
        if self._writes is not None:
            written = self._writes.on_exit()
            if written and self.iteration and not self._drift.on:
                raise self._guard.written_late(written)
        if self._usage.may_be_unused:
            self._graphs.on_forward(outputs, as_before=self._usage.is_static)

    def check_complete(self) -> None:
        """Raises unless every gradient of the last backward pass has been averaged."""
        self._guard.check_complete()

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.check_complete()
        self._drift.on_step(optimizer)

    def _progress(self) -> Progress:
        buckets = tuple(self._buckets)  # called in a thread: they may be laid out anew meanwhile
        return Progress.of(self.iteration, self._next_bucket, buckets, self._buckets.names)
