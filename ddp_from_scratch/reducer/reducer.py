"""Averages a module's gradients over ranks while backward still runs.

The way of one gradient, from top to bottom: `_on_gradient` (ready), `_launch_full_buckets` (pack,
launch), `_on_backward_end` and `_finish` (wait, unpack).
"""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch.autograd.backward_pass import BackwardPass, PassState
from ddp_from_scratch.autograd.fused_wgrad import FusedWgrad
from ddp_from_scratch.autograd.hooks import Hooks
from ddp_from_scratch.buckets.bucket import Bucket
from ddp_from_scratch.buckets.bucket_list import BucketList
from ddp_from_scratch.buckets.gradient_bucket import (
    BucketState,
    CommHook,
    GradientBucket,
    LaunchArgs,
)
from ddp_from_scratch.buckets.layout import AUTO, Caps, bucket_caps
from ddp_from_scratch.buckets.observer import Observer
from ddp_from_scratch.checks.gradient_checks import GradientChecks
from ddp_from_scratch.checks.module_snapshot import ModuleSnapshot
from ddp_from_scratch.group import check_group
from ddp_from_scratch.reducer import launch_order
from ddp_from_scratch.reducer.bucket_tuning import DEFAULT, BucketTuning
from ddp_from_scratch.reducer.comm_state import CommState
from ddp_from_scratch.reducer.profiler_ranges import ProfilerRanges, profiling
from ddp_from_scratch.reducer.stats import ReducerStats
from ddp_from_scratch.shards.shards import Shards
from ddp_from_scratch.sync.buffer_sync import BufferSync
from ddp_from_scratch.sync.check_sync import EVERY_AFTER_WRITES, DriftCheck
from ddp_from_scratch.sync.gradient_weight import GradientWeight
from ddp_from_scratch.watch.stall import Progress, StallWatch
from ddp_from_scratch.watch.stragglers import StragglerReport, StragglerWatch


class Reducer:
    """All-reduces the gradients of a module in buckets; the module itself stays as it is.

    The phases of one backward pass:

    - ready: a hook on each parameter runs when its `.grad` is complete, and marks it ready.
    - pack and launch: a full bucket is copied into one flat tensor and all-reduced asynchronously,
      once every earlier bucket has been launched. The order is that of the buckets' index on every
      rank, never that of readiness, so that all ranks issue the same collectives.
    - wait and unpack: at the end of backward, for every bucket in order. When `backward()` returns,
      every `.grad` is the average over ranks.

    The whole `.grad` is averaged, also gradients that were accumulated under `no_sync()` before. So
    a second pass through one graph, which adds to an average, is averaged again. After the first
    pass the buckets are laid out again, in the order in which rank 0's gradients became ready.

    Args:
        module: its parameters with `requires_grad` are synchronised. All ranks must hold the same
            ones (`broadcast_parameters` checks that). A forward pass that writes to parameters
            makes ranks compare them (`check_every`).
        process_group: the ranks that take part; None means all.
        bucket_cap_mb: size in MiB at which a bucket is closed: 0 one bucket for each parameter,
            `inf` one for all; None and a sequence as in `bucket_caps`. "auto" tries several in the
            first averages, with and without overlap, and settles on one (`bucket_tuning.py`).
        overlap: launch buckets during backward. False launches all of them at its end.
        gradient_as_bucket_view: let `.grad` be a window of its bucket rather than a copy. Saves
            most of the memory of the gradients. `.grad` must then not be detached in place, and on
            a CPU a large `.grad` is None from when it is ready until the average is there.
        find_unused_parameters: parameters may take no part in a backward pass, different ones on
            each rank. The `.grad` of a parameter that no rank used stays as it was; others become
            the average. The buckets keep their first layout.
        static_graph: every backward pass is as the first: the same unused parameters, and as many
            gradients for each parameter. A pass that differs raises and names the parameter.
        skip_unused: skip a bucket if this rank has used none of its parameters since the last
            average; the first average skips none. All ranks must use the same parameters, or they
            wait for each other.
        broadcast_buffers: give all ranks rank 0's buffers (batch norm's running statistics) at the
            end of each backward pass that averages, so that each rank may evaluate at any time.
        shared_memory: on a gloo group, reduce in memory that the ranks of a machine share, and send
            between machines alone, where two of them share a machine (Linux). Sums are then taken
            in the order of ranks: with more than 2 ranks their last bits are not gloo's.
        fuse_wgrad: compute the gradients of large linear layers and embeddings into their buckets,
            without a copy (`FusedWgrad`). On a CPU alone. Implies `gradient_as_bucket_view`.
        ignore: names of parameters and buffers that are not synchronised.
        check_every: run `check_sync` in every so many averages, also for the state of optimizers
            that step these parameters. None means never, unless forward passes write to parameters:
            then in the first average, and in every hundredth.
        stall_after: seconds after which a step that waits is reported, with the ranks it waits for
            (`watch/stall.py`). None means never.
        straggler_every: print on rank 0, in every so many averages, which rank the others waited
            for, how often, how long, and in which phase (`watch/stragglers.py`). None means never.
        ready_order: `ready_order` of an earlier run. The buckets are laid out by it at once, so
            that sums are taken in the same order and have the same bits.
        shards: a power of two. A step's batch is this many equal shards, each rank runs those of
            `shard_range`, and their gradients are summed along a fixed tree (`shards/`): the
            same bits on any number of ranks. Implies `broadcast_buffers`; buckets keep their
            layout.

    Attributes:
        module, process_group, ignore: as given.
        device: the device of the parameters.
        sync: True if backward passes average. `no_sync()` sets it to False and back.
        joining: True inside `join()`, which sets the weights.
        iteration: the number of averages so far.
        comm: the comm hook, and this rank's weight.
        checks: checks of forward passes, steps and gradients.
        buffer_sync: synchronises the buffers.

    Raises:
        ValueError: no parameter requires a gradient, this rank is not in the group, or an argument
            is out of its range.
        TypeError: `process_group` is not a process group.
        RuntimeError: no process group is open. From a forward pass, an optimizer's step or
            `backward()`: see `GradientChecks`. From `backward()` on every rank: ranks have drifted
            apart (`check_every`).

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
        straggler_every: int | None = None,
        shared_memory: bool = True,
        fuse_wgrad: bool = False,
        ignore: Collection[str] = (),
        ready_order: Sequence[str] | None = None,
        shards: int | None = None,
    ) -> None:
        caps = bucket_caps(bucket_cap_mb)
        snapshot = ModuleSnapshot(module, ignore)
        trainable = snapshot.trainable()
        check_group(process_group)
        on_cpu = all(parameter.device.type == "cpu" for parameter in trainable.values())
        if fuse_wgrad and not on_cpu:
            raise ValueError("fuse_wgrad needs all parameters on a CPU: leave it out")
        self.comm = CommState(process_group, overlap, shared_memory and on_cpu)
        as_view = gradient_as_bucket_view or fuse_wgrad
        # Memory of a group ends with it, and shards may go on in another group.
        memory_of = None if shards else self._memory_of()
        name = launch_order.next_name(memory_of)
        self._buckets = BucketList(module, trainable, process_group, caps, as_view, memory_of, name)
        parameters = self._buckets.parameters
        self.module, self.device, self.process_group = module, parameters[0].device, process_group
        self.sync, self.joining, self.iteration = True, False, 0
        self.ignore = frozenset(ignore)
        self._pass = BackwardPass(
            parameters,
            self._buckets.names,
            find_unused=find_unused_parameters,
            static_graph=static_graph,
            skip_unused=skip_unused,
            # With shards the layout is final: an average that failed on some ranks changes nothing.
            ready_order=ready_order or (self._buckets.names[::-1] if shards is not None else None),
            on_enter=self._on_enter,
            at_end=self._on_backward_end,
            broken_off=self._on_broken_off,
        )
        self._buckets.lay_out(self._pass.order.present())
        self.checks = GradientChecks(module, snapshot, self._pass, self._buckets, process_group)
        self._skip_unused = skip_unused
        # Autograd has a thread for each device, and hooks run in all of them.
        self._lock = threading.Lock()
        # Every bucket before this index has been launched. Reset when all are unpacked.
        self._next_bucket = 0
        # An error of this rank alone. Raised when all buckets have been averaged: until then other
        # ranks count on this one.
        self._error: RuntimeError | None = None

        # Observers are called in this order: buffers and layout first, comparisons last. An option
        # that is off adds none, so it costs nothing.
        self._observers: list[Observer] = []
        self.buffer_sync = BufferSync(module, process_group, ignore)
        self.set_broadcast_buffers(broadcast_buffers or shards is not None)
        self._shards: Shards | None = None
        if shards is not None:
            if bucket_cap_mb == AUTO:
                raise ValueError('bucket_cap_mb="auto" cannot be used with shards=V')
            looks = self.checks.sync_batch_norms, self.buffer_sync.named
            self._shards = Shards(shards, self._buckets, *looks, process_group, fuse_wgrad)
            self.comm.fix_hook(self._shards.reduction.average, process_group)
            self._observers.append(self._shards)
        self._bucket_cap_mb: Any = DEFAULT if bucket_cap_mb is None else bucket_cap_mb
        self._tuning: BucketTuning | None = None
        if bucket_cap_mb == AUTO:
            self._tuning = BucketTuning(self._buckets, self.comm, self._pass.order, process_group)
            self._observers.append(self._tuning)
        if stall_after is not None:
            self._observers.append(StallWatch(stall_after, self._progress, process_group))
        if straggler_every is not None:
            self.watch_stragglers(straggler_every)
        self._drift: DriftCheck | None = None
        if check_every is not None:
            self._compare_ranks(check_every)
        # None unless torch.profiler records.
        self._ranges: ProfilerRanges | None = None
        self._fused: FusedWgrad | None = None
        if fuse_wgrad:
            index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
            self._fused = FusedWgrad(module, index_of, self._claim)
        called = self._on_gradient, self._before_forward, self._after_forward, self._before_step
        self._hooks = Hooks(module, parameters, *called)
        # The Reducers that launch before this one in a pass, with their iteration; and the pass.
        self._ahead: tuple[int, dict[Reducer, int]] = (-1, {})
        launch_order.add(self, memory_of)

    def _memory_of(self) -> dist.ProcessGroup | None:
        """The group that may offer the buckets' memory. Collective where `CommState.group` is."""
        return self.comm.group()

    def __repr__(self) -> str:
        return f"Reducer({self.stats()})"

    @property
    def buckets(self) -> tuple[tuple[str, ...], ...]:
        """The names of the parameters of each bucket, in the order of launch."""
        return self._buckets.members()

    @property
    def flat_buckets(self) -> tuple[Bucket, ...]:
        """The present buckets in the order of launch, without those of sparse gradients."""
        return self._buckets.flat

    @property
    def ready_order(self) -> list[str] | None:
        """The names of the parameters in the order of the final layout; None before it."""
        return self._pass.order.final

    @property
    def bucket_cap_mb(self) -> float | Sequence[float] | None:
        """The cap as given, or the choice of "auto"; None until "auto" has settled."""
        if self._tuning is None:
            return self._bucket_cap_mb  # type: ignore[no-any-return]
        return self._tuning.present.bucket_cap_mb if self._tuning.settled else None

    @property
    def overlap(self) -> bool:
        """True if the next backward pass launches buckets before its end."""
        return self.comm.overlap

    def stats(self) -> ReducerStats:
        """Returns settings, buckets and their sizes at this moment."""
        used, hook = self._pass.used, self.comm.hook
        return ReducerStats(
            bucket_bytes=tuple(
                sum(parameter.nbytes for parameter in bucket.parameters())
                for bucket in self._buckets.all
            ),
            bucket_cap_bytes=max(self._buckets.caps),
            parameters=len(self._buckets.parameters),
            parameter_bytes=sum(parameter.nbytes for parameter in self._buckets.parameters),
            iteration=self.iteration,
            rebuilt=self.ready_order is not None,
            overlap=self.overlap,
            gradient_as_bucket_view=self._buckets.gradient_as_bucket_view,
            find_unused_parameters=self._pass.varies,
            static_graph=used is not None and used.is_static,
            comm_hook=getattr(hook, "__qualname__", str(hook)),
            transport=self.comm.transport,
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates gradients locally inside; the next backward outside averages the sum."""
        # Restored and not set to True: contexts may be nested.
        before = self.sync
        self.sync = False
        try:
            yield
        finally:
            self.sync = before

    def weight(self, amount: float) -> None:
        """Weighs this rank's gradients by `amount` in the next average alone. Collective.

        Give the number of samples (or tokens) that this rank's loss is the mean over; the result is
        then the gradient of the mean over the whole batch. Call it on every rank before the
        backward pass. A rank with amount 0 runs backward, too; the values of its gradients do not
        matter.

        Raises:
            ValueError: `amount` is negative or not finite; on the other ranks from `backward()`.
            RuntimeError: inside `join()`; or, on every rank, the amounts differ and the module has
                synchronised batch norm.
        """
        if self.joining:
            raise RuntimeError("weight() cannot be used inside join(), which weighs ranks itself")
        weight = self.comm.agree_weight(amount)
        self.comm.set_weight(weight)
        try:
            self.checks.check_weight(weight)
        except RuntimeError:
            self.comm.set_weight(None)
            raise

    @property
    def shard_count(self) -> int:
        """The shards of a step on all ranks together."""
        return self._with_shards().count

    @property
    def shard_range(self) -> range:
        """The shards that this rank runs in a step of the present group, in this order."""
        return self._with_shards().range()

    def shard(self, index: int) -> AbstractContextManager[None]:
        """Runs shard `index` inside: forward, and one backward pass outside of `no_sync()`."""
        return self._with_shards().run(index, self)

    def run_shards(self, function: Callable[[int], object]) -> None:
        """Calls a function for each of `shard_range`, as if inside `shard(i)`.

        With synchronised batch norm the shards of a rank run in lock step, each in a thread of its
        own and one at a time, and take the moments of all shards. Then the function should set
        what torch keeps for each thread (autocast aside), and all graphs are there at once.

        Raises:
            RuntimeError: shards run different layers.
        """
        self._with_shards().run_all(function, self)

    def set_step(self, step: int, seed: int | None = None) -> None:
        """Goes on with shards from `step`, the number of steps before it. Alike on all ranks.

        Between two steps. The ranks may be others than before.

        Args:
            step: from 0.
            seed: of the generators; None leaves it, 0 at the start.
        """
        self._with_shards().set_step(step, seed)
        self.iteration = step
        self._pass.drop()
        for observer in self._observers:
            observer.on_set_step()

    def _with_shards(self) -> Shards:
        if self._shards is None:
            raise RuntimeError("this Reducer has no shards: make it with shards=V")
        return self._shards

    def abort_step(self) -> None:
        """Forgets a step that failed before the optimizer's: it may be repeated. Idempotent."""
        self._pass.drop()
        self._buckets.reset()
        self.comm.set_weight(None)
        self._next_bucket, self._error = 0, None
        for observer in self._observers:
            observer.on_abort()
        if self._shards is not None:
            self.iteration = self._shards.step

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Averages each bucket with `hook(state, bucket)` from now on; see `comm_hooks`.

        With a hook that may start a second collective (PowerSGD, or one of your own), one bucket
        is under way at a time. `hook.one_collective = True` declares that yours starts one alone.

        Raises:
            RuntimeError: a backward pass is under way, or see `BucketTuning.check_hook`.
            TypeError: `hook` is not callable.
        """
        if any(bucket.begun for bucket in self._buckets.all):
            raise RuntimeError("a comm hook cannot be registered while gradients are under way")
        if self._tuning is not None:
            self._tuning.check_hook(hook)
        self.comm.set_hook(hook, state)

    def keep_bucket_views(self) -> None:
        """Acts as `gradient_as_bucket_view=True` from now on. Idempotent.

        A `.grad` that is there keeps its memory until the next average.

        Raises:
            RuntimeError: gradients are under way.
        """
        if any(bucket.begun for bucket in self._buckets.all):
            raise RuntimeError("gradients that are under way cannot move into their buckets")
        self._buckets.keep_views()

    def set_static_graph(self) -> None:
        """Acts as `static_graph=True` from the next forward pass on. Idempotent.

        Must be called on all ranks alike. A graph that is alive already may raise when it goes
        backward, if it has reentrant checkpoints.
        """
        self._pass.set_static()

    def set_broadcast_buffers(self, enabled: bool) -> None:
        """Sets `broadcast_buffers` from now on. Must be called on all ranks alike."""
        self.buffer_sync.enable(enabled)
        # It stays once it was there: a hook may have begun what the next average waits for.
        if enabled and self.buffer_sync not in self._observers:
            self._observers.insert(0, self.buffer_sync)

    def watch_stragglers(
        self, every: int, tell: Callable[[StragglerReport], None] | None = None
    ) -> None:
        """Acts as `straggler_every` from now on, and calls `tell` with each report, on every rank.

        Without `tell` rank 0 prints it. Must be called on all ranks alike.
        """
        group, communicate = self.process_group, self.checks.layers_communicate
        self.add_observer(StragglerWatch(every, self.device, group, communicate, tell))

    def add_observer(self, observer: Observer) -> None:
        """Calls this observer at each step of the averages from now on."""
        self._observers.append(observer)

    def remove_observer(self, observer: Observer) -> None:
        """Stops calling this observer."""
        self._observers.remove(observer)

    def remove(self) -> None:
        """Removes every hook from the module, whose gradients then stay local. Idempotent."""
        self._hooks.remove()
        if self._fused is not None:
            self._fused.remove()
        self._pass.stop()
        launch_order.remove(self)

    # Ready --------------------------------------------------------------------------------------

    def _on_gradient(self, index: int) -> None:
        """Marks parameter `index` ready: its `.grad` is complete. Called by autograd."""
        gradient = self._buckets.parameters[index].grad
        if gradient is None:
            # Autograd calls the hook also for an undefined gradient.
            return
        if self._fused is not None:
            self._fused.on_gradient(index)
        with self._lock:
            bucket = self._buckets.bucket_of[index]
            filling = bucket.state is BucketState.FILLING
            if not filling and not self.sync:
                raise self.checks.second_gradient(index)
            if self._pass.used is not None:
                # Before the return below: gradients under no_sync() are averaged later, and count
                # as used.
                self._pass.used.on_gradient(index)
            if not self.sync:
                return
            if gradient.is_sparse or gradient.requires_grad:
                self.checks.check_gradient(index, gradient)
            if not self._pass.on_gradient(index):
                return
            if not filling:
                # Not raised yet: other ranks count on this rank's other buckets.
                self._error = self.checks.second_gradient(index)
                return
            if bucket.early is not None:
                bucket.early.pack_one(index, self._launch_args().scale)
            if bucket.mark_ready(index) and self._may_launch_early():
                self._launch_full_buckets()

    def _claim(self, index: int) -> torch.Tensor | None:
        """Returns the window of a gradient that backward may compute there; see `FusedWgrad`."""
        bucket = self._buckets.bucket_of[index]
        may_write = bucket.state is BucketState.FILLING and index in bucket.missing
        return bucket.early.claim(index) if may_write and bucket.early is not None else None

    def _on_enter(self, unreached: set[int]) -> None:
        """Marks unreached parameters unused, as a backward pass enters the graph of an output."""
        with self._lock:
            if not self.sync or self._pass.is_current() or self._pass.used is None:
                return
            self._pass.begin()
            for index in self._pass.used.unused(unreached):
                self._buckets.bucket_of[index].mark_unused(index)
            if self._may_launch_early():
                self._launch_full_buckets()

    def _may_launch_early(self) -> bool:
        """True if full buckets are launched now, during backward, and not at its end."""
        if not self.comm.overlap or not self._is_next():
            return False
        if self._shards is not None and self._shards.in_lock_step:
            # Other shards of this rank are in backward, too.
            return False
        # Synchronised batch norm has collectives in backward, and all ranks must issue all
        # collectives in the same order. Two kinds of ours have no fixed place among them: those of
        # a hook that starts several, and those of a bucket that is full earlier on one rank, since
        # parameters are unused there.
        return all(map(Reducer._is_fixed, [self, *self._ahead[1]])) or not any(
            r.checks.layers_communicate() and r.takes_part() for r in launch_order.living()
        )

    def _is_fixed(self) -> bool:
        return self.comm.several_at_once and not self._pass.may_be_unused

    def takes_part(self) -> bool:
        """True if this Reducer averages in the backward pass that autograd is executing."""
        return self.sync and (self._pass.state is PassState.RUNNING or self._pass.will_run())

    def _is_next(self) -> bool:
        """True if the Reducers that come first in this pass have launched all their buckets."""
        if launch_order.is_alone():
            return True
        if self._pass.may_be_unused and self._pass.hides_parameters:
            # What the checkpoint hides is known at the end, and another Reducer's may be among it.
            return False
        if any(self._pass.is_inside(other._pass) for other in launch_order.living()):
            return False  # another inner pass may add to these gradients
        number, ahead = self._ahead
        if number != self._pass.number:
            ahead = {other: other.iteration for other in launch_order.ahead_of(self)}
            self._ahead = self._pass.number, ahead
        for other, iteration in ahead.items():
            if other.iteration == iteration and other._next_bucket < len(other._buckets.all):
                return False
            other._await_hook()
        return True

    # Pack, launch -------------------------------------------------------------------------------

    def _launch_full_buckets(self) -> None:
        """Launches buckets in order, up to the first that is not full. Idempotent."""
        buckets = self._buckets.all
        # By index and not by readiness, which differs between ranks: all must issue the same
        # collectives in the same order.
        while self._next_bucket < len(buckets) and not buckets[self._next_bucket].missing:
            bucket = buckets[self._next_bucket]
            if not self.comm.several_at_once:
                self._await_hook()
            if not (self._skip_unused and self._is_unused(bucket)):
                for observer in self._observers:
                    observer.on_launch(bucket)
                # A hook may raise. Observers that have begun something end it all the same.
                try:
                    on_packed = self._on_packed if self._observers else None
                    bucket.launch(self._launch_args(), on_packed)
                finally:
                    for observer in self._observers:
                        observer.on_launched(bucket)
            self._next_bucket += 1

    def _on_packed(self, bucket: GradientBucket) -> None:
        for observer in self._observers:
            observer.on_packed(bucket)

    def _launch_args(self) -> LaunchArgs:
        """The arguments of this average's launches, kept until the hook, weight or group change."""
        args = self.comm.args
        # A program may close the default group and open another one.
        if args is None or args.group() is not (self.process_group or dist.group.WORLD):
            for observer in self._observers:
                observer.on_agree()
            args = self.comm.agree_args()
            for observer in self._observers:
                observer.on_agreed()
        return args

    def _is_unused(self, bucket: GradientBucket) -> bool:
        return self._pass.used is not None and self._pass.used.none_of(bucket.layout.members)

    def _await_hook(self) -> None:
        """Waits until a hook that starts several collectives has finished the last bucket."""
        if self._next_bucket and not self.comm.several_at_once:
            self._wait(self._buckets.all[self._next_bucket - 1])

    # Wait, unpack -------------------------------------------------------------------------------

    def _on_backward_end(self) -> None:
        """Ends the pass for all Reducers in it. Called by autograd when the pass is over.

        Idempotent: does nothing if no pass is under way, or another Reducer has ended it.
        """
        if self._pass.state is PassState.IDLE:
            return
        reducers = launch_order.living()
        for other in reducers:
            if self._pass.is_inside(other._pass):
                # Its buckets may come first, and on another rank may have been launched by now.
                self._pass.end_with(other._pass)
                self._buckets.restore_grads()
                return
        together = [r for r in reducers if r._pass.is_same(self._pass)]
        if self not in together:  # removed in the middle of the pass
            together.append(self)
        # Everything is launched before anything is waited for: finishing has collectives, too.
        complete = [r for r in together if r._launch_rest()]
        # Averaged first, then raised: the other ranks' averages need this rank's buckets.
        errors = [error for r in complete if (error := r._finish_pass()) is not None]
        if errors:
            raise errors[0]

    def _launch_rest(self) -> bool:
        """Ends the pass and launches the rest; True if all buckets are under way."""
        self._pass.end()
        self._ahead = (-1, {})
        if self._pass.may_be_unused:
            self._buckets.mark_rest_unused()
        if self._next_bucket < len(self._buckets.all):
            self._launch_full_buckets()
        if not self.comm.several_at_once:
            self._await_hook()
        if self._next_bucket < len(self._buckets.all):
            # Gradients are missing, so nothing is unpacked. A later pass may bring them (a loss
            # computed in parts, reentrant checkpointing), or else the next forward pass raises.
            self._buckets.restore_grads()
            return False
        return True

    def _finish_pass(self) -> RuntimeError | None:
        """Finishes the average; returns the error of this rank alone."""
        error, self._error = self._error, None
        self._finish(takes_part=error is None)
        if error is None and self._pass.used is not None:
            error = self.checks.static_error(self._pass.used.end_pass())
        return error

    def _on_broken_off(self, number: int) -> None:
        """Restores gradients after an exception in a pass. Called before `backward()` raises it."""
        self._buckets.restore_grads()
        self._pass.break_off(number)
        for reducer in launch_order.living():
            if reducer._pass.break_off(number):  # which had joined the pass
                reducer._buckets.restore_grads()
            reducer._ahead = (-1, {})

    def _finish(self, takes_part: bool) -> None:
        """Waits for each bucket in order and unpacks it, but not on a rank that takes no part."""
        for observer in self._observers:
            observer.on_all_launched()
        used = None if self._pass.used is None else self._pass.used.agree(self.comm.group())
        for bucket in self._buckets.all:
            self._wait(bucket)
            bucket.finish(used if takes_part else ())
            for observer in self._observers:
                observer.on_finished(self.iteration, bucket, takes_part)
        self._next_bucket = 0
        if self.comm.weight is not None:
            # A weight holds for one average.
            self.comm.set_weight(None)
        self.iteration += 1
        # Agreed here and not before a forward pass, which may be one rank's own (an evaluation):
        # here every rank takes part.
        if self._pass.order.final is None and not self._pass.varies:
            self._buckets.lay_out(self._pass.order.agree(self.device, self.process_group))
        if self.iteration == 1 and self._drift is None and self.checks.any_written():
            self._compare_ranks(EVERY_AFTER_WRITES, after_writes=True)
        for observer in tuple(self._observers):
            observer.on_average(self.iteration, takes_part)

    def _wait(self, bucket: GradientBucket) -> None:
        for observer in self._observers:
            observer.on_wait(bucket)
        try:
            bucket.wait()
        finally:
            for observer in self._observers:
                observer.on_waited(bucket)

    # In join() ----------------------------------------------------------------------------------

    def set_joining(self, joining: bool) -> None:
        """Leaves weights and buffers to `join()` while `joining` is True."""
        self.joining = joining
        self.buffer_sync.set_joining(joining)

    def contribute_nothing(self, weight: GradientWeight) -> None:
        """Takes part in the others' next average with weight 0; `.grad` stays as it is."""
        self.comm.set_weight(weight)
        self._buckets.mark_rest_unused()
        self._launch_full_buckets()
        self._await_hook()
        self._finish(takes_part=False)

    # Around forward, and before a step ----------------------------------------------------------

    def prepare_backward(self, outputs: object) -> None:
        """Looks for unused parameters in the graph of these tensors, where backward will begin."""
        self._pass.on_forward(outputs)

    def _before_forward(self, module: torch.nn.Module, inputs: object) -> None:
        if self._fused is not None:
            self._fused.before_forward()
        if profiling() != (self._ranges is not None):
            self._show_profiler(profiling())
        self.checks.before_forward()
        for observer in self._observers:
            observer.on_forward()

    def _after_forward(self, module: torch.nn.Module, inputs: object, outputs: object) -> None:
        self.checks.after_forward(compared=self.iteration == 0 or self._drift is not None)
        self._pass.on_forward(outputs)
        for observer in self._observers:
            observer.on_forwarded(outputs)

    def _show_profiler(self, recording: bool) -> None:
        """Shows torch.profiler the buckets, or ends that."""
        if self._ranges is not None:
            self.remove_observer(self._ranges)
        self._ranges = None
        if recording:
            names = zip(self._buckets.parameters, self._buckets.names, strict=True)
            self._ranges = ProfilerRanges({id(parameter): name for parameter, name in names})
            self.add_observer(self._ranges)

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.checks.check_complete()
        for observer in self._observers:
            observer.on_step(optimizer)

    def _compare_ranks(self, every: int, after_writes: bool = False) -> None:
        self._drift = DriftCheck(every, self.module, self.process_group, self.ignore, after_writes)
        self._observers.append(self._drift)

    def _progress(self) -> Progress:
        # Read once: another thread calls this, and the buckets may be laid out again meanwhile.
        buckets = self._buckets.all
        return Progress.of(self.iteration, self._next_bucket, buckets, self._buckets.names)
